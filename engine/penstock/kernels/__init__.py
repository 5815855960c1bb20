"""Kernels: arithmetic on one device. One set of kernels is chosen at start; all sets compute the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from penstock.config import EngineConfig, KernelChoice
from penstock.errors import ConfigError
from penstock.kernel_tuning import KernelTuning
from penstock.kernels import cpu_builds, tuning
from penstock.kernels.adapters.low_rank import LowRank, LowRankPart
from penstock.kernels.cpu import NativeKernels
from penstock.kernels.cpu_builds import compiled_builds
from penstock.kernels.cuda import nvrtc
from penstock.kernels.cuda.kept_check import check_card
from penstock.kernels.cuda.kernels import CudaKernels
from penstock.kernels.cuda.launcher import CudaLauncher
from penstock.kernels.cuda.nvrtc import INSTALL_NVRTC, compile_kernels, find_nvrtc
from penstock.kernels.experts import (
    Arriving,
    ExpertKernels,
    ExpertRows,
    GatedExpert,
    PlainExperts,
    settle_all,
)
from penstock.kernels.int4_tensor import Int4Tensor, StackedMatrix
from penstock.kernels.int_mm import TorchKernels
from penstock.kernels.mixture.routing import Routed, Router, Routing
from penstock.kernels.operands import (
    ActivationFunction,
    AttentionSpec,
    BatchLayout,
    ClampedGate,
    DistanceBias,
    GatedFunction,
    LayerKV,
    Matrix,
    QuantizedTensor,
    RamKV,
    RamSplits,
    RouterFunction,
    StateSlots,
)
from penstock.kernels.planes_tensor import PlanesTensor
from penstock.kernels.protocol import ForwardingKernels, Kernels, KernelTraits
from penstock.kernels.reference import ReferenceKernels
from penstock.kernels.shared.attended import AttentionBeside
from penstock.kernels.shared.handover import Handover
from penstock.kernels.shared.shared_kernels import SharedKernels
from penstock.kernels.shared.split_matrix import SplitMatrix

logger = logging.getLogger(__name__)

__all__ = [
    "ActivationFunction",
    "Arriving",
    "AttentionSpec",
    "CudaKernels",
    "BatchLayout",
    "ClampedGate",
    "DistanceBias",
    "ExpertKernels",
    "ExpertRows",
    "ForwardingKernels",
    "GatedExpert",
    "GatedFunction",
    "Handover",
    "Int4Tensor",
    "KernelTraits",
    "Kernels",
    "LayerKV",
    "LowRank",
    "LowRankPart",
    "Matrix",
    "PlainExperts",
    "PlanesTensor",
    "QuantizedTensor",
    "Routed",
    "Router",
    "RouterFunction",
    "Routing",
    "SharedKernels",
    "RamKV",
    "RamSplits",
    "SplitMatrix",
    "StackedMatrix",
    "StateSlots",
    "attending_in_ram",
    "choose_kernels",
    "settle_all",
    "expected_traits",
    "fingerprint",
    "native_build",
    "use_processor",
]

_PLAIN: dict[KernelChoice, type[TorchKernels | ReferenceKernels]] = {
    "torch": TorchKernels,
    "reference": ReferenceKernels,
}


def attending_in_ram(kernels: Kernels, others: Kernels, handover: Callable[[], Handover]) -> Kernels:
    """A card's kernels, which leave keys and values in RAM to `others`, the processor's; or the same kernels,
    where either of them can't."""
    if not isinstance(kernels, CudaKernels) or not isinstance(others, NativeKernels):
        return kernels
    return kernels.beside(AttentionBeside(others.attended, handover(), kernels.fetch))


def choose_kernels(
    config: EngineConfig,
    device: torch.device | None = None,
    cache_folder: Path | None = None,
) -> Kernels:
    """The kernels that the config asks for, for tensors on `device`, by default the CPU. `cache_folder` keeps
    kernels that are compiled for a GPU. Raises ConfigError if the config insists on kernels that are not
    there, or has a tuning for other kernels."""
    choice = _resolved(config.kernels, device)
    if choice != "native":
        if config.kernel_tuning is not None and not _is_gpu(device):
            raise ConfigError(
                "kernel_tuning is for native kernels, and none were compiled: leave kernel_tuning out, or "
                "install a C compiler and reinstall penstock"
            )
        if config.kernels == "auto" and _is_gpu(device):
            logger.warning(
                "no NVRTC library can compile our kernels for %s (compute capability %d.%d): torch's kernels "
                "serve, which are much slower. %s", device, *divmod(_architecture(device), 10), INSTALL_NVRTC,
            )  # fmt: skip
        return _PLAIN[choice](config.activations)
    if device is not None and _is_gpu(device):
        return _card_kernels(config, device, cache_folder)
    return NativeKernels(config.activations)


def use_processor(config: EngineConfig, num_threads: int) -> None:
    """Set threads and tuning of all native kernels of this process, if these compute by the config. Kernels
    that are made set nothing. Raises ConfigError if the native ones refuse the tuning."""
    if _resolved(config.kernels, None) == "native":
        NativeKernels(config.activations).set_num_threads(num_threads)
        tuning.apply(config.kernel_tuning or KernelTuning())


def _card_kernels(
    config: EngineConfig, device: torch.device, cache_folder: Path | None
) -> CudaKernels | TorchKernels:
    """Our kernels for a card, if they compute there what the reference computes; else torch's. Raises
    ConfigError if the config insists on ours."""
    launcher = CudaLauncher(device, compile_kernels(_architecture(device), cache_folder))
    build = nvrtc.build_fingerprint(_architecture(device))
    if found := check_card(launcher, device, config.activations, build, cache_folder):
        text = (
            f"our kernels compute wrong numbers on {device} ({len(found)} kinds of calls, first: "
            f"{found[0]}). "
            "Update the driver; `penstock doctor --card` checks again and writes a report to send in"
        )
        if config.kernels == "native":
            raise ConfigError(f"{text}. Or leave --kernels native out: torch's kernels serve then")
        logger.error("%s. Until then torch's kernels serve, which are MUCH SLOWER", text)
        return TorchKernels(config.activations)
    return CudaKernels(launcher, config.activations)


def fingerprint(config: EngineConfig, device: torch.device | None = None) -> str:
    """A text that tells apart kernels of different speed, for the kernels that choose_kernels() gives."""
    choice = _resolved(config.kernels, device)
    if choice != "native":
        build = f"{choice} {torch.__version__}"
    elif _is_gpu(device):
        build = nvrtc.build_fingerprint(_architecture(device))
    else:
        build = cpu_builds.build_fingerprint()
    return f"{build} {config.activations}"


def native_build(config: EngineConfig) -> str | None:
    """The build of the native kernels that compute on the processor; None: other kernels compute there."""
    return next(iter(compiled_builds()), None) if _resolved(config.kernels, None) == "native" else None


def multiplies_bytes(config: EngineConfig) -> bool:
    """Whether the processor's products are faster with 8-bit activations than with 16-bit ones."""
    build = native_build(config)
    return build is None or NativeKernels(build=build).multiplies_bytes


def expected_traits(config: EngineConfig, capability: tuple[int, int] | None) -> KernelTraits:
    """Traits of the kernels that would compute, on a GPU of this compute capability if there is one, without
    loading anything."""
    if capability is not None and config.kernels in ("auto", "native"):
        major, minor = capability
        return CudaKernels.traits if 10 * major + minor >= nvrtc.OLDEST_ARCHITECTURE else TorchKernels.traits
    choice = _resolved(config.kernels, None)
    return NativeKernels.traits if choice == "native" else _PLAIN[choice].traits


def _resolved(choice: KernelChoice, device: torch.device | None) -> KernelChoice:
    """The choice itself; for "auto" the native kernels where there are any, and torch's elsewhere."""
    if choice != "auto":
        return choice
    has_native = find_nvrtc(_architecture(device)) if _is_gpu(device) else compiled_builds()
    return "native" if has_native else "torch"


def _is_gpu(device: torch.device | None) -> bool:
    return device is not None and device.type == "cuda"


def _architecture(device: torch.device | None) -> int:
    """The device's compute capability as one number: 61 is 6.1."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
