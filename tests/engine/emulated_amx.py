"""cpu.c's AMX build on processors with AVX512-VNNI alone, tile registers in plain C: see emulated_amx.h."""

from __future__ import annotations

import ctypes
import functools
import shutil
from pathlib import Path

from compiled import compiled

from penstock.kernels import cpu
from penstock.kernels.cpu import NativeKernels
from penstock.kernels.cpu_builds import compiled_builds, open_library

COMPILER = shutil.which("cc") if "avx512" in compiled_builds() else None
FLAGS = (
    "-Og", "-std=gnu11", "-pthread", "-fvisibility=hidden", "-Wno-psabi", "-Wall", "-Wextra", "-Werror",
    "-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni",
    "-mprefer-vector-width=512",
)  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL:
    assert COMPILER is not None
    files = (Path(__file__).with_suffix(".h"), Path(cpu.__file__).with_suffix(".c"))
    text = "".join(f'#include "{file}"\n' for file in files)
    return open_library(compiled([COMPILER, *FLAGS, "-shared", "-fPIC", "-lm"], text, ".c"))


def emulated_amx_kernels(activations: str = "int16") -> NativeKernels:
    native = NativeKernels(activations, build="avx512")
    native.use("amx", library())
    return native


def num_tile_products() -> int:
    """So far."""
    return ctypes.c_long.in_dll(library(), "emulated_products").value
