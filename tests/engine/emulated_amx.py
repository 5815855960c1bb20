"""cpu.c's AMX build on processors with AVX512-VNNI alone, tile registers in plain C: see emulated_amx.h."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

from penstock.kernels import cpu
from penstock.kernels.cpu import NativeKernels, compiled_builds, open_library

COMPILER = shutil.which("cc") if "avx512" in compiled_builds() else None
FLAGS = (
    "-O2", "-std=gnu11", "-pthread", "-fvisibility=hidden", "-Wno-psabi", "-Wall", "-Wextra", "-Werror",
    "-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni",
    "-mprefer-vector-width=512",
)  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL:
    assert COMPILER is not None
    header, source = Path(__file__).with_suffix(".h"), Path(cpu.__file__).with_suffix(".c")
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, "emulated_amx.so")
        command = [
            COMPILER,
            *FLAGS,
            "-include",
            str(header),
            "-shared",
            "-fPIC",
            str(source),
            "-o",
            str(built),
        ]
        done = subprocess.run([*command, "-lm"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return open_library(built)


def emulated_amx_kernels(activations: str = "int16") -> NativeKernels:
    native = NativeKernels(activations, build="avx512")
    native.build, native._library = "amx", library()
    return native


def num_tile_products() -> int:
    """So far."""
    return ctypes.c_long.in_dll(library(), "emulated_products").value
