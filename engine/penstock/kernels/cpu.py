"""NativeKernels: the compiled kernels of cpu.c, for the CPU."""

from __future__ import annotations

import copy
import ctypes
import logging
import platform
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.config import GROUP_SIZES
from penstock.errors import ConfigError
from penstock.kernels import reference
from penstock.kernels.int4_tensor import CODEBOOKS, SCALE_CODES, Int4Tensor, StackedMatrix
from penstock.kernels.operands import (
    ACTIVATION_CODES,
    KV_CODES,
    MAX_IN_FEATURES,
    ActivationFunction,
    AttentionSpec,
    BatchLayout,
    LayerKV,
    Matrix,
    QuantizedTensor,
    address,
)
from penstock.kernels.planes_tensor import PlanesTensor
from penstock.kernels.protocol import KernelTraits

logger = logging.getLogger(__name__)

_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_BUILDS_OF_MACHINES: dict[str, tuple[tuple[str, frozenset[str]], ...]] = {
    "x86_64": (
        ("amx", _AVX512 | {"avx512_vnni", "amx_tile", "amx_int8"}),
        ("avx512", _AVX512 | {"avx512_vnni"}),
        ("avxvnni", _AVX2 | {"avx_vnni"}),
        ("avx512bw", _AVX512),
        ("avx2", _AVX2),
    ),
    "aarch64": (("i8mm", frozenset({"asimddp", "i8mm"})), ("neon", frozenset({"asimddp"}))),
}
#: Names of one machine in several systems.
_MACHINES = {"AMD64": "x86_64", "arm64": "aarch64"}


def builds_of(machine: str) -> tuple[tuple[str, frozenset[str]], ...]:
    """Builds of cpu.c for a machine of this name (from platform.machine()), best first. Each build comes with
    the flags of /proc/cpuinfo that the processor must have."""
    return (*_BUILDS_OF_MACHINES.get(_MACHINES.get(machine, machine), ()), ("generic", frozenset()))


BUILDS = builds_of(platform.machine())
#: The integers of each codebook, as bytes.
_TABLES = {name: bytes(value & 255 for value in values) for name, values in CODEBOOKS.items()}
#: Dimensions per head that cpu.c keeps on its stack.
MAX_HEAD_DIM = 256
#: Keys of a partial result of attention (SPLIT in attention_rows.h).
SPLIT_KEYS = 1024
#: The most bytes for all partial results of a step: with more of them, there are tokens enough to give every
#: thread work, and no sequence needs to be shared.
MAX_PARTIAL_BYTES = 16 << 20


class NativeKernels:
    """cpu.c, called through ctypes. All tensors are float32 on the CPU, rows contiguous."""

    traits = KernelTraits(
        name="native",
        has_own_threads=True,
        gathers_keys=False,
        workspace_factor=1.0,
        matrices=(QuantizedTensor, Int4Tensor, PlanesTensor, StackedMatrix),
        group_sizes=GROUP_SIZES,
        kv_layouts=tuple(KV_CODES),
    )
    #: In a twin without arithmetic, the tokens of the longest sequence that the original will meet; else 0.
    _longest = 0

    def __init__(self, activations: str = "int16", build: str | None = None) -> None:
        """`build` names one of BUILDS; None takes the best that was compiled and the processor runs.

        Raises ConfigError where there is none.
        """
        self.activations = activations
        self.build: str
        self._library: Any
        self.build, self._library = load_library(build)
        if self.build == "amx" and not self._library.penstock_has_tiles():
            logger.warning("AMX can't be used (the system refuses it, or its trial failed): AVX512 serves")
        self._activation_bits = 16 if activations == "int16" else 8

    def set_num_threads(self, num_threads: int) -> int:
        """Set the threads of all native kernels of this process. Returns how many there are now; the log says
        if the system gives fewer."""
        there: int = self._library.penstock_set_num_threads(num_threads)
        if there != num_threads:
            logger.warning("native kernels compute with %d threads instead of %d", there, num_threads)
        return there

    def without_arithmetic(self, longest: int) -> NativeKernels:
        """A twin whose products, norms and attention compute nothing."""
        twin = copy.copy(self)
        twin._library, twin._longest = _Idle(), longest
        return twin

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, QuantizedTensor):  # the usual case, without a further call
            num_tokens, in_features = x.shape
            if in_features > MAX_IN_FEATURES:
                return reference.linear(x, weight, bias, self.activations)
            out_features, num_groups, qweight, scale = weight.native
            y = torch.empty(num_tokens, out_features)
            scratch = _scratch(num_tokens, in_features, num_groups)
            self._library.penstock_int8_linear(
                x.data_ptr(), x.stride(0), num_tokens, in_features, qweight, scale, num_groups,
                None if bias is None else bias.data_ptr(), out_features,
                self._activation_bits, y.data_ptr(), scratch.data_ptr(),
            )  # fmt: skip
            return y
        if isinstance(weight, Int4Tensor):
            return self._int4_linear(x, weight, bias)
        if isinstance(weight, PlanesTensor):
            return self._planes_linear(x, weight, bias)
        if isinstance(weight, StackedMatrix):
            return weight.product(self.linear, x, bias)
        raise self.traits.unknown_matrix(weight)

    def _int4_linear(self, x: Tensor, weight: Int4Tensor, bias: Tensor | None) -> Tensor:
        if weight.order is not None:
            x = x[:, weight.order]
        (num_tokens, in_features), num_groups = x.shape, weight.num_groups
        y = torch.empty(num_tokens, weight.out_features)
        scratch = _scratch(num_tokens, in_features, num_groups)
        self._library.penstock_int4_linear(
            x.data_ptr(), x.stride(0), num_tokens, in_features,
            weight.codes.data_ptr(), _TABLES[weight.codebook], weight.scale.data_ptr(),
            address(weight.minimum), address(weight.sub_scale), address(weight.sub_minimum),
            SCALE_CODES[weight.scale.dtype], num_groups // weight.scale.shape[1], num_groups, address(bias),
            weight.out_features, self._activation_bits, y.data_ptr(), scratch.data_ptr(),
        )  # fmt: skip
        return y

    def _planes_linear(self, x: Tensor, weight: PlanesTensor, bias: Tensor | None) -> Tensor:
        num_tokens, in_features = x.shape
        if in_features > MAX_IN_FEATURES:
            return reference.linear(x, weight.joined(), bias, self.activations)
        out_features, num_groups, upper, lower, scale, lower_bytes = weight.native
        y = torch.empty(num_tokens, out_features)
        scratch = _scratch(num_tokens, in_features, num_groups)
        self._library.penstock_planes_linear(
            x.data_ptr(), x.stride(0), num_tokens, in_features, upper, lower, lower_bytes, scale, num_groups,
            address(bias), out_features, self._activation_bits, y.data_ptr(), scratch.data_ptr(),
        )  # fmt: skip
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        y = torch.empty(x.shape)
        rows = x if x.dim() == 2 else x.flatten(0, -2)
        num_rows, width = rows.shape
        self._library.penstock_rms_norm(
            rows.data_ptr(), rows.stride(0), num_rows, width, weight.data_ptr(), offset, eps, y.data_ptr()
        )
        return y

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y = torch.empty(x.shape)
        rows = x if x.dim() == 2 else x.flatten(0, -2)
        num_rows, width = rows.shape
        self._library.penstock_layer_norm(
            rows.data_ptr(), rows.stride(0), num_rows, width,
            address(weight), address(bias), eps, y.data_ptr(),
        )  # fmt: skip
        return y

    def activation(self, x: Tensor, function: ActivationFunction) -> Tensor:
        return self._activate(x, x.shape[1], function, False)

    def gated_activation(self, gate_up: Tensor, function: ActivationFunction) -> Tensor:
        return self._activate(gate_up, gate_up.shape[1] // 2, function, True)

    def _activate(self, x: Tensor, width: int, function: ActivationFunction, gated: bool) -> Tensor:
        y = torch.empty(x.shape[0], width)
        self._library.penstock_activation(
            x.data_ptr(), x.stride(0), x.shape[0], width, ACTIVATION_CODES[function], gated,
            y.data_ptr(),
        )  # fmt: skip
        return y

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool = False) -> None:
        num_tokens, num_heads, head_dim = x.shape
        self._library.penstock_rope(
            x.data_ptr(), x.stride(0), num_tokens, num_heads, head_dim, cos.shape[1],
            cos.data_ptr(), sin.data_ptr(), is_interleaved,
        )  # fmt: skip

    def write_kv(self, k: Tensor, v: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
        self._library.penstock_write_kv(
            k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), k.shape[0], slot_mapping.data_ptr(),
            *kv.native,
        )  # fmt: skip

    def paged_attention(self, q: Tensor, kv: LayerKV, batch: BatchLayout, spec: AttentionSpec) -> Tensor:
        *_, head_dim, block_size = kv.native
        if head_dim > MAX_HEAD_DIM:  # a rare shape, which is not worth a second path in C
            return reference.paged_attention(q, kv, batch, spec)
        num_tokens, num_heads = q.shape[0], spec.num_heads
        y = torch.empty(num_tokens, num_heads * head_dim)
        tiles = torch.empty(2 * num_tokens)  # of 4 bytes, as C's int32_t
        max_blocks = max(batch.native[1], -(-self._longest // block_size))
        num_partial_bytes = _partial_bytes(
            num_tokens * num_heads, max_blocks * block_size, head_dim, is_most=self._longest > 0
        )
        partials = torch.empty(num_partial_bytes // 4) if num_partial_bytes else None
        self._library.penstock_paged_attention(
            q.data_ptr(), q.stride(0), y.data_ptr(), num_heads * head_dim, num_heads,
            *kv.native, *batch.native, *spec.native, tiles.data_ptr(), address(partials),
        )  # fmt: skip
        return y


def _scratch(num_tokens: int, in_features: int, num_groups: int) -> Tensor:
    """Room for a product's activations as integers, with their sums and scales. The elements are float32,
    since torch allocates its default dtype faster than others."""
    token_bytes = 2 * ((in_features + 127) // 128 * 128) + 8 * num_groups + 4
    tokens = num_tokens if num_tokens <= 1 else (num_tokens + 7) // 8 * 8
    return torch.empty(tokens * token_bytes // 4)


def _partial_bytes(num_rows: int, num_keys: int, head_dim: int, is_most: bool) -> int:
    """Bytes of partial results, if threads are to share sequences; otherwise 0. With `is_most`, the most that
    this step or a smaller one takes: where this step's are too many, a smaller step reaches the limit."""
    num_splits = -(-num_keys // SPLIT_KEYS)
    num_bytes = 4 * num_rows * num_splits * (-(-head_dim // 16) * 16 + 16)
    if is_most:
        num_bytes = min(num_bytes, MAX_PARTIAL_BYTES)
    return num_bytes if num_splits > 1 and num_bytes <= MAX_PARTIAL_BYTES else 0


class _Idle:
    """A library whose functions do nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


def compiled_builds() -> list[str]:
    """Names of the builds of cpu.c that exist and that this processor runs, best first."""
    flags = _processor_flags()
    return [name for name, needs in BUILDS if needs <= flags and _library_path(name) is not None]


def build_fingerprint() -> str:
    """A text that tells apart builds with different code, for the build that NativeKernels takes here."""
    build = next(iter(compiled_builds()), "none")
    path = _library_path(build)
    return f"{build} {zlib.crc32(path.read_bytes()):08x}" if path else build


def _library_path(build: str) -> Path | None:
    return next(Path(__file__).parent.glob(f"_cpu_{build}.*so"), None)


def _processor_flags() -> frozenset[str]:
    """What the processor can do, in the words of Linux's /proc/cpuinfo."""
    if sys.platform == "darwin":
        return frozenset(flag for flag, key in _APPLE_KEYS.items() if _sysctl(key))
    try:
        return cpuinfo_flags(Path("/proc/cpuinfo").read_text())
    except OSError:  # this is neither Linux nor macOS: the generic build runs anywhere
        return frozenset()


def cpuinfo_flags(text: str) -> frozenset[str]:
    """The flags of the first processor of /proc/cpuinfo; ARM's are called features."""
    lines = (line.partition(":") for line in text.splitlines())
    found = (flags for name, _, flags in lines if name.strip() in ("flags", "Features"))
    return frozenset(next(found, "").split())


#: Flags of /proc/cpuinfo, and the keys under which macOS tells the same.
_APPLE_KEYS = {
    "asimddp": "hw.optional.arm.FEAT_DotProd",
    "i8mm": "hw.optional.arm.FEAT_I8MM",
}


def _sysctl(key: str) -> bool:
    """Whether a number that macOS keeps under this key is there and not 0."""
    value, size = ctypes.c_int64(), ctypes.c_size_t(8)
    found: int = ctypes.CDLL(None).sysctlbyname(
        key.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
    )
    return found == 0 and value.value != 0


def load_library(build: str | None) -> tuple[str, ctypes.CDLL]:
    """A build of BUILDS and its library; None takes the best. Raises ConfigError where there is none."""
    available = compiled_builds()
    chosen = build if build is not None else (available or [""])[0]
    if chosen not in available:
        raise ConfigError(
            f"no native CPU kernels{f' of build {build!r}' if build else ''} for this processor "
            f"(there are: {', '.join(available) or 'none'}). Install a C compiler and reinstall "
            "penstock, or choose --kernels torch."
        )
    path = _library_path(chosen)
    assert path is not None
    return chosen, open_library(path)


def open_library(path: Path) -> ctypes.CDLL:
    """A build of cpu.c, loaded, with the types of its functions' parameters.

    Raises ConfigError for a build of older sources, which lacks a function.
    """
    library = ctypes.CDLL(str(path))
    for name, types in _SIGNATURES.items():
        function = getattr(library, name, None)
        if function is None:
            raise ConfigError(
                f"{path} was compiled from older sources: it has no {name}. Compile the kernels again: "
                "make install, or pip install -e ."
            )
        function.argtypes, function.restype = types, None
    library.penstock_set_num_threads.restype = library.penstock_has_tiles.restype = _I
    library.penstock_read.restype, library.penstock_tune.restype = _N, _I
    return library


_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, Sequence[type[ctypes._SimpleCData[int]] | type]] = {
    "penstock_set_num_threads": (_I,),
    "penstock_has_tiles": (),
    "penstock_read": (_P, _N, _I, _N),
    "penstock_tune": (_N, _N, _N, _N, _N),
    "penstock_int8_linear": (_P, _N, _N, _N, _P, _P, _N, _P, _N, _I, _P, _P),
    "penstock_int4_linear": (_P, _N, _N, _N, _P, _P, _P, _P, _P, _P, _I, _N, _N, _P, _N, _I, _P, _P),
    "penstock_planes_linear": (_P, _N, _N, _N, _P, _P, _N, _P, _N, _P, _N, _I, _P, _P),
    "penstock_rms_norm": (_P, _N, _N, _N, _P, _F, _F, _P),
    "penstock_layer_norm": (_P, _N, _N, _N, _P, _P, _F, _P),
    "penstock_activation": (_P, _N, _N, _N, _I, _I, _P),
    "penstock_rope": (_P, _N, _N, _N, _N, _N, _P, _P, _I),
    "penstock_quantize_weights": (_P, _I, _N, _N, _P, _P, _P),
    "penstock_write_kv": (_P, _N, _P, _N, _N, _P, _P, _P, _I, _N, _N, _N),
    "penstock_paged_attention": (
        _P, _N, _P, _N, _N, _P, _P, _I, _N, _N, _N, _P, _N, _P, _P, _P, _N, _F, _F, _N, _P, _P, _N, _N, _P,
        _P, _P,
    ),
}  # fmt: skip
