"""cpu.c's AVX-VNNI build on processors with AVX2 alone: see emulated_avxvnni.h."""

from __future__ import annotations

import ctypes
import functools
import shutil
from pathlib import Path

from compiled import compiled

from penstock.kernels import cpu
from penstock.kernels.cpu import NativeKernels
from penstock.kernels.cpu_builds import compiled_builds, open_library

#: None where the build itself runs, too: nothing is compiled then.
COMPILER = shutil.which("cc") if "avx2" in compiled_builds() and "avxvnni" not in compiled_builds() else None
FLAGS = (
    "-Og", "-std=gnu11", "-pthread", "-fvisibility=hidden", "-Wno-psabi", "-Wall", "-Wextra", "-Werror",
    "-mavx2", "-mfma", "-mf16c",
)  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL:
    assert COMPILER is not None
    files = (Path(__file__).with_suffix(".h"), Path(cpu.__file__).with_suffix(".c"))
    text = "".join(f'#include "{file}"\n' for file in files)
    return open_library(compiled([COMPILER, *FLAGS, "-shared", "-fPIC", "-lm"], text, ".c"))


def emulated_avxvnni_kernels(activations: str = "int16") -> NativeKernels:
    native = NativeKernels(activations, build="avx2")
    native.use("avxvnni", library())
    return native
