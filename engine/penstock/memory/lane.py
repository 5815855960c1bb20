"""Lane: a place that computes, with the memories through which weights come to it and the link between them.

The host is a lane: weights come from the disk into RAM, and are used there (host_lane.py). A GPU is a lane
with memory of its own, fed over a link from pinned RAM (cuda_lane.py). find_lane() says which one a config
gets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from penstock.config import DeviceChoice
from penstock.errors import ConfigError
from penstock.memory.cuda_lane import CudaLane
from penstock.memory.hardware import HardwareProfile
from penstock.memory.host_lane import HostLane
from penstock.memory.spare_memory import SpareMemory
from penstock.metrics import Traffic

logger = logging.getLogger(__name__)

#: One of these paths exists wherever a driver is; the second one under WSL.
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/dxg"))


class Memory(Protocol):
    """Where units lie: a tier's memory."""

    @property
    def name(self) -> str:
        """The pool's name, for people."""

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], with any content. Raises CapacityError."""

    def prepare(self, piece: Tensor) -> None:
        """Called with each piece of allocated memory before the piece is used."""


class Link(Protocol):
    """The way from the memory before the last one to the last one, where layers are computed. Copies and
    computing run side by side, and the link keeps them apart buffer by buffer: a copy into a buffer begins
    when what was launched on the buffer has ended, and what is launched next begins when the copy has
    arrived. The launching thread need not wait for either.

    Buffers are told apart by their address. copy() and wait_copied() may be called from any thread.
    """

    def copy(self, source: Tensor, target: Tensor, pieces: Sequence[tuple[int, int]] | None = None) -> None:
        """Queue a copy, which begins after the last use of `target`. `pieces`: (offset, bytes) of what is
        copied to the same place; None: everything."""

    def wait_copied(self, source: Tensor) -> None:
        """Wait until the last copy out of `source` is done, so that `source` may be overwritten."""

    def acquire(self, target: Tensor, waited_s: float) -> None:
        """What is launched from now on waits for the last copy into `target`. The calling thread has already
        waited `waited_s` seconds for this copy."""

    def release(self, target: Tensor) -> None:
        """What was launched so far was the last use of `target`. Waits if this thread is far ahead."""

    def synchronize(self) -> None:
        """Wait until everything that is launched is done, so that `stall_s` and `traffic` are complete."""

    @property
    def stall_s(self) -> float:
        """Seconds in which computing waited for weights, up to the last synchronize()."""

    @property
    def traffic(self) -> dict[str, Traffic]:
        """What went over the link, by the link's name, up to the last synchronize(). The disk is not a link
        of the lane."""


class Handover(Protocol):
    """Work for the processor beside a card: begin() and join() as kernels call them (SharedKernels)."""

    def check(self) -> None:
        """Called when the lane has done everything. Raises HandoverError if such work has failed."""

    def begin(self, x: Tensor, out_features: int, compute: Callable[[Tensor], Tensor]) -> Tensor: ...

    def join(self) -> None: ...


class Lane(Protocol):
    """A place that computes."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def choice(self) -> Literal["cpu", "cuda"]:
        """The lane's name in a config."""

    @property
    def memories(self) -> tuple[Memory, ...]:
        """Weights come from the disk through these memories, in this order. Layers are computed in the last
        one."""

    @property
    def link(self) -> Link: ...

    def handover(self) -> Handover:
        """What hands work over to the processor and back. Made once. Raises CapacityError."""

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], zeroed, in the memory in which layers are computed, for what is not weights.
        Raises CapacityError."""

    def allocate_end(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes, in whole pages] of the host's memory, with any content, into which the embedding
        or the head is read."""

    def upload(self, tensor: Tensor) -> Tensor:
        """A host tensor, brought to the memory in which layers are computed. The host returns the tensor
        itself, a GPU a copy. Raises CapacityError."""

    def describe(self, hardware: HardwareProfile) -> HardwareProfile:
        """`hardware`, with what can be looked up of the lane where `hardware` knows nothing of it."""

    def trim(self) -> None:
        """Give back the memory that torch keeps and nobody uses."""

    def limit(self, num_bytes: int) -> None:
        """This process gets no more than `num_bytes` of the lane's memory."""

    def close(self) -> None:
        """Wait for the link, then give back what was pinned and allocated. Nobody may use it afterwards."""

    @property
    def unpinned_bytes(self) -> int:
        """Bytes that feed a GPU and that the system refused to pin."""


def find_lane(choice: DeviceChoice, spare: SpareMemory | None = None) -> Lane:
    """The lane of the first GPU, or of the processor. "auto" warns of a GPU that is there and can't be used;
    "cuda" raises ConfigError. spare: memory of models that left, for the processor's lane."""
    if choice == "cpu":
        return HostLane(spare)
    trouble = gpu_trouble()
    if trouble is None:
        return CudaLane()
    if choice == "cuda":
        raise ConfigError(f"--device cuda: {trouble}")
    if has_driver():
        logger.warning("there is a GPU, but it is not used: %s", trouble)
    return HostLane(spare)


def has_driver() -> bool:
    return any(path.exists() for path in DRIVERS)


def gpu_trouble() -> str | None:
    """Why torch can't compute on the first GPU, and what to do about it; None if it can."""
    built_for = torch.version.cuda
    if built_for is None:
        return f"torch {torch.__version__} has no CUDA; install a build of torch with CUDA"
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} finds no GPU: there is none, its driver is too old for CUDA "
            f"{built_for} (nvidia-smi shows what it can), or this container has no access to it"
        )
    try:
        torch.ones(1, device="cuda").add_(1).item()
    except RuntimeError as error:  # torch's list of architectures would mislead: code for sm_60 runs on sm_61
        major, minor = torch.cuda.get_device_capability()
        return (
            f"torch {torch.__version__} for CUDA {built_for} can't compute on {torch.cuda.get_device_name()} "
            f"(compute capability {major}.{minor}): {str(error).splitlines()[0]}. Cards before 7.5 need a "
            "build of torch 2.14 or older, for CUDA 12.6"
        )
    return None
