"""Products of one large matrix by the native kernels, in INT8 with a scale per output channel and per group
of inputs, or in 4 bits, or in planes, beside what memory and arithmetic give at best. One token also meets a
part that lies in the caches: where that is read hardly faster, instructions (and the call) bind as well.

    python tests/bench/products.py [--rows 14336] [--columns 4096] [--build avx2] [--int4 | --planes]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import torch
from ceilings import int8_gops, memory_read_gbps, weights
from torch import Tensor

from penstock.kernels import Int4Tensor, Matrix, PlanesTensor, QuantizedTensor
from penstock.kernels.cpu import NativeKernels
from penstock.kernels.cpu_builds import compiled_builds
from penstock.memory.direct_io import aligned_buffer
from penstock.memory.hardware import num_physical_cores

NUM_TOKENS, GROUP_SIZES = (1, 8, 32, 512), (0, 128, 32)
#: Matrices in turn, so that none is in the caches; rounds of each.
NUM_MATRICES, ROUNDS = 6, 3
#: Bytes of weights that lie in the caches, and products in a row, of which the first brings them there.
CACHED_BYTES, CACHED_ROUNDS = 4 << 20, 4


def aligned(tensor: Tensor) -> Tensor:
    """The tensor in memory like that of an engine's weights."""
    buffer = aligned_buffer(tensor.nbytes)[: tensor.nbytes]
    return buffer.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def int8_matrices(matrices: Sequence[Tensor]) -> dict[str, list[Matrix]]:
    """A scale per channel, and per group."""
    rows, columns = matrices[0].shape
    kinds: dict[str, list[Matrix]] = {}
    for size in GROUP_SIZES:
        scale = torch.rand(rows, columns // size) if size else torch.rand(rows)
        name = f"groups of {size}" if size else "per channel"
        kinds[name] = [QuantizedTensor(matrix, scale) for matrix in matrices]
    return kinds


def int4_matrices(matrices: Sequence[Tensor]) -> dict[str, list[Matrix]]:
    """INT8 per channel; 4 bits in groups of 64, with scales in steps (as our own are) and without;
    MXFP4, whose scales are powers of two."""
    rows, columns = matrices[0].shape
    steps = torch.randint(7, 16, (rows, columns // 64))
    steps[:, 0] = 15
    kinds: dict[str, list[Matrix]] = {"INT8": [QuantizedTensor(each, torch.rand(rows)) for each in matrices]}
    for name, scale in {"INT4 with steps": steps / 1024, "INT4": torch.rand(rows, columns // 64)}.items():
        codes = [aligned(each.view(torch.uint8)[:, : columns // 2]) for each in matrices]
        kinds[name] = [Int4Tensor(each, scale.bfloat16(), 64) for each in codes]
    shifts = 2.0 ** torch.randint(-13, -9, (rows, columns // 32))
    kinds["MXFP4"] = [Int4Tensor(each, shifts.bfloat16(), 32, "mxfp4") for each in codes]
    return kinds


def planes_matrices(matrices: Sequence[Tensor]) -> dict[str, list[Matrix]]:
    """INT8, the same in planes, and the upper plane alone, per channel and in groups of 64."""
    rows, columns = matrices[0].shape
    kinds: dict[str, list[Matrix]] = {}
    for text, shape in {"": (rows,), ", groups of 64": (rows, columns // 64)}.items():
        whole = [QuantizedTensor(each, torch.rand(shape)) for each in matrices]
        planes = [PlanesTensor.of(each).map(aligned) for each in whole]
        kinds |= {f"INT8{text}": [*whole], f"planes{text}": [*planes]}
        kinds[f"upper plane{text}"] = [each.upper_alone() for each in planes]
    return kinds


def part_of(matrix: Matrix) -> Matrix:
    """As many channels as have CACHED_BYTES."""
    rows = max(64, CACHED_BYTES * matrix.out_features // num_bytes(matrix))
    return matrix.map(lambda tensor: tensor[:rows].clone())


def num_bytes(matrix: Matrix) -> int:
    """Bytes of weights, without scales."""
    if isinstance(matrix, PlanesTensor):
        return matrix.upper.nbytes + (0 if matrix.lower is None else matrix.lower.nbytes)
    assert isinstance(matrix, QuantizedTensor | Int4Tensor)
    return matrix.qweight.nbytes if isinstance(matrix, QuantizedTensor) else matrix.codes.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=14336)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--build", choices=compiled_builds(), help="of cpu.c; the best one unless told")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--int4", action="store_true", help="4 bits in groups of 64, beside INT8")
    kind.add_argument("--planes", action="store_true", help="INT8 in planes of 4 bits, beside INT8")
    options = parser.parse_args()
    rows, columns = options.rows, options.columns
    num_threads = num_physical_cores()
    ceilings = {
        "memory_read_gbps": memory_read_gbps(),
        "int8_gops": int8_gops(num_threads, build=options.build),
    }
    print(f"ceilings: memory {ceilings['memory_read_gbps']:.1f} GB/s, INT8 {ceilings['int8_gops']:.0f} GOPS")
    torch.set_num_threads(1)
    kernels = NativeKernels(build=options.build)
    kernels.set_num_threads(num_threads)
    matrices = weights(NUM_MATRICES, rows, columns)
    result: dict[str, float | str] = {"bench": "products", "build": kernels.build} | ceilings
    make = planes_matrices if options.planes else int4_matrices if options.int4 else int8_matrices
    kinds = make(matrices)
    parts = {name: part_of(each[0]) for name, each in kinds.items()}
    for num_tokens in NUM_TOKENS:
        x = torch.randn(num_tokens, columns)
        times: dict[str, list[float]] = {name: [] for name in kinds}
        cached: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(ROUNDS):
            for index in range(NUM_MATRICES):
                for name, found in times.items():
                    started = time.perf_counter()
                    kernels.linear(x, kinds[name][index])
                    found.append(time.perf_counter() - started)
                    for number in range(CACHED_ROUNDS if num_tokens == 1 else 0):
                        started = time.perf_counter()
                        kernels.linear(x, parts[name])
                        if number:
                            cached[name].append(time.perf_counter() - started)
        first = statistics.median(next(iter(times.values())))
        for name, found in times.items():
            seconds = statistics.median(found)
            gbps = num_bytes(kinds[name][0]) / seconds / 1e9
            gops = 2 * 2 * num_tokens * rows * columns / seconds / 1e9  # two rows of integers for each token
            shares = gbps / ceilings["memory_read_gbps"], gops / ceilings["int8_gops"]
            nearest = f"{max(shares):.0%} of the {'memory' if shares[0] > shares[1] else 'arithmetic'}"
            line = (
                f"{num_tokens:3} tokens, {name:26} {gbps:5.1f} GB/s {gops:5.0f} GOPS, {nearest}, "
                f"{first / seconds:.2f} times the first"
            )
            if cached[name]:
                in_caches = num_bytes(parts[name]) / statistics.median(cached[name]) / 1e9
                line += f", {gbps / in_caches:.0%} of {in_caches:.1f} GB/s in the caches"
                result[f"{num_tokens} tokens, {name}, GB/s in the caches"] = in_caches
            print(line)
            result[f"{num_tokens} tokens, {name}"] = seconds
    print(json.dumps(result))


if __name__ == "__main__":
    main()
