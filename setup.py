"""The C kernels: builds of cpu.c for the machine at hand. pyproject.toml has everything else.

cpu.c is compiled once per instruction set, all builds at the same time. Each build is optional: a build is
left out where the compiler does not know its instructions, and without any build the torch kernels serve. The
builds are plain shared libraries, which are loaded with ctypes.
"""

import os
import platform
from glob import glob

from setuptools import Extension, setup

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
MACHINES = {"x86_64": X86, "AMD64": X86, "aarch64": ARM, "arm64": ARM}


def extension(name: str, flags: list[str]) -> Extension:
    return Extension(
        f"penstock.kernels._cpu_{name}",
        sources=[f"{KERNELS}/cpu/builds/{name}.c"],
        depends=[f"{KERNELS}/cpu.c", *sorted(glob(f"{KERNELS}/cpu/**/*.h", recursive=True))],
        extra_compile_args=FLAGS + flags,
        extra_link_args=["-pthread", "-lm"],
        optional=True,
    )


if platform.system() == "Darwin":
    # A Python for two architectures would compile for both, and each build knows the instructions of one.
    os.environ.setdefault("ARCHFLAGS", f"-arch {platform.machine()}")
BUILDS = MACHINES.get(platform.machine(), {}) | {"generic": []}
setup(
    ext_modules=[extension(name, flags) for name, flags in BUILDS.items()],
    options={"build_ext": {"parallel": os.cpu_count()}},  # the builds at the same time
)
