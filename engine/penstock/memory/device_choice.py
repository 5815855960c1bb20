"""Which device computes: the lane that a config gets on this machine, and why a GPU can't be used."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from penstock.config import DeviceChoice
from penstock.errors import ConfigError
from penstock.memory.cuda_lane import CudaLane
from penstock.memory.host_lane import HostLane
from penstock.memory.lane import Lane

logger = logging.getLogger(__name__)

#: One of these paths exists wherever a driver is; the second one under WSL.
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/dxg"))


def find_lane(choice: DeviceChoice) -> Lane:
    """The lane of the first GPU, or of the processor. "auto" warns of a GPU that is there and can't be used;
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
