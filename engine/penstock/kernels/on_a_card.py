"""Which kernels compute on a card. Imported where there is one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.kernels.cpu import NativeKernels
from penstock.kernels.cuda import nvrtc
from penstock.kernels.cuda.kept_check import check_card
from penstock.kernels.cuda.kernels import CudaKernels
from penstock.kernels.cuda.launcher import CudaLauncher
from penstock.kernels.cuda.nvrtc import INSTALL_NVRTC, compile_kernels, find_nvrtc
from penstock.kernels.int_mm import TorchKernels
from penstock.kernels.protocol import Kernels, KernelTraits
from penstock.kernels.shared.attended import AttentionBeside
from penstock.kernels.shared.handover import Handover

logger = logging.getLogger(__name__)


def has_kernels(device: torch.device) -> bool:
    """Whether our kernels can be compiled for the card."""
    return bool(find_nvrtc(_architecture(device)))


def tell_of_slow_kernels(device: torch.device) -> None:
    logger.warning(
        "no NVRTC library can compile our kernels for %s (compute capability %d.%d): torch's kernels "
        "serve, which are much slower. %s", device, *divmod(_architecture(device), 10), INSTALL_NVRTC,
    )  # fmt: skip


def card_kernels(
    config: EngineConfig, device: torch.device, cache_folder: Path | None
) -> CudaKernels | TorchKernels:
    """Our kernels for a card, if they compute there what the reference computes; else torch's. Raises
    ConfigError if the config insists on ours."""
    launcher = CudaLauncher(device, compile_kernels(_architecture(device), cache_folder))
    if found := check_card(launcher, device, config.activations, build_fingerprint(device), cache_folder):
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


def build_fingerprint(device: torch.device) -> str:
    """A text that tells apart builds of our kernels for the card."""
    return nvrtc.build_fingerprint(_architecture(device))


def expected_traits(capability: tuple[int, int]) -> KernelTraits:
    """Traits of the kernels that would compute on a card of this compute capability."""
    major, minor = capability
    return CudaKernels.traits if 10 * major + minor >= nvrtc.OLDEST_ARCHITECTURE else TorchKernels.traits


def attending_in_ram(kernels: Kernels, others: Kernels, handover: Callable[[], Handover]) -> Kernels:
    """A card's kernels, which leave keys and values in RAM to `others`, the processor's; or the same kernels,
    where either of them can't."""
    if not isinstance(kernels, CudaKernels) or not isinstance(others, NativeKernels):
        return kernels
    return kernels.beside(AttentionBeside(others.attended, handover(), kernels.fetch))


def _architecture(device: torch.device) -> int:
    """The device's compute capability as one number: 61 is 6.1."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
