"""Lane: a place that computes, with the memories through which weights come to it.

The host is a lane: weights come from the disk into RAM, and are used there. A GPU is a lane with memory of
its own, fed over a link from pinned RAM. It has two queues that run side by side, one that copies and one
that computes, and keeps them apart buffer by buffer: a copy into a buffer begins when what was launched on it
has ended, what is launched next begins when the copy has arrived. Whoever launches need not wait for either.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from penstock.config import DeviceChoice
from penstock.errors import CapacityError, ConfigError
from penstock.memory.direct_io import PopulatedAhead, aligned_buffer
from penstock.memory.hardware import DeviceProfile, HardwareProfile, pinnable_bytes
from penstock.metrics import Traffic

logger = logging.getLogger(__name__)

#: Layers that the host launches ahead of a GPU: enough to keep it busy, few enough for a cancellation to
#: take effect soon.
MAX_LAUNCHED_LAYERS = 2
#: cuMemHostRegister's flag: pinned for every context.
REGISTER_PORTABLE = 1
#: One of these is there wherever a driver is; the second under WSL.
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/dxg"))


class Memory(Protocol):
    """Where units lie: a tier's memory."""

    @property
    def name(self) -> str:
        """Of the pool, for people."""

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], zeroed. Raises CapacityError."""

    def prepare(self, piece: Tensor) -> None:
        """Called with each piece of it before the piece is used."""


class Lane(Protocol):
    """A place that computes. Buffers are told apart by their address. copy() and wait_copied() may be called
    from any thread."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def choice(self) -> Literal["cpu", "cuda"]:
        """What a config calls it."""

    @property
    def memories(self) -> tuple[Memory, ...]:
        """Through which weights come from the disk, in this order; layers are computed in the last one."""

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], zeroed, where layers are computed, for what is not weights. Raises
        CapacityError."""

    def upload(self, tensor: Tensor) -> Tensor:
        """A host tensor, where layers are computed; a copy, unless that is the host. Raises CapacityError."""

    def describe(self, hardware: HardwareProfile) -> HardwareProfile:
        """With what can be looked up of the lane, if nothing is known of it."""

    def trim(self) -> None:
        """Give back what torch keeps of memory that nobody uses."""

    def limit(self, num_bytes: int) -> None:
        """Nobody in this process gets more than this of the lane's memory."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Queue a copy from the memory before the last one to the last, after the last use of `target`."""

    def wait_copied(self, source: Tensor) -> None:
        """Until the last copy out of `source` is done and it may be overwritten."""

    def acquire(self, target: Tensor, waited_s: float) -> None:
        """What is launched from now on waits for the last copy into `target`, for which this thread waited
        `waited_s` already."""

    def release(self, target: Tensor) -> None:
        """What was launched so far was the last use of `target`. Waits if this thread is far ahead."""

    def synchronize(self) -> None:
        """Until everything queued is done."""

    def close(self) -> None:
        """Wait for the link, and give back what was pinned and what was allocated: nothing may use it."""

    @property
    def unpinned_bytes(self) -> int:
        """Of the memory that feeds a GPU: what the system refused to pin."""

    @property
    def stall_s(self) -> float:
        """Seconds in which computing waited for weights, up to the last synchronize()."""

    @property
    def traffic(self) -> dict[str, Traffic]:
        """Of the lane's own links, by name, up to the last synchronize()."""


class HostMemory:
    """RAM. Its pages are asked for ahead of the reads into them."""

    name = "weights"

    def __init__(self) -> None:
        self._pages: list[PopulatedAhead] = []

    def allocate(self, num_bytes: int) -> Tensor:
        arena = aligned_buffer(num_bytes)
        self._pages.append(PopulatedAhead(arena))
        return arena

    def prepare(self, piece: Tensor) -> None: ...

    def close(self) -> None:
        while self._pages:
            self._pages.pop().close()


class HostLane:
    """The processor. Layers are computed where they arrive, at once; nothing is queued."""

    torch_device = torch.device("cpu")
    choice: Literal["cpu", "cuda"] = "cpu"
    unpinned_bytes = 0

    def __init__(self) -> None:
        self._memory = HostMemory()
        self.memories: tuple[Memory, ...] = (self._memory,)
        self.stall_s = 0.0
        self.traffic: dict[str, Traffic] = {}

    def allocate(self, num_bytes: int) -> Tensor:
        return aligned_buffer(num_bytes)

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor

    def describe(self, hardware: HardwareProfile) -> HardwareProfile:
        return replace(hardware, device=None)

    def trim(self) -> None: ...

    def limit(self, num_bytes: int) -> None: ...

    def copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def wait_copied(self, source: Tensor) -> None: ...

    def acquire(self, target: Tensor, waited_s: float) -> None:
        self.stall_s += waited_s

    def release(self, target: Tensor) -> None: ...

    def synchronize(self) -> None: ...

    def close(self) -> None:
        self._memory.close()


class PinnedMemory:
    """RAM that is locked in place, so that copies out of it run at the link's full rate, beside everything
    else. Where the system refuses to lock a piece it stays pageable and counts as unpinned."""

    name = "pinned weights"

    def __init__(self, driver: ctypes.CDLL) -> None:
        self._driver = driver
        self._pinned: list[Tensor] = []
        self.unpinned_bytes = 0

    def allocate(self, num_bytes: int) -> Tensor:
        return aligned_buffer(num_bytes)

    def prepare(self, piece: Tensor) -> None:
        # Torch's own pinned memory is rounded up to powers of two. And it is the driver's call, not the
        # runtime's: a refusal leaves no error behind for torch's next launch.
        code = self._driver.cuMemHostRegister_v2(
            ctypes.c_void_p(piece.data_ptr()), ctypes.c_size_t(piece.numel()), REGISTER_PORTABLE
        )
        if code:
            self.unpinned_bytes += piece.numel()
            logger.debug("pinning %d bytes was refused: CUDA error %d", piece.numel(), code)
        else:
            self._pinned.append(piece)

    def close(self) -> None:
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
            torch.cuda.current_stream(self._device).synchronize()  # the link knows nothing of the zeros
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self._device)
            raise CapacityError(
                f"{self._device} has no {num_bytes} bytes left: {free} of {total} are free. Another "
                "process may have taken them since the plan was made (nvidia-smi shows which); end it, or "
                "lower --device-memory"
            ) from error
        self._allocated.append(buffer)
        return buffer

    def prepare(self, piece: Tensor) -> None: ...

    def close(self) -> None:
        # Views of this memory live on in a closed engine; the next one needs the room before they are gone.
        while self._allocated:
            self._allocated.pop().untyped_storage().resize_(0)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, self._device)


class CudaLane:
    """A GPU through torch's streams and events."""

    choice: Literal["cpu", "cuda"] = "cuda"

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self.stall_s = 0.0
        self._link_traffic = Traffic()
        self._link = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._pinned = PinnedMemory(ctypes.CDLL("libcuda.so.1"))
        self._memory = CudaMemory(self.torch_device)
        self.memories: tuple[Memory, ...] = (self._pinned, self._memory)
        self._lock = threading.Lock()
        #: By address: the copy that wrote (or read) a buffer last, and the last use of a target.
        self._copied: dict[int, torch.cuda.Event] = {}
        self._used: dict[int, torch.cuda.Event] = {}
        self._launched: deque[torch.cuda.Event] = deque()
        #: Pairs of events whose distance counts, once they have happened.
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._copies: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def profile(self) -> DeviceProfile:
        """What can be looked up; rates are 0."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        name = torch.cuda.get_device_name(self.torch_device)
        capability = torch.cuda.get_device_capability(self.torch_device)
        return DeviceProfile(name, capability, total, free, 0.0, 0.0, 0.0, pinnable_bytes())

    def allocate(self, num_bytes: int) -> Tensor:
        return self._memory.allocate(num_bytes)

    def upload(self, tensor: Tensor) -> Tensor:
        copy = self.allocate(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor)

    def describe(self, hardware: HardwareProfile) -> HardwareProfile:
        return replace(hardware, device=hardware.device or self.profile())

    def trim(self) -> None:
        torch.cuda.empty_cache()

    def limit(self, num_bytes: int) -> None:
        """Torch takes no more than this, whatever it is asked for."""
        _, total = torch.cuda.mem_get_info(self.torch_device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), self.torch_device)

    @property
    def unpinned_bytes(self) -> int:
        return self._pinned.unpinned_bytes

    @property
    def traffic(self) -> dict[str, Traffic]:
        return {"host to device": self._link_traffic}

    def copy(self, source: Tensor, target: Tensor) -> None:
        with self._lock, torch.cuda.stream(self._link):
            used = self._used.pop(target.data_ptr(), None)
            if used is not None:
                self._link.wait_event(used)
            started, done = self._timed_event(), self._timed_event()
            started.record(self._link)
            target.copy_(source, non_blocking=True)
            done.record(self._link)
            self._copied[source.data_ptr()] = self._copied[target.data_ptr()] = done
            self._copies.append((started, done))
            self._link_traffic.num_bytes += target.numel()

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
        compute = torch.cuda.current_stream(self.torch_device)
        before, after = self._timed_event(), self._timed_event()
        before.record(compute)
        compute.wait_event(copied)
        after.record(compute)
        self._stalls.append((before, after))

    def release(self, target: Tensor) -> None:
        used = torch.cuda.Event()  # type: ignore[no-untyped-call]
        used.record(torch.cuda.current_stream(self.torch_device))
        with self._lock:
            self._used[target.data_ptr()] = used
        self._launched.append(used)
        if len(self._launched) > MAX_LAUNCHED_LAYERS:
            self._launched.popleft().synchronize()

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.torch_device).synchronize()
        self._launched.clear()
        self.stall_s += sum(before.elapsed_time(after) / 1e3 for before, after in self._stalls)
        self._stalls.clear()
        with self._lock:
            # They end in their order.
            num_ended = sum(done.query() for _, done in self._copies)  # type: ignore[no-untyped-call]
            ended, self._copies = self._copies[:num_ended], self._copies[num_ended:]
        self._link_traffic.busy_s += sum(started.elapsed_time(done) / 1e3 for started, done in ended)

    def close(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        self._pinned.close()
        self._memory.close()

    @staticmethod
    def _timed_event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def find_lane(choice: DeviceChoice) -> HostLane | CudaLane:
    """What computes: the first GPU, or the processor. "auto" warns of a GPU that is there and can't be used;
    "cuda" raises ConfigError."""
    if choice == "cpu":
        return HostLane()
    trouble = gpu_trouble()
    if trouble is None:
        return CudaLane()
    if choice == "cuda":
        raise ConfigError(f"--device cuda: {trouble}")
    if has_driver():
        logger.warning("there is a GPU, and it is not used: %s", trouble)
    return HostLane()


def has_driver() -> bool:
    return any(path.exists() for path in DRIVERS)


def gpu_trouble() -> str | None:
    """Why torch can't compute on the first GPU, and what to do about it; None if it can."""
    built_for = torch.version.cuda
    if built_for is None:
        return f"torch {torch.__version__} has no CUDA; install a build of it that has"
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} finds no GPU: there is none, its driver is too old for CUDA "
            f"{built_for} (nvidia-smi shows what it can), or this container was not given it"
        )
    try:
        torch.ones(1, device="cuda").add_(1).item()
    except RuntimeError as error:  # a list of architectures would mislead: code for sm_60 runs on sm_61
        major, minor = torch.cuda.get_device_capability()
        return (
            f"torch {torch.__version__} for CUDA {built_for} can't compute on {torch.cuda.get_device_name()} "
            f"(compute capability {major}.{minor}): {str(error).splitlines()[0]}. Cards before 7.5 need a "
            "build for CUDA 12.6, of torch 2.14 or older"
        )
    return None
