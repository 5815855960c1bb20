"""Kernels: arithmetic on one device. One set of kernels is chosen at start; all sets compute the same."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeGuard

import torch

from penstock.config import EngineConfig, KernelChoice
from penstock.errors import ConfigError
from penstock.kernel_tuning import KernelTuning
from penstock.kernels import cpu_builds, tuning
from penstock.kernels.cpu import NativeKernels
from penstock.kernels.cpu_builds import compiled_builds
from penstock.kernels.experts import (
    Arriving,
    ExpertKernels,
    ExpertRows,
    GatedExpert,
    PlainExperts,
    settle_all,
)
from penstock.kernels.int4_tensor import Int4Tensor, StackedMatrix
from penstock.kernels.low_rank import LowRank, LowRankPart
from penstock.kernels.mixture.routing import Routed, Router, Routing
from penstock.kernels.operands import (
    ActivationFunction,
    AttentionSpec,
    BatchLayout,
    ClampedGate,
    DistanceBias,
    GatedFunction,
    GuessedPaths,
    GuessedStates,
    LayerKV,
    LimitedGate,
    Matrix,
    QuantizedTensor,
    RamKV,
    RamSplits,
    RouterFunction,
    StateSlots,
)
from penstock.kernels.planes_tensor import PlanesTensor
from penstock.kernels.protocol import ForwardingKernels, Kernels, KernelTraits

__all__ = [
    "ActivationFunction",
    "Arriving",
    "AttentionSpec",
    "BatchLayout",
    "ClampedGate",
    "DistanceBias",
    "ExpertKernels",
    "ExpertRows",
    "ForwardingKernels",
    "GatedExpert",
    "GatedFunction",
    "GuessedPaths",
    "GuessedStates",
    "Int4Tensor",
    "KernelTraits",
    "Kernels",
    "LayerKV",
    "LimitedGate",
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
    "RamKV",
    "RamSplits",
    "StackedMatrix",
    "StateSlots",
    "choose_kernels",
    "host_kernels",
    "settle_all",
    "expected_traits",
    "fingerprint",
    "native_build",
    "use_processor",
]

#: Kernels in Python, imported when they are chosen.
_PLAIN: dict[KernelChoice, str] = {
    "torch": "penstock.kernels.int_mm:TorchKernels",
    "reference": "penstock.kernels.reference:ReferenceKernels",
}


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
            from penstock.kernels import on_a_card  # this imports all that is for cards

            on_a_card.tell_of_slow_kernels(device)
        plain: Kernels = _plain(choice)(config.activations)
        return plain
    if _is_gpu(device):
        from penstock.kernels import on_a_card

        return on_a_card.card_kernels(config, device, cache_folder)
    return NativeKernels(config.activations)


def host_kernels(config: EngineConfig) -> Kernels:
    """The processor's kernels beside those of a card."""
    return choose_kernels(EngineConfig(activations=config.activations, kernel_tuning=config.kernel_tuning))


def use_processor(config: EngineConfig, num_threads: int) -> None:
    """Set threads and tuning of all native kernels of this process, if these compute by the config. Kernels
    that are made set nothing. Raises ConfigError if the native ones refuse the tuning."""
    if _resolved(config.kernels, None) == "native":
        NativeKernels(config.activations).set_num_threads(num_threads)
        tuning.apply(config.kernel_tuning or KernelTuning())


def fingerprint(config: EngineConfig, device: torch.device | None = None) -> str:
    """A text that tells apart kernels of different speed, for the kernels that choose_kernels() gives."""
    choice = _resolved(config.kernels, device)
    if choice != "native":
        build = f"{choice} {torch.__version__}"
    elif _is_gpu(device):
        from penstock.kernels import on_a_card

        build = on_a_card.build_fingerprint(device)
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
        from penstock.kernels import on_a_card

        return on_a_card.expected_traits(capability)
    choice = _resolved(config.kernels, None)
    traits: KernelTraits = NativeKernels.traits if choice == "native" else _plain(choice).traits
    return traits


def _resolved(choice: KernelChoice, device: torch.device | None) -> KernelChoice:
    """The choice itself; for "auto" the native kernels where there are any, and torch's elsewhere."""
    if choice != "auto":
        return choice
    if not _is_gpu(device):
        return "native" if compiled_builds() else "torch"
    from penstock.kernels import on_a_card

    return "native" if on_a_card.has_kernels(device) else "torch"


def _plain(choice: KernelChoice) -> Any:
    return resolve_name(_PLAIN[choice])


def _is_gpu(device: torch.device | None) -> TypeGuard[torch.device]:
    return device is not None and device.type == "cuda"
