"""Arithmetic on one device. The implementation is chosen once, at start; all compute the same."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from penstock.config import EngineConfig
from penstock.kernels.cpu import NativeKernels, TorchKernels, compiled_builds
from penstock.kernels.cuda import CudaKernels, CudaLauncher
from penstock.kernels.nvrtc import INSTALL_NVRTC, compile_kernels, find_nvrtc
from penstock.kernels.operands import (
    ActivationFunction,
    AttentionSpec,
    BatchLayout,
    LayerKV,
    Matrix,
    QuantizedTensor,
)
from penstock.kernels.reference import ReferenceKernels

logger = logging.getLogger(__name__)

#: What a layer may call. The reference is the interface: faster kernels replace its methods.
Kernels = ReferenceKernels

__all__ = [
    "ActivationFunction",
    "AttentionSpec",
    "BatchLayout",
    "Kernels",
    "LayerKV",
    "Matrix",
    "QuantizedTensor",
    "choose_kernels",
]


def choose_kernels(
    config: EngineConfig,
    num_threads: int,
    device: torch.device | None = None,
    cache_folder: Path | None = None,
) -> Kernels:
    """The kernels that the config asks for, for tensors on `device`, the CPU by default. `cache_folder` keeps
    what is compiled for a GPU. Raises ConfigError if the config insists on what is not there."""
    if device is not None and device.type == "cuda":
        return _cuda_kernels(config, device, cache_folder)
    choice = config.kernels
    if choice == "auto":
        choice = "native" if compiled_builds() else "torch"
    if choice == "native":
        native = NativeKernels(config.activations)
        native.set_num_threads(num_threads)
        return native
    return (TorchKernels if choice == "torch" else ReferenceKernels)(config.activations)


def _cuda_kernels(config: EngineConfig, device: torch.device, cache_folder: Path | None) -> Kernels:
    choice = config.kernels
    major, minor = torch.cuda.get_device_capability(device)
    if choice == "auto":
        choice = "native" if find_nvrtc(10 * major + minor) else "torch"
        if choice == "torch":
            logger.warning(
                "no NVRTC library can compile our kernels for %s (compute capability %d.%d): torch's, which "
                "are much slower, serve. %s", device, major, minor, INSTALL_NVRTC,
            )  # fmt: skip
    if choice == "native":
        launcher = CudaLauncher(device, compile_kernels(10 * major + minor, cache_folder))
        return CudaKernels(launcher, config.activations)
    return (TorchKernels if choice == "torch" else ReferenceKernels)(config.activations)
