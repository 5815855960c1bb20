"""The C kernels: builds of cpu.c for the machine at hand. pyproject.toml has everything else.

cpu.c is compiled once per instruction set, all builds at the same time. Each build is optional: a build is
left out where the compiler does not know its instructions, and without any build the torch kernels serve.
With PENSTOCK_ALL_KERNELS=1, for wheels that others install, a build that does not compile is an error. The
builds are plain shared libraries, which are loaded with ctypes. They call nothing of Python's, so that one
wheel serves every version of Python.

A cross compiler makes a wheel for another processor: _PYTHON_HOST_PLATFORM=linux-aarch64 names the processor,
CC and LDSHARED the compiler.
"""

import os
import platform
import sysconfig
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

KERNELS = "engine/penstock/kernels"
# Debug information (-g, by default) would take a sixth of the compiler's time.
FLAGS = ["-O3", "-g0", "-std=gnu11", "-pthread", "-fvisibility=hidden", "-Wno-psabi"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
X86 = {
    "amx": [*AVX512, "-mavx512vnni", "-mamx-tile", "-mamx-int8"],
    "avx512": [*AVX512, "-mavx512vnni"],
    "avxvnni": [*AVX2, "-mavxvnni"],
    "avx512bw": AVX512,
    "avx2": AVX2,
}
ARM = {"i8mm": ["-march=armv8.2-a+dotprod+i8mm"], "neon": ["-march=armv8.2-a+dotprod"]}
MACHINES = {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}


def extension(name: str, flags: list[str]) -> Extension:
    return Extension(
        f"penstock.kernels._cpu_{name}",
        sources=[f"{KERNELS}/cpu/builds/{name}.c"],
        depends=[f"{KERNELS}/cpu.c", *sorted(glob(f"{KERNELS}/cpu/**/*.h", recursive=True))],
        extra_compile_args=FLAGS + flags,
        extra_link_args=["-pthread", "-lm"],
        optional=not os.environ.get("PENSTOCK_ALL_KERNELS"),
        py_limited_api=True,  # the file's name has no version of Python
    )


def reads() -> Extension:
    """Reads that a thread of C begins, by calls that Linux alone has."""
    return Extension(
        "penstock.memory.reads._ordered_reads",
        sources=["engine/penstock/memory/reads/ordered_reads.c"],
        extra_compile_args=FLAGS,
        extra_link_args=["-pthread"],
        optional=not os.environ.get("PENSTOCK_ALL_KERNELS"),
        py_limited_api=True,
    )


class Wheel(bdist_wheel):
    """A wheel for one system and processor, and for any Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


MACHINE = sysconfig.get_platform().rpartition("-")[2]
if platform.system() == "Darwin":
    # A Python for two architectures would compile for both, and each build knows the instructions of one.
    MACHINE = platform.machine()
    os.environ.setdefault("ARCHFLAGS", f"-arch {MACHINE}")
BUILDS = MACHINES.get(MACHINE, {}) | {"generic": []}
setup(
    cmdclass={"bdist_wheel": Wheel},
    ext_modules=[
        *(extension(name, flags) for name, flags in BUILDS.items()),
        *([reads()] if platform.system() == "Linux" else []),
    ],
    options={"build_ext": {"parallel": os.cpu_count()}},  # the builds at the same time
)
