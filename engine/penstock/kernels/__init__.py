"""Arithmetic on one device. The implementation is chosen once, at start; all compute the same."""

from __future__ import annotations

from penstock.config import EngineConfig
from penstock.kernels.cpu import NativeKernels, TorchKernels, compiled_builds
from penstock.kernels.operands import (
    ActivationFunction,
    AttentionSpec,
    BatchLayout,
    LayerKV,
    QuantizedTensor,
)
from penstock.kernels.reference import ReferenceKernels

#: What a layer may call. The reference is the interface: faster kernels replace its methods.
Kernels = ReferenceKernels

__all__ = [
    "ActivationFunction",
    "AttentionSpec",
    "BatchLayout",
    "Kernels",
    "LayerKV",
    "QuantizedTensor",
    "choose_kernels",
]


def choose_kernels(config: EngineConfig, num_threads: int) -> Kernels:
    """The kernels that the config asks for. Raises ConfigError if it insists on what is not there."""
    choice = config.kernels
    if choice == "auto":
        choice = "native" if compiled_builds() else "torch"
    if choice == "native":
        native = NativeKernels(config.activations)
        native.set_num_threads(num_threads)
        return native
    return (TorchKernels if choice == "torch" else ReferenceKernels)(config.activations)
