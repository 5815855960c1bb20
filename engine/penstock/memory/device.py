"""Device: a compute device with memory of its own, fed over a link.

It has two queues that run side by side, one that copies and one that computes, and keeps them apart buffer
by buffer: a copy into a buffer begins when what was launched on it has ended, what is launched next begins
when the copy has arrived. Whoever launches need not wait for either.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from penstock.config import DeviceChoice
from penstock.errors import CapacityError, ConfigError
from penstock.memory.hardware import DeviceProfile, pinnable_bytes
from penstock.metrics import Traffic

logger = logging.getLogger(__name__)

#: Layers that the host launches ahead of the device: enough to keep it busy, few enough for a cancellation to
#: take effect soon.
MAX_LAUNCHED_LAYERS = 2
#: cuMemHostRegister's flag: pinned for every context.
REGISTER_PORTABLE = 1
#: One of these is there wherever a driver is; the second under WSL.
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/dxg"))


class Device(Protocol):
    """Buffers are told apart by their address. copy() and wait_copied() may be called from any thread."""

    @property
    def torch_device(self) -> torch.device: ...

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] on the device, zeroed. Raises CapacityError."""

    def pin(self, buffer: Tensor) -> None:
        """Lock whole pages of the host in memory, so that copies out of them run at the link's full rate,
        beside everything else. Where the system refuses they stay pageable and count as unpinned_bytes."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Queue a copy of host memory to the device, after the last use of `target`."""

    def wait_copied(self, source: Tensor) -> None:
        """Until the last copy out of `source` is done and it may be overwritten."""

    def acquire(self, target: Tensor) -> None:
        """What is launched from now on waits for the last copy into `target`."""

    def release(self, target: Tensor) -> None:
        """What was launched so far was the last use of `target`. Waits if the host is far ahead."""

    def synchronize(self) -> None:
        """Until everything queued is done."""

    def close(self) -> None:
        """Wait for the link, and give back what was pinned and what was allocated: nothing may use it."""

    @property
    def unpinned_bytes(self) -> int:
        """What the system refused to pin."""

    @property
    def stall_s(self) -> float:
        """Seconds in which computing waited for copies, up to the last synchronize()."""

    @property
    def traffic(self) -> Traffic:
        """Of the link, up to the last synchronize()."""


class CudaDevice:
    """A GPU through torch's streams and events."""

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self.unpinned_bytes = 0
        self.stall_s = 0.0
        self.traffic = Traffic()
        self._link = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._pinned: list[Tensor] = []
        self._allocated: list[Tensor] = []
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

    def limit(self, num_bytes: int) -> None:
        """Torch takes no more than this, whatever it is asked for."""
        _, total = torch.cuda.mem_get_info(self.torch_device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), self.torch_device)

    def allocate(self, num_bytes: int) -> Tensor:
        try:
            buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch_device)
            torch.cuda.current_stream(self.torch_device).synchronize()  # the link knows nothing of the zeros
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.torch_device)
            raise CapacityError(
                f"{self.torch_device} has no {num_bytes} bytes left: {free} of {total} are free. Another "
                "process may have taken them since the plan was made (nvidia-smi shows which); end it, or "
                "lower --device-memory"
            ) from error
        self._allocated.append(buffer)
        return buffer

    def upload(self, tensor: Tensor) -> Tensor:
        """A copy of host memory in memory from allocate(); waits for it. Raises CapacityError."""
        copy = self.allocate(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor)

    def pin(self, buffer: Tensor) -> None:
        # Torch's own pinned memory is rounded up to powers of two. And it is the driver's call, not the
        # runtime's: a refusal leaves no error behind for torch's next launch.
        code = self._driver.cuMemHostRegister_v2(
            ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(buffer.numel()), REGISTER_PORTABLE
        )
        if code:
            self.unpinned_bytes += buffer.numel()
            logger.debug("pinning %d bytes was refused: CUDA error %d", buffer.numel(), code)
        else:
            self._pinned.append(buffer)

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
            self.traffic.num_bytes += target.numel()

    def wait_copied(self, source: Tensor) -> None:
        with self._lock:
            done = self._copied.pop(source.data_ptr(), None)
        if done is not None:
            done.synchronize()

    def acquire(self, target: Tensor) -> None:
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
        self.traffic.busy_s += sum(started.elapsed_time(done) / 1e3 for started, done in ended)

    def close(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        while self._pinned:
            self._driver.cuMemHostUnregister(ctypes.c_void_p(self._pinned.pop().data_ptr()))
        # Views of this memory live on in a closed engine; the next one needs the room before they are gone.
        while self._allocated:
            self._allocated.pop().untyped_storage().resize_(0)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, self.torch_device)

    @staticmethod
    def _timed_event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def find_device(choice: DeviceChoice) -> CudaDevice | None:
    """The first GPU, or None for the processor. "auto" warns of a GPU that is there and can't be used; "cuda"
    raises ConfigError."""
    if choice == "cpu":
        return None
    trouble = gpu_trouble()
    if trouble is None:
        return CudaDevice()
    if choice == "cuda":
        raise ConfigError(f"--device cuda: {trouble}")
    if has_driver():
        logger.warning("there is a GPU, and it is not used: %s", trouble)
    return None


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
