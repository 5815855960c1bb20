"""The .cu files compiled as C++ and run on the CPU, in the place of a GPU: see emulated_cuda.h."""

from __future__ import annotations

import ctypes
import functools
import mmap
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from compiled import compiled
from torch import Tensor

from penstock.kernels.cuda.kernels import CudaKernels
from penstock.kernels.cuda.launcher import OPEN, SIGNATURES, Arguments, Prepared
from penstock.kernels.cuda.nvrtc import source

COMPILER = shutil.which("g++") or shutil.which("clang++")
#: -Og compiles in half of -O1's time. No fused multiply-add, as on the device; what a GPU refuses (misaligned
#: loads) or what C++ leaves open ends the process.
FLAGS = (
    "-Og", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off",
    "-fno-strict-aliasing", "-U_FORTIFY_SOURCE",
    "-Wall", "-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-sign-compare", "-Wno-unused-variable",
    "-fsanitize=alignment,bounds,shift,signed-integer-overflow,float-cast-overflow,integer-divide-by-zero",
    "-fsanitize-undefined-trap-on-error",
)  # fmt: skip


@functools.cache
def library(program: str | None = None, kernels: tuple[str, ...] = tuple(SIGNATURES)) -> ctypes.CDLL:
    """Every kernel that launcher.py knows, from the .cu files, or some kernels from another text."""
    assert COMPILER is not None
    wrappers = "\n".join(f'EMULATE({name}, "{SIGNATURES[name]}")' for name in kernels)
    text = f'#include "emulated_cuda.h"\n{program or source()}\n#include "fake_cuda_driver.h"\n{wrappers}\n'
    command = [COMPILER, *FLAGS, "-I", str(Path(__file__).parent)]
    return ctypes.CDLL(str(compiled(command, text, ".cpp")))


class EmulatedLauncher:
    """A CudaLauncher whose device is the CPU. The threads of a block run from first to last and then, on the
    same inputs, from last to first: a missing barrier shows as a difference. Each tensor ends at a page that
    can't be touched, so that reading or writing beyond it ends the process.

    finds_races=False: one launch runs from first to last, and the next one from last to first."""

    def __init__(
        self, num_multiprocessors: int = 10, kernels: ctypes.CDLL | None = None, finds_races: bool = True
    ) -> None:
        self.num_multiprocessors = num_multiprocessors
        self._finds_races = finds_races
        self.has_tensor_cores = False
        self._library = kernels or library()
        self.launched: list[str] = []

    def prepare(self, name: str, grid: Sequence[int], num_threads: int, *values: object) -> Prepared:
        def launch(*given: object) -> None:
            left = iter(given)
            filled = [next(left) if value is OPEN else value for value in values]
            assert next(left, OPEN) is OPEN
            self.launch(name, grid, num_threads, *filled)

        return launch

    def launch(self, name: str, grid: Sequence[int], num_threads: int, *values: object) -> None:
        assert len(grid) <= 3 and all(size < 65536 for size in grid[1:]) and grid[0] < 2**31
        assert num_threads % 32 == 0 and num_threads <= 1024
        self.launched.append(name)
        tensors = {n: _bytes(value) for n, value in enumerate(values) if isinstance(value, Tensor)}
        results = []
        for order in (0, 1) if self._finds_races else (len(self.launched) % 2,):
            with _guarded(tensors) as copies:
                arguments = Arguments(SIGNATURES[name])
                arguments.fill([copies.get(n, value) for n, value in enumerate(values)])
                self._library[f"emulate_{name}"](*(*grid, 1, 1)[:3], num_threads, arguments.pointers, order)
                results.append({n: copy.clone() for n, copy in copies.items()})
        for n, original in tensors.items():
            assert torch.equal(results[0][n], results[-1][n]), f"{name}: a race for argument {n}"
            original.copy_(results[0][n])


def _bytes(tensor: Tensor) -> Tensor:
    """Everything from a tensor's first element to its last, as bytes."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    extent = extent if tensor.numel() else 0
    return tensor.as_strided((extent,), (1,)).view(torch.uint8)


@contextmanager
def _guarded(tensors: dict[int, Tensor]) -> Iterator[dict[int, Tensor]]:
    """Copies, each at the very end of a page; what does not begin on 16 bytes keeps its address modulo 16,
    and ends as near as that allows."""
    copies, maps = {}, []
    for key, tensor in tensors.items():
        num_pages = -(-(tensor.numel() + 16) // mmap.PAGESIZE)
        size = (num_pages + 1) * mmap.PAGESIZE
        maps.append(mmap.mmap(-1, size))
        end = num_pages * mmap.PAGESIZE
        begin, odd = end - tensor.numel(), tensor.data_ptr() % 16
        begin = (begin - odd) // 16 * 16 + odd if odd else begin
        whole = torch.frombuffer(maps[-1], dtype=torch.uint8)
        _protect(whole[end:], 0)
        copies[key] = whole[begin : begin + tensor.numel()]
        copies[key].copy_(tensor)
    yield copies


def _protect(pages: Tensor, protection: int) -> None:
    done = ctypes.CDLL(None).mprotect(
        ctypes.c_void_p(pages.data_ptr()), ctypes.c_size_t(pages.numel()), protection
    )
    assert done == 0


def emulated_kernels(activations: str = "int16", finds_races: bool = True) -> CudaKernels:
    """CudaKernels on the CPU."""
    return CudaKernels(EmulatedLauncher(finds_races=finds_races), activations)
