"""HostLane: the processor as a place that computes. Weights come from the disk into RAM, and stay there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from penstock.memory.direct_io import PopulatedAhead, aligned_buffer
from penstock.memory.hardware import HardwareProfile
from penstock.memory.spare_memory import SpareMemory
from penstock.metrics import Traffic


class HostMemory:
    """RAM, whose pages are asked for ahead of the reads into them."""

    name = "weights"

    def __init__(self, spare: SpareMemory) -> None:
        self._spare = spare
        self._pages: list[PopulatedAhead] = []

    def allocate(self, num_bytes: int) -> Tensor:
        return self.take("layers", num_bytes)

    def take(self, purpose: str, num_bytes: int) -> Tensor:
        buffer, num_ready = self._spare.take(purpose, num_bytes)
        if num_ready < num_bytes:
            self._pages.append(PopulatedAhead(buffer[num_ready:]))
        return buffer

    def take_elsewhere(self, num_bytes: int) -> Tensor:
        """Memory that is not kept for the next model, in place of spare memory."""
        self._spare.make_room(num_bytes)
        return aligned_buffer(num_bytes)

    def prepare(self, piece: Tensor) -> None: ...

    def close(self) -> None:
        while self._pages:
            self._pages.pop().close()


class HostLink:
    """The host needs no link: layers are computed at once where they arrive, and nothing is queued."""

    def __init__(self) -> None:
        self.stall_s = 0.0
        self.traffic: dict[str, Traffic] = {}

    def copy(self, source: Tensor, target: Tensor, pieces: Sequence[tuple[int, int]] | None = None) -> None:
        for offset, size in ((0, len(source)),) if pieces is None else pieces:
            target[offset : offset + size].copy_(source[offset : offset + size])

    def copy_back(self, source: Tensor, target: Tensor, pieces: Sequence[tuple[int, int]]) -> None:
        self.copy(source, target, pieces)

    def wait_copied(self, source: Tensor) -> None: ...

    def acquire(self, target: Tensor, waited_s: float) -> None:
        self.stall_s += waited_s

    def release(self, target: Tensor) -> None: ...

    def synchronize(self) -> None: ...


class HostLane:
    """The processor."""

    torch_device = torch.device("cpu")
    choice = "cpu"
    unpinned_bytes = 0

    def __init__(self, spare: SpareMemory | None = None) -> None:
        """spare: the memory of models that left."""
        self.link = HostLink()
        self._memory = HostMemory(spare or SpareMemory())
        self.memories = (self._memory,)

    def handover(self) -> HostHandover:
        return HostHandover()

    def inlet(self, fetch: object) -> PlainInlet:
        return PlainInlet(self.torch_device)

    def allocate(self, num_bytes: int) -> Tensor:
        return self._memory.take_elsewhere(num_bytes)

    def allocate_end(self, num_bytes: int) -> Tensor:
        return self._memory.take("ends", num_bytes)

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor

    def describe(self, hardware: HardwareProfile) -> HardwareProfile:
        return replace(hardware, device=None)

    def trim(self) -> None: ...

    def limit(self, num_bytes: int) -> None: ...

    def close(self) -> None:
        self._memory.close()


class PlainInlet:
    """Brings a step's inputs to where it is computed, tensor by tensor: the plain twin of CudaInlet."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_host = device, device.type == "cpu"

    def bring(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self._is_host:
            return list(tensors)
        return [tensor.to(self._device, non_blocking=True) for tensor in tensors]


class HostHandover:
    """Computes at once where there is no card: the plain twin of CudaHandover."""

    def begin(
        self,
        x: Tensor,
        out_features: int,
        compute: Callable[[Tensor], Tensor],
        product: object = None,
        fetch: object = None,
        y: Tensor | None = None,
    ) -> Tensor:
        return compute(x) if y is None else y.copy_(compute(x))

    def join(self) -> None: ...

    def then(self, function: Callable[[], None]) -> None:
        function()

    def check(self) -> None: ...

    def close(self) -> None: ...
