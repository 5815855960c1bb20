"""Nvrtc: the compiler of the CUDA sources, through ctypes. Compiling needs no GPU.

NVRTC comes with every CUDA build of torch, or as nvidia-cuda-nvrtc-cu12 from a package index. For an
architecture that the library knows, NVRTC returns machine code: no driver has to translate machine code, and
no driver is too old for it. For a card that is newer than the library, NVRTC returns PTX of the newest
architecture that the library knows, and the driver translates the PTX.
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

#: These files are one program, in this order.
SOURCES = (
    "elementwise.cu",
    "int8.cu",
    "grouped.cu",
    "grouped_products.cu",
    "attention.cu",
    "attention_latent.cu",
    "recurrence.cu",
)
#: The compiler fuses no multiplication with an addition; elementwise.cu says why.
OPTIONS = ("--std=c++17", "--fmad=false", "--restrict")
INSTALL_NVRTC = (
    "pip install 'nvidia-cuda-nvrtc-cu12==12.6.*' brings an NVRTC for compute capability 6.1 to 9.0; newer "
    "cards need a newer one"
)
#: Oldest architecture with 8-bit dot products.
OLDEST_ARCHITECTURE = 61


def source() -> str:
    """All kernels as one text. #line directives keep the files' own names and line numbers."""
    folder = Path(__file__).parent
    return "".join(f'#line 1 "{name}"\n{(folder / name).read_text()}\n' for name in SOURCES)


class Nvrtc:
    """One NVRTC library."""

    def __init__(self, path: str) -> None:
        """Raises OSError if the library can't be loaded."""
        self._library = ctypes.CDLL(path)
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        architectures = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", architectures)
        #: Architectures as numbers: 61 is sm_61, compute capability 6.1.
        self.architectures = frozenset(architectures)

    def target(self, architecture: int) -> str | None:
        """The compiler's target for a card of this architecture; None if the card is too old for this
        library."""
        if architecture in self.architectures:
            return f"sm_{architecture}"
        newest = max(self.architectures)
        return f"compute_{newest}" if architecture > newest else None

    def compile(self, text: str, target: str) -> bytes:
        """Machine code for "sm_61", PTX for "compute_61". Raises ConfigError with the compiler's log."""
        return self.compile_with_log(text, target, OPTIONS)[0]

    def compile_with_log(self, text: str, target: str, options: Sequence[str]) -> tuple[bytes, str]:
        """What compile() returns, and the compiler's log."""
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
                    f"{target}:\n{log}\nChoose --kernels torch, and please report this error"
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
    """Every NVRTC library that can be loaded: first those of packages, then the system's."""
    found = []
    for path in dict.fromkeys(_paths()):
        try:
            found.append(Nvrtc(path))
        except (OSError, AttributeError, ConfigError) as error:
            logger.debug("%s can't be used as NVRTC: %s", path, error)
    return tuple(found)


def _paths() -> Iterator[str]:
    for entry in sys.path:
        # nvidia/cuda_nvrtc/lib in packages for CUDA 12, nvidia/cu13/lib in those for CUDA 13.
        yield from sorted(map(str, Path(entry or ".", "nvidia").glob("cu*/lib/libnvrtc.so.*")))
    yield from ("libnvrtc.so.12", "libnvrtc.so.13")


def find_nvrtc(architecture: int) -> Nvrtc | None:
    """The library for a card of this architecture (61 is compute capability 6.1). The oldest library that
    knows the architecture by name comes first, since a driver may refuse what a newer library compiled.
    Without one, the newest of the older libraries serves."""
    if architecture < OLDEST_ARCHITECTURE:
        return None
    able = sorted((lib for lib in _libraries() if lib.target(architecture)), key=lambda lib: lib.version)
    by_name = [library for library in able if architecture in library.architectures]
    return next(iter(by_name or reversed(able)), None)


def build_fingerprint(architecture: int) -> str:
    """A text that tells apart what compile_kernels() makes of different sources or with another NVRTC."""
    library = find_nvrtc(architecture)
    compiler = f"nvrtc {library.version[0]}.{library.version[1]}" if library else "no nvrtc"
    return f"{compiler} {zlib.crc32(source().encode()):08x}"


def compile_kernels(architecture: int, cache_folder: Path | None = None) -> bytes:
    """The kernels for a card of this architecture, as cuModuleLoadData takes them. `cache_folder` keeps them.

    Raises ConfigError where no NVRTC can compile for the card, or where NVRTC reports an error.
    """
    library = find_nvrtc(architecture)
    if library is None:
        is_old = architecture < OLDEST_ARCHITECTURE
        reason = (
            "cards before 6.1 have no 8-bit products. Choose --kernels torch"
            if is_old
            else f"no NVRTC for it was found. {INSTALL_NVRTC}. Or choose --kernels torch"
        )
        raise ConfigError(
            f"there are no CUDA kernels for compute capability {architecture // 10}.{architecture % 10}: "
            f"{reason}"
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
    """Write the file as a whole or not at all. Where the folder can't be written, the next start compiles
    again, which takes some seconds."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(image)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        logger.warning("compiled CUDA kernels can't be kept in %s: %s", path.parent, error.strerror)
