"""The builds of cpu.c: which of them this processor runs, and their functions through ctypes."""

from __future__ import annotations

import ctypes
import platform
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import ConfigError

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


def compiled_builds() -> list[str]:
    """Names of the builds of cpu.c that exist and that this processor runs, best first."""
    return [name for name in runnable_builds() if _library_path(name) is not None]


def runnable_builds() -> list[str]:
    """Names of the builds of cpu.c that this processor runs, whether they were compiled or not, best
    first."""
    flags = _processor_flags()
    return [name for name, needs in BUILDS if needs <= flags]


def build_fingerprint() -> str:
    """A text that tells apart builds with different code, for the build that NativeKernels takes here."""
    build = next(iter(compiled_builds()), "none")
    path = _library_path(build)
    return f"{build} {zlib.crc32(path.read_bytes()):08x}" if path else build


def _library_path(build: str) -> Path | None:
    # The first name is .abi3.so; an older checkout may have left a file with a version of Python in its name.
    return min(Path(__file__).parent.glob(f"_cpu_{build}.*so"), default=None)


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
            "penstock-llm, or choose --kernels torch."
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
    library.penstock_read.restype = library.penstock_gated_experts.restype = _N
    library.penstock_tune.restype = library.penstock_multiplies_bytes.restype = _I
    library.penstock_write_kv.restype = library.penstock_attention_sublayer.restype = _I
    library.penstock_layers.restype = _I
    library.penstock_mixture_layers.restype = _N
    library.penstock_crossing_begin.restype = library.penstock_crossing_end.restype = _I
    library.penstock_crossing_wait.restype = library.penstock_crossing_attend.restype = _I
    library.penstock_crossing_open.restype = _P
    return library


_P, _N, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_F, _D = ctypes.c_float, ctypes.c_double
_SIGNATURES: dict[str, Sequence[type[ctypes._SimpleCData[int]] | type]] = {
    "penstock_set_num_threads": (_I,),
    "penstock_has_tiles": (),
    "penstock_multiplies_bytes": (),
    "penstock_read": (_P, _N, _I, _N),
    "penstock_tune": (_N, _N, _N, _N, _N, _N),
    "penstock_int8_linear": (_P, _N, _N, _N, _P, _P, _N, _P, _N, _I, _P, _P),
    "penstock_int4_linear": (_P, _N, _N, _N, _P, _P, _P, _P, _P, _P, _I, _I, _N, _N, _P, _N, _I, _P, _P),
    "penstock_planes_linear": (_P, _N, _N, _N, _P, _P, _N, _P, _N, _P, _N, _I, _P, _P),
    "penstock_head_linear": (_P, _N, _N, _N, _N, _P, _P, _N, _N, _N, _N, _I, _I, _P),
    "penstock_rms_norm": (_P, _N, _N, _N, _P, _F, _F, _P),
    "penstock_layer_norm": (_P, _N, _N, _N, _P, _P, _F, _P),
    "penstock_activation": (_P, _N, _N, _N, _I, _F, _F, _I, _P),
    "penstock_router_scores": (_P, _N, _N, _N, _P, _P, _N, _I, _P),
    "penstock_route": (_P, _N, _N, _N, _P, _P, _P, _P, _P, _P, _P),
    "penstock_gated_experts": (_P, _N, _P, _P, _N, _I, _F, _F, _I, _P, _P, _N, _P, _P, _P),
    "penstock_token_experts": (_P, _P, _N, _I, _F, _F, _I, _P, _P, _P, _P),
    "penstock_weighted_sum": (_P, _P, _P, _P, _N, _N, _N, _P),
    "penstock_add_low_rank": (_P, _N, _N, _P, _N, _P, _N, _P, _N, _P, _N, _P, _N),
    "penstock_rope": (_P, _N, _N, _N, _N, _N, _P, _P, _I),
    "penstock_quantize_weights": (_P, _I, _N, _N, _P, _P, _P),
    "penstock_write_kv": (_P, _N, _P, _N, _N, _P, _P, _P, _I, _N, _N, _N),
    "penstock_paged_attention": (
        _P, _N, _P, _N, _N, _P, _P, _I, _N, _N, _N, _P, _N, _P, _P, _P, _N, _F, _F, _N, _N, _P, _P, _N, _N,
        _P, _P, _N, _P, _P,
    ),
    "penstock_attention_sublayer": (
        _P, _P, _N, _P, _P, _N, _P, _P, _P, _I, _N, _N, _N, _P, _N, _P, _P, _P, _N, _I, _P, _P, _P, _P,
    ),
    "penstock_mix": (_P, _P, _N, _P, _P, _P, _I, _P, _P),
    "penstock_layers": (_P, _N, _P, _P, _P, _I, _F, _F, _F, _P, _P),
    "penstock_mixture_layers": (_P, _N, _I, _P, _P, _P, _P),
    "penstock_handed_product": (_P,),
    "penstock_attend": (_P, _P, _P),
    "penstock_crossing_open": (_P, _P, _P, _N, _P),
    "penstock_crossing_begin": (_P, _P, _N, _N, _N, _N, _P),
    "penstock_crossing_attend": (_P, _P, _N, _N, _P),
    "penstock_crossing_end": (_P, _P),
    "penstock_crossing_wait": (_P, _P),
    "penstock_crossing_close": (_P,),
    "penstock_short_conv": (_P, _N, _N, _P, _N, _N, _P, _N, _P, _P, _P, _P, _P, _P, _P, _P, _N),
    "penstock_recurrence": (
        _P, _N, _P, _N, _P, _N, _P, _P, _P, _P, _N, _N, _N, _N, _P, _P, _P, _P, _P, _P, _N, _N,
    ),
    "penstock_decays": (_P, _N, _N, _N, _N, _P, _P, _D, _D, _D, _P, _P),
    "penstock_gates": (_P, _N, _N, _N, _D, _P),
}  # fmt: skip
