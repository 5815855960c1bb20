"""LayerStreamer: each layer's weights on the compute device, in order, wherever they wait."""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch
from torch import Tensor

from penstock.memory.device import Device
from penstock.memory.direct_io import PopulatedAhead, aligned_buffer, round_up
from penstock.memory.pools import MemoryPool
from penstock.metrics import Traffic
from penstock.weights.readers import LinkReader
from penstock.weights.store import LayerWeights, WeightStore
from penstock.weights.tier import LayerReader, LayerTier


class LayerStreamer:
    """Yields every layer of a store, once per sweep. One sweep at a time.

    Without a GPU layers stream from disk to the host, where they are used. With one there are two tiers of
    the same kind, disk to host and host to device, each with its resident layers and its staging slots.
    """

    def __init__(
        self,
        store: WeightStore,
        reader: LayerReader,
        resident: frozenset[int],
        num_slots: int,
        device: Device | None = None,
        pinned: frozenset[int] = frozenset(),
        num_host_slots: int = 0,
    ) -> None:
        """Begins to read. `resident` layers stay on the compute device, which has `num_slots` staging slots
        for the others. With a `device` these wait on the host if they are `pinned`, and else on disk, whence
        they pass through `num_host_slots`. Raises CapacityError."""
        sizes = [round_up(layout.num_bytes) for layout in store.layouts]
        self.store = store
        self._device = device
        self._host: LayerTier | None = None
        self._host_pool: MemoryPool | None = None
        # The device's memory first: where it is too little, nothing has begun yet.
        make_arena = aligned_buffer if device is None else device.allocate
        self.pool = MemoryPool("weights", LayerTier.pool_bytes(sizes, resident, num_slots), make_arena)
        self._pages = PopulatedAhead(self.pool.arena) if device is None else None
        if device is not None:
            host_pool = self._host_pool = MemoryPool(
                "pinned weights",
                LayerTier.pool_bytes(sizes, pinned, num_host_slots),
                prepare=device.pin,
            )
            self._host = LayerTier(sizes, reader, host_pool, pinned, num_host_slots, passing=resident)
            reader = LinkReader(self._host, device)
        self._tier = LayerTier(sizes, reader, self.pool, resident, num_slots)
        self._num_sweeps = 0
        self._views: dict[tuple[int, int], LayerWeights] = {}
        #: The layer that is in use or waited for, None between sweeps; any thread may look.
        self.current_layer: int | None = None

    @property
    def torch_device(self) -> torch.device:
        """Where layers arrive."""
        return self._device.torch_device if self._device is not None else torch.device("cpu")

    @property
    def unpinned_bytes(self) -> int:
        """Of the host's buffers that feed a GPU, what the system refused to pin."""
        return self._device.unpinned_bytes if self._device is not None else 0

    @property
    def pinned_bytes(self) -> int:
        """Of those, what is locked in memory."""
        return 0 if self._host_pool is None else self._host_pool.used_bytes - self.unpinned_bytes

    @property
    def num_resident(self) -> int:
        return len(self._tier.resident)

    @property
    def num_slots(self) -> int:
        return self._tier.num_slots

    @property
    def streamed_bytes(self) -> int:
        """Of layers that came to the compute device because a sweep needed them."""
        return self._tier.streamed_bytes

    @property
    def stall_s(self) -> float:
        """Seconds in which the compute device waited for layers."""
        return self._tier.stall_s if self._device is None else self._device.stall_s

    @property
    def traffic(self) -> dict[str, Traffic]:
        """Of each link, everything since the start."""
        if self._device is None or self._host is None:
            return {"disk": self._tier.traffic}
        return {"disk": self._host.traffic, "host to device": self._device.traffic}

    def wait_until_loaded(self, report_progress: Callable[[int, int], None] | None = None) -> None:
        """Until every layer that stays in memory is there, without a sweep. `report_progress(loaded, total)`
        is called after each, and may raise to give up. Raises what reading raised."""
        tiers = [self._tier] if self._host is None else [self._tier, self._host]
        num_loaded, total = 0, sum(len(tier.resident) for tier in tiers)

        def report() -> None:
            nonlocal num_loaded
            num_loaded += 1
            if report_progress is not None:
                report_progress(num_loaded, total)

        for tier in tiers:
            tier.wait_until_loaded(report)

    def layers(self) -> Generator[LayerWeights, None, None]:
        """One sweep. A layer's weights are valid, for what is launched on the compute device, until the next
        one is asked for.

        Raises what reading raised (CorruptFile); the layer is read anew in the next sweep.
        """
        self._num_sweeps += 1
        this_sweep = self._num_sweeps
        self._tier.take_back()
        try:
            yield from self._sweep(this_sweep)
        finally:
            if this_sweep == self._num_sweeps:
                self.current_layer = None

    def _sweep(self, this_sweep: int) -> Generator[LayerWeights, None, None]:
        for index in range(self.store.num_layers):
            self.current_layer = index
            buffer = self._tier.acquire(index).buffer
            if self._device is not None:
                self._device.acquire(buffer)
            try:
                yield self._views_of(index, buffer)
            finally:
                # A sweep that was given up and is closed late takes nothing from the one that goes on.
                if this_sweep == self._num_sweeps:
                    if self._device is not None:
                        self._device.release(buffer)
                    self._tier.release(index)

    def _views_of(self, index: int, buffer: Tensor) -> LayerWeights:
        """Made once for each place where a layer can lie: a dozen views take a tenth of a millisecond."""
        place = index, buffer.data_ptr()
        if place not in self._views:
            self._views[place] = LayerWeights.views(self.store.layouts[index], buffer)
        return self._views[place]

    def synchronize(self) -> None:
        """Until the compute device has done everything, so that figures are complete."""
        if self._device is not None:
            self._device.synchronize()

    def close(self) -> None:
        """Ask for nothing more, and wait for what is being read into our buffers."""
        self._tier.close()
        if self._pages is not None:
            self._pages.close()
        if self._device is not None:
            self._device.close()
