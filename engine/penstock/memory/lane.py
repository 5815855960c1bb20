"""Lane: a place that computes, with the memories through which weights come to it and the link between them.

The host is a lane: weights come from the disk into RAM, and are used there (host_lane.py). A GPU is a lane
with memory of its own, fed over a link from pinned RAM (cuda_lane.py). find_lane() says which one a config
gets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.config import card_number
from penstock.errors import ConfigError
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

    def copy_back(self, source: Tensor, target: Tensor, pieces: Sequence[tuple[int, int]]) -> None:
        """Queue a copy from where layers are computed to the host. It begins after what was launched so far,
        and the next copy into `source` begins after it. Called by the thread that launches. Without pieces,
        only the order is kept."""

    def wait_copied(self, source: Tensor) -> None:
        """Wait until the last copy out of `source` is done, so that `source` may be overwritten."""

    def acquire(self, target: Tensor, waited_s: float) -> None:
        """What is launched from now on waits for the last copy into `target`. The calling thread has already
        waited `waited_s` seconds for this copy."""

    def release(self, target: Tensor) -> None:
        """What was launched so far was the last use of `target`. Waits if this thread is far ahead."""

    def synchronize(self) -> None:
        """Wait until everything that is launched is done, and every copy back to the host, so that `stall_s`
        and `traffic` are complete."""

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

    def begin(
        self,
        x: Tensor,
        out_features: int,
        compute: Callable[[Tensor], Tensor],
        product: Any = None,
        fetch: Callable[[int, Tensor], None] | None = None,
        y: Tensor | None = None,
    ) -> Tensor: ...

    def join(self) -> None: ...

    def then(self, function: Callable[[], None]) -> None:
        """Have a thread of the host call `function` when everything that was begun so far is computed. Nobody
        waits."""


class Inlet(Protocol):
    """The way of a step's inputs to where it is computed."""

    def bring(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors there, for what is launched next. The host may change its own at once."""


class Lane(Protocol):
    """A place that computes."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def choice(self) -> str:
        """The lane's name in a config: "cpu", or "cuda:" and the GPU's number."""

    @property
    def memories(self) -> tuple[Memory, ...]:
        """Weights come from the disk through these memories, in this order. Layers are computed in the last
        one."""

    @property
    def link(self) -> Link: ...

    def handover(self) -> Handover:
        """What hands work over to the processor and back. Made once. Raises CapacityError."""

    def inlet(self, fetch: Callable[[int, Tensor], None] | None) -> Inlet:
        """What brings a step's inputs to where it is computed. `fetch` are the kernels' (CudaKernels.fetch),
        if they have it. Made once. Raises CapacityError."""

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


def find_lane(choice: str, spare: SpareMemory | None = None) -> Lane:
    """The lane of a GPU, or of the processor, by EngineConfig.device. "auto" warns of a first GPU that is
    there and can't be used; a GPU that is asked for by name and can't be used raises ConfigError. spare:
    memory of models that left, for the processor's lane."""
    if choice == "cpu":
        return HostLane(spare)
    number = card_number(choice)
    trouble = gpu_trouble(number or 0)
    if trouble is None:
        from penstock.memory.cuda_lane import CudaLane

        return CudaLane(number or 0)
    if number is not None:
        raise ConfigError(f"--device {choice}: {trouble}")
    if has_driver():
        logger.warning("there is a GPU, but it is not used: %s", trouble)
    return HostLane(spare)


def has_driver() -> bool:
    return any(path.exists() for path in DRIVERS)


def gpu_trouble(number: int = 0) -> str | None:
    """Why torch can't compute on a GPU, and what to do about it; None if it can. No other GPU is touched."""
    built_for = torch.version.cuda
    if built_for is None:
        return f"torch {torch.__version__} has no CUDA; install a build of torch with CUDA"
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} finds no GPU: there is none, its driver is too old for CUDA "
            f"{built_for} (nvidia-smi shows what it can), or this container has no access to it"
        )
    if number >= (num_cards := torch.cuda.device_count()):
        names = ", ".join(f"cuda:{each} ({torch.cuda.get_device_name(each)})" for each in range(num_cards))
        return (
            f"there is no such GPU. Torch sees {num_cards}: {names}. CUDA_VISIBLE_DEVICES, where it is set, "
            "hides others and gives them new numbers"
        )
    try:
        torch.ones(1, device=torch.device("cuda", number)).add_(1).item()
    except RuntimeError as error:  # torch's list of architectures would mislead: code for sm_60 runs on sm_61
        major, minor = torch.cuda.get_device_capability(number)
        name = torch.cuda.get_device_name(number)
        return (
            f"torch {torch.__version__} for CUDA {built_for} can't compute on {name} "
            f"(compute capability {major}.{minor}): {str(error).splitlines()[0]}. Cards before 7.5 need a "
            "build of torch 2.14 or older, for CUDA 12.6"
        )
    return None
