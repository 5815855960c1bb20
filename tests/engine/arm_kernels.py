"""cpu.c's builds for ARM, compiled for ARM and run by qemu. Each call goes to a process of qemu, with its
buffers."""

from __future__ import annotations

import ctypes
import functools
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compiled import compiled

from penstock.kernels import cpu, cpu_builds
from penstock.kernels.cpu import NativeKernels
from penstock.kernels.cpu_builds import builds_of
from penstock.kernels.low_codes import row_bytes
from penstock.kernels.operands import KV_CODES
from penstock.kernels.sublayers.partial_results import partial_bytes
from penstock.spec import INT8, SCALE_BYTES

COMPILER, QEMU = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
BUILDS = [name for name, _ in builds_of("aarch64")] if COMPILER and QEMU else []
FLAGS = {
    "i8mm": ("-march=armv8.2-a+dotprod+i8mm",),
    "neon": ("-march=armv8.2-a+dotprod",),
    "generic": (),
}
COMMON_FLAGS = ("-Og", "-g0", "-std=gnu11", "-pthread", "-static", "-Wall", "-Wextra", "-Werror",
                "-Wno-psabi", "-Wno-cast-function-type")  # fmt: skip
FUNCTIONS = list(cpu_builds._SIGNATURES)

#: The bytes of each argument that is a buffer, by its place.
Sizes = dict[int, int]


def _rows(number: int, stride: int, width: int) -> int:
    return 4 * ((number - 1) * stride + width)


def _int8_sizes(a: tuple[Any, ...]) -> Sizes:
    tokens, width, groups, channels = a[2], a[3], a[6], a[8]
    scratch = tokens * (2 * -(-width // 64) * 64 + 8 * groups + 4)
    return {0: _rows(tokens, a[1], width), 4: channels * width, 5: 4 * channels * groups, 7: 4 * channels,
            10: 4 * tokens * channels, 11: scratch}  # fmt: skip


def _int4_sizes(a: tuple[Any, ...]) -> Sizes:
    tokens, width, bits, groups, channels = a[2], a[3], a[11], a[13], a[15]
    blocks = channels * (groups // a[12]) * (2 if a[10] else 4)
    scratch = tokens * (2 * -(-width // 64) * 64 + 8 * groups + 4)
    codes = channels * (width // 2 if bits == 4 else row_bytes(width, bits))
    return {0: _rows(tokens, a[1], width), 4: codes, 5: 16, 6: blocks, 7: blocks,
            8: channels * groups, 9: channels * groups, 14: 4 * channels, 17: 4 * tokens * channels,
            18: scratch}  # fmt: skip


def _planes_sizes(a: tuple[Any, ...]) -> Sizes:
    tokens, width, groups, channels = a[2], a[3], a[8], a[10]
    scratch = tokens * (2 * -(-width // 64) * 64 + 8 * groups + 4)
    lower = channels * width // 2 if a[6] else width // 2
    return {0: _rows(tokens, a[1], width), 4: channels * width // 2, 5: lower, 7: 4 * channels * groups,
            9: 4 * channels, 12: 4 * tokens * channels, 13: scratch}  # fmt: skip


def _norm_sizes(a: tuple[Any, ...]) -> Sizes:
    sizes = {0: _rows(a[2], a[1], a[3]), 4: 4 * a[3], 7: 4 * a[2] * a[3]}
    return sizes if isinstance(a[5], float) else sizes | {5: 4 * a[3]}


def _activation_sizes(a: tuple[Any, ...]) -> Sizes:
    return {0: _rows(a[2], a[1], a[3] * (2 if a[7] else 1)), 8: 4 * a[2] * a[3]}


def _rope_sizes(a: tuple[Any, ...]) -> Sizes:
    return {0: _rows(a[2], a[1], a[3] * a[4]), 6: 4 * a[2] * a[5], 7: 4 * a[2] * a[5]}


def _most(address: int, kind: type[Any], number: int) -> int:
    return max((kind * number).from_address(address))


def _head_bytes(form: int, head_dim: int, block_size: int) -> int:
    """Keys or values of a head in a block, in a form of KV_CODES."""
    return (head_dim * (4 >> form) + (SCALE_BYTES if form == KV_CODES[INT8.name] else 0)) * block_size


def _write_sizes(a: tuple[Any, ...]) -> Sizes:
    cache = (_most(a[5], ctypes.c_int64, a[4]) // a[11] + 1) * a[9] * _head_bytes(a[8], a[10], a[11])
    return {0: _rows(a[4], a[1], a[9] * a[10]), 2: _rows(a[4], a[3], a[9] * a[10]), 5: 8 * a[4], 6: cache,
            7: cache}  # fmt: skip


def _attention_sizes(a: tuple[Any, ...]) -> Sizes:
    heads, kv_heads, width, block, max_blocks, sequences = a[4], a[8], a[9], a[10], a[12], a[16]
    tokens = _most(a[13], ctypes.c_int32, sequences + 1)
    num_blocks = _most(a[11], ctypes.c_int32, sequences * max_blocks) + 1
    cache = num_blocks * kv_heads * _head_bytes(a[7], width, block)
    partials = partial_bytes(tokens * heads, max_blocks * block, width, False)
    return {0: _rows(tokens, a[1], heads * width), 2: 4 * tokens * heads * width, 5: cache, 6: cache,
            11: 4 * sequences * max_blocks, 13: 4 * (sequences + 1), 14: 4 * sequences, 15: 4 * sequences,
            21: 4 * heads, 22: 4 * heads * (2 * a[23] + 1), 25: 8 * heads, 26: 4 * heads, 28: 8 * tokens,
            29: partials}  # fmt: skip


#: Of each function: the sizes of its buffers, and the places of those that it writes.
BUFFERS: dict[str, tuple[Callable[[tuple[Any, ...]], Sizes], set[int]]] = {
    "penstock_read": (lambda a: {0: a[1]}, set()),
    "penstock_int8_linear": (_int8_sizes, {10}),
    "penstock_int4_linear": (_int4_sizes, {17}),
    "penstock_planes_linear": (_planes_sizes, {12}),
    "penstock_rms_norm": (_norm_sizes, {7}),
    "penstock_layer_norm": (_norm_sizes, {7}),
    "penstock_activation": (_activation_sizes, {8}),
    "penstock_rope": (_rope_sizes, {0}),
    "penstock_write_kv": (_write_sizes, {6, 7}),
    "penstock_paged_attention": (_attention_sizes, {2}),
}


class ArmLibrary:
    """What ctypes would give for a library of this machine."""

    def __init__(self, build: str) -> None:
        assert COMPILER and QEMU
        table = ", ".join(f"(void *){name}" for name in FUNCTIONS)
        text = (
            f'#include "{Path(cpu.__file__).with_suffix(".c")}"\n'
            f"static void *const FUNCTIONS[] = {{{table}}};\n"
            f'#include "{Path(__file__).with_name("arm_driver.h")}"\n'
        )
        program = compiled([COMPILER, *COMMON_FLAGS, *FLAGS[build]], text, ".c", ["-lm"])
        self._process = subprocess.Popen(
            [QEMU, "-cpu", "max", str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __getattr__(self, name: str) -> Callable[..., int]:
        return functools.partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> int:
        sizes_of, written = BUFFERS.get(name, (lambda a: {}, set()))
        sizes, kinds = sizes_of(arguments), cpu_builds._SIGNATURES[name]
        parts = [struct.pack("=ii", FUNCTIONS.index(name), len(arguments))]
        for place, (kind, value) in enumerate(zip(kinds, arguments, strict=True)):
            if kind is ctypes.c_float:
                parts.append(struct.pack("=cf", b"f", value))
            elif place in sizes and value is not None:
                parts.append(struct.pack("=cq", b"o" if place in written else b"b", sizes[place]))
                parts.append(value if isinstance(value, bytes) else ctypes.string_at(value, sizes[place]))
            else:
                parts.append(struct.pack("=cq", b"i", value or 0))
        assert self._process.stdin is not None
        self._process.stdin.write(b"".join(parts))
        self._process.stdin.flush()
        result: int = struct.unpack("=q", self._read(8))[0]
        for place in sorted(written):
            ctypes.memmove(arguments[place], self._read(sizes[place]), sizes[place])
        return result

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        assert len(data) == size, f"qemu ended with {self._process.wait()}"
        return data


@functools.cache
def library(build: str) -> ArmLibrary:
    return ArmLibrary(build)


def arm_kernels(build: str, activations: str = "int16") -> NativeKernels:
    native = NativeKernels(activations, build="generic")
    native.build, native._library = build, library(build)
    return native
