"""The CUDA sources compiled for one GPU, by NVRTC through ctypes; no GPU is needed for that.

NVRTC comes with every CUDA build of torch, or as nvidia-cuda-nvrtc-cu12 from a package index. It is given the
real architecture and returns machine code, which no driver has to translate and none is too old for. Only for
a card that is newer than the library does it return PTX of the newest architecture it knows, which the driver
translates.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from penstock.errors import ConfigError

logger = logging.getLogger(__name__)

#: One program, in this order.
SOURCES = ("elementwise.cu", "int8.cu", "attention.cu")
#: No fused multiply-add but where fmaf is written: elementwise.cu says why.
OPTIONS = ("--std=c++17", "--fmad=false", "--restrict")
INSTALL_NVRTC = (
    "pip install 'nvidia-cuda-nvrtc-cu12==12.6.*' brings one for compute capability 6.1 to 9.0; newer cards "
    "need a newer one"
)
#: Oldest architecture with 8-bit dot products.
OLDEST_ARCHITECTURE = 61


def source() -> str:
    """All kernels as one text, whose line numbers are those of the files."""
    folder = Path(__file__).parent
    return "".join(f'#line 1 "{name}"\n{(folder / name).read_text()}\n' for name in SOURCES)


class Nvrtc:
    """One NVRTC library."""

    def __init__(self, path: str) -> None:
        """Raises OSError if it can't be loaded."""
        self._library = ctypes.CDLL(path)
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        architectures = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", architectures)
        #: As numbers: 61 is sm_61, compute capability 6.1.
        self.architectures = frozenset(architectures)

    def target(self, architecture: int) -> str | None:
        """What to compile for, for a card of this architecture; None if this library can't."""
        if architecture in self.architectures:
            return f"sm_{architecture}"
        newest = max(self.architectures)
        return f"compute_{newest}" if architecture > newest else None

    def compile(self, text: str, target: str) -> bytes:
        """Machine code for "sm_61", PTX for "compute_61". Raises ConfigError with the compiler's log."""
        return self.compile_with_log(text, target, OPTIONS)[0]

    def compile_with_log(self, text: str, target: str, options: Sequence[str]) -> tuple[bytes, str]:
        """compile(), and what the compiler said."""
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), b"penstock.cu", 0, None, None)
        try:
            given = [option.encode() for option in (*options, f"--gpu-architecture={target}")]
            array = (ctypes.c_char_p * len(given))(*given)
            code = self._library.nvrtcCompileProgram(program, len(given), array)
            log = self._result("nvrtcGetProgramLog", program).decode(errors="replace").strip("\0\n")
            if code:
                raise ConfigError(
                    f"NVRTC {self.version[0]}.{self.version[1]} can't compile the CUDA kernels for "
                    f"{target}:\n{log}\nChoose --kernels torch, and report this, please"
                )
            kind = "CUBIN" if target.startswith("sm_") else "PTX"
            return self._result(f"nvrtcGet{kind}", program), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _result(self, name: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{name}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(name, program, buffer)
        return buffer.raw

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise ConfigError(f"NVRTC: {name} failed: {self._library.nvrtcGetErrorString(code).decode()}")


@cache
def _libraries() -> tuple[Nvrtc, ...]:
    """Every NVRTC that can be loaded: of packages, then of the system."""
    found = []
    for path in dict.fromkeys(_paths()):
        try:
            found.append(Nvrtc(path))
        except (OSError, AttributeError, ConfigError) as error:
            logger.debug("%s is no NVRTC for us: %s", path, error)
    return tuple(found)


def _paths() -> Iterator[str]:
    for entry in sys.path:
        # nvidia/cuda_nvrtc/lib in packages for CUDA 12, nvidia/cu13/lib in those for CUDA 13.
        yield from sorted(map(str, Path(entry or ".", "nvidia").glob("cu*/lib/libnvrtc.so.*")))
    yield from ("libnvrtc.so.12", "libnvrtc.so.13")


def find_nvrtc(architecture: int) -> Nvrtc | None:
    """The library for a card of this architecture (61 is compute capability 6.1): the oldest that knows it
    by name, since drivers may refuse what is newer than they are; else the newest of those older than it."""
    if architecture < OLDEST_ARCHITECTURE:
        return None
    able = sorted((lib for lib in _libraries() if lib.target(architecture)), key=lambda lib: lib.version)
    by_name = [library for library in able if architecture in library.architectures]
    return next(iter(by_name or reversed(able)), None)


def build_fingerprint(architecture: int) -> str:
    """Of what compile_kernels() makes for a card of this architecture: another one for other code."""
    library = find_nvrtc(architecture)
    compiler = f"nvrtc {library.version[0]}.{library.version[1]}" if library else "no nvrtc"
    return f"{compiler} {zlib.crc32(source().encode()):08x}"


def compile_kernels(architecture: int, cache_folder: Path | None = None) -> bytes:
    """The kernels for a card of this architecture, as cuModuleLoadData takes them. `cache_folder` keeps them.

    Raises ConfigError where there is no NVRTC for it, or where it reports an error.
    """
    library = find_nvrtc(architecture)
    if library is None:
        is_old = architecture < OLDEST_ARCHITECTURE
        reason = (
            "6.1 is the oldest with 8-bit products"
            if is_old
            else f"no NVRTC for it was found. {INSTALL_NVRTC}"
        )
        raise ConfigError(
            f"no CUDA kernels for compute capability {architecture // 10}.{architecture % 10}: {reason}. Or "
            "choose --kernels torch"
        )
    text, target = source(), library.target(architecture)
    assert target is not None
    if cache_folder is None:
        return library.compile(text, target)
    key = hashlib.sha256("\0".join((text, *OPTIONS)).encode()).hexdigest()[:16]
    path = cache_folder / f"cuda-{key}-{target}-nvrtc{library.version[0]}.{library.version[1]}.bin"
    if path.is_file():
        return path.read_bytes()
    image = library.compile(text, target)
    _keep(path, image)
    return image


def _keep(path: Path, image: bytes) -> None:
    """As a whole or not at all; a folder that can't be written costs the next start some seconds."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(image)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        logger.warning("compiled CUDA kernels can't be kept in %s: %s", path.parent, error.strerror)
