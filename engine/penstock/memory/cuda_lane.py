"""CudaLane: a GPU as a place that computes, through torch's streams and events.

Layers come from pinned RAM into the GPU's own memory. One stream copies and one computes, side by side, and
events keep the two apart buffer by buffer.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from penstock.errors import CapacityError
from penstock.memory.cuda_handover import CudaHandover
from penstock.memory.cuda_inlet import CudaInlet, open_inlet
from penstock.memory.direct_io import aligned_buffer
from penstock.memory.hardware import DeviceProfile, HardwareProfile, pinnable_bytes
from penstock.memory.host_lane import PlainInlet
from penstock.memory.planning.plan import HANDOVER_BYTES, INLET_BYTES
from penstock.metrics import Traffic

logger = logging.getLogger(__name__)

#: Layers that the host launches ahead of a GPU: enough to keep the GPU busy, and few enough that a
#: cancellation takes effect soon.
MAX_LAUNCHED_LAYERS = 2
#: cuMemHostRegister's flags: pinned for every context, and where the card's own streams see it.
REGISTER_PORTABLE, REGISTER_DEVICEMAP = 1, 2


class PinnedMemory:
    """RAM that is locked in place, so that copies out of it run at the link's full rate, beside everything
    else. A piece that the system refuses to lock stays pageable and counts as unpinned."""

    name = "pinned weights"

    def __init__(self, device: torch.device, driver: ctypes.CDLL) -> None:
        """`device` is the GPU whose context is current while the driver pins: pinning must not make a context
        on another GPU, where it would take memory."""
        self._device = device
        self._driver = driver
        self._pinned: list[Tensor] = []
        self.unpinned_bytes = 0

    def allocate(self, num_bytes: int) -> Tensor:
        return aligned_buffer(num_bytes)

    def prepare(self, piece: Tensor, flags: int = REGISTER_PORTABLE) -> None:
        # Torch's own pinned memory would be rounded up to powers of two. The call is the driver's and not the
        # runtime's, so that a refusal leaves no error behind for torch's next launch.
        with torch.cuda.device(self._device):  # each thread has a current device of its own
            code = self._driver.cuMemHostRegister_v2(
                ctypes.c_void_p(piece.data_ptr()), ctypes.c_size_t(piece.numel()), flags
            )
        if code:
            self.unpinned_bytes += piece.numel()
            logger.debug("pinning %d bytes was refused: CUDA error %d", piece.numel(), code)
        else:
            self._pinned.append(piece)

    def close(self) -> None:
        with torch.cuda.device(self._device):
            while self._pinned:
                self._driver.cuMemHostUnregister(ctypes.c_void_p(self._pinned.pop().data_ptr()))


class CudaMemory:
    """A GPU's own memory."""

    name = "weights"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocated: list[Tensor] = []

    def allocate(self, num_bytes: int) -> Tensor:
        try:
            buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
            torch.cuda.current_stream(self._device).synchronize()  # the link does not wait for the zeros
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self._device)
            raise CapacityError(
                f"{self._device} has no {num_bytes} bytes left: {free} of {total} are free. Another process "
                "may have taken memory since the plan was made (nvidia-smi shows which): end that process, "
                "or lower --device-memory",
                "device",
            ) from error
        self._allocated.append(buffer)
        return buffer

    def prepare(self, piece: Tensor) -> None: ...

    def close(self) -> None:
        # A closed engine still has views of this memory. The next engine needs the memory before the views
        # are gone, so the storage is emptied.
        while self._allocated:
            self._allocated.pop().untyped_storage().resize_(0)
        torch.cuda.empty_cache()


class CudaLink:
    """A stream that copies from pinned RAM to a GPU, and one that copies back, beside torch's current stream,
    which computes."""

    def __init__(self, device: torch.device) -> None:
        self.stall_s = 0.0
        self._device = device
        self._traffic = Traffic()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        #: By a buffer's address: the copy that wrote or read the buffer last.
        self._copied: dict[int, torch.cuda.Event] = {}
        #: By a target's address: the target's last use.
        self._used: dict[int, torch.cuda.Event] = {}
        self._launched: deque[torch.cuda.Event] = deque()
        #: Pairs of events. The time between the two counts once both have happened.
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._copies: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def traffic(self) -> dict[str, Traffic]:
        return {"host to device": self._traffic}

    def copy(self, source: Tensor, target: Tensor, pieces: Sequence[tuple[int, int]] | None = None) -> None:
        with self._lock, torch.cuda.stream(self._stream):
            used = self._used.pop(target.data_ptr(), None)
            if used is not None:
                self._stream.wait_event(used)
            started, done = self._timed_event(), self._timed_event()
            started.record(self._stream)
            for offset, size in ((0, target.numel()),) if pieces is None else pieces:
                target[offset : offset + size].copy_(source[offset : offset + size], non_blocking=True)
                self._traffic.num_bytes += size
            done.record(self._stream)
            self._copied[source.data_ptr()] = self._copied[target.data_ptr()] = done
            self._copies.append((started, done))

    def copy_back(self, source: Tensor, target: Tensor, pieces: Sequence[tuple[int, int]]) -> None:
        launched, done = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        launched.record(torch.cuda.current_stream(self._device))
        self._back.wait_event(launched)
        with torch.cuda.stream(self._back):
            for offset, size in pieces:
                target[offset : offset + size].copy_(source[offset : offset + size], non_blocking=True)
        done.record(self._back)
        with self._lock:
            self._used[source.data_ptr()] = done

    def wait_copied(self, source: Tensor) -> None:
        with self._lock:
            done = self._copied.pop(source.data_ptr(), None)
        if done is not None:
            done.synchronize()

    def acquire(self, target: Tensor, waited_s: float) -> None:
        with self._lock:
            copied = self._copied.pop(target.data_ptr(), None)
        if copied is None:
            return
        compute = torch.cuda.current_stream(self._device)
        before, after = self._timed_event(), self._timed_event()
        before.record(compute)
        compute.wait_event(copied)
        after.record(compute)
        self._stalls.append((before, after))

    def release(self, target: Tensor) -> None:
        used = torch.cuda.Event()  # type: ignore[no-untyped-call]
        used.record(torch.cuda.current_stream(self._device))
        with self._lock:
            self._used[target.data_ptr()] = used
        self._launched.append(used)
        if len(self._launched) > MAX_LAUNCHED_LAYERS:
            self._launched.popleft().synchronize()

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()
        self._back.synchronize()
        self._launched.clear()
        self.stall_s += sum(before.elapsed_time(after) / 1e3 for before, after in self._stalls)
        self._stalls.clear()
        with self._lock:
            # Copies end in the order in which they began.
            num_ended = sum(done.query() for _, done in self._copies)  # type: ignore[no-untyped-call]
            ended, self._copies = self._copies[:num_ended], self._copies[num_ended:]
        self._traffic.busy_s += sum(started.elapsed_time(done) / 1e3 for started, done in ended)

    @staticmethod
    def _timed_event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


#: Torch takes memory from the driver in pieces of 20 MiB for tensors of 1 to 10 MiB, and of 2 MiB for smaller
#: ones. A limit has room for the pieces that are begun.
PIECES_BYTES = 22 << 20


class CudaLane:
    """A GPU. Several lanes of a process may be on one GPU: a model's, and its drafter's."""

    #: By a GPU, bytes that each lane may take there: torch knows one limit for the process.
    _limits: ClassVar[dict[torch.device, dict[CudaLane, int]]] = {}

    def __init__(self, number: int = 0) -> None:
        self.torch_device = torch.device("cuda", number)
        self.choice = str(self.torch_device)
        self.link = CudaLink(self.torch_device)
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._pinned = PinnedMemory(self.torch_device, self._driver)
        self._handover: CudaHandover | None = None
        self._memory = CudaMemory(self.torch_device)
        self.memories = (self._pinned, self._memory)

    def handover(self) -> CudaHandover:
        if self._handover is None:
            buffer = self._pinned.allocate(HANDOVER_BYTES)
            self._pinned.prepare(buffer, REGISTER_PORTABLE | REGISTER_DEVICEMAP)
            self._handover = CudaHandover(self.torch_device, self._driver, buffer)
        return self._handover

    def inlet(self, fetch: Callable[[int, Tensor], None] | None) -> CudaInlet | PlainInlet:
        if fetch is None:
            return PlainInlet(self.torch_device)
        buffer = self._pinned.allocate(INLET_BYTES)
        self._pinned.prepare(buffer, REGISTER_PORTABLE | REGISTER_DEVICEMAP)
        inlet = open_inlet(self._driver, buffer, self.torch_device, fetch)
        return inlet or PlainInlet(self.torch_device)

    def profile(self) -> DeviceProfile:
        """What can be looked up of the GPU; rates are 0."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        name = torch.cuda.get_device_name(self.torch_device)
        capability = torch.cuda.get_device_capability(self.torch_device)
        return DeviceProfile(name, capability, total, free, 0.0, 0.0, 0.0, pinnable_bytes())

    def allocate(self, num_bytes: int) -> Tensor:
        return self._memory.allocate(num_bytes)

    def allocate_end(self, num_bytes: int) -> Tensor:
        return aligned_buffer(num_bytes)

    def upload(self, tensor: Tensor) -> Tensor:
        copy = self.allocate(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor)

    def describe(self, hardware: HardwareProfile) -> HardwareProfile:
        return replace(hardware, device=hardware.device or self.profile())

    def trim(self) -> None:
        torch.cuda.empty_cache()

    def limit(self, num_bytes: int) -> None:
        """Torch refuses every allocation beyond `num_bytes`, and what other lanes may take."""
        self._limits.setdefault(self.torch_device, {})[self] = num_bytes
        self._limit_process()

    def _limit_process(self) -> None:
        limits = self._limits.get(self.torch_device)
        _, total = torch.cuda.mem_get_info(self.torch_device)
        fraction = min(1.0, (sum(limits.values()) + PIECES_BYTES) / total) if limits else 1.0
        torch.cuda.set_per_process_memory_fraction(fraction, self.torch_device)

    @property
    def unpinned_bytes(self) -> int:
        return self._pinned.unpinned_bytes

    def close(self) -> None:
        """What can be given back is, even if the card has failed. Raises what the card's failure raises."""
        try:
            torch.cuda.synchronize(self.torch_device)
        finally:
            if self._handover is not None:
                self._handover.close()
            self._pinned.close()
            self._limits.get(self.torch_device, {}).pop(self, None)
            self._memory.close()
            self._limit_process()
