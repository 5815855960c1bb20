"""INT8 products of one large matrix by the native kernels, with a scale per output channel and per group of
inputs, beside what memory and arithmetic give at best.

    python tests/bench/products.py [--rows 14336] [--columns 4096] [--build avx2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from ceilings import int8_gops, memory_read_gbps, weights

from penstock.kernels import QuantizedTensor
from penstock.kernels.cpu import NativeKernels, compiled_builds
from penstock.memory.hardware import num_physical_cores

NUM_TOKENS, GROUP_SIZES = (1, 8, 32, 512), (0, 128, 32)
#: Matrices in turn, so that none is in the caches; rounds of each.
NUM_MATRICES, ROUNDS = 6, 3


def main() -> None:
    parser = argparse.ArgumentParser(description="INT8 products: GB/s of weights and GOPS")
    parser.add_argument("--rows", type=int, default=14336)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--build", choices=compiled_builds(), help="of cpu.c; the best one unless told")
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
    for num_tokens in NUM_TOKENS:
        x = torch.randn(num_tokens, columns)
        times: dict[int, list[float]] = {size: [] for size in GROUP_SIZES}
        for _ in range(ROUNDS):
            for size, found in times.items():
                scale = torch.rand(rows, columns // size) if size else torch.rand(rows)
                for qweight in matrices:
                    started = time.perf_counter()
                    kernels.linear(x, QuantizedTensor(qweight, scale))
                    found.append(time.perf_counter() - started)
        for size, found in times.items():
            seconds = statistics.median(found)
            name = f"groups of {size}" if size else "per channel"
            gbps = rows * columns / seconds / 1e9
            gops = 2 * 2 * num_tokens * gbps  # two rows of integers for each token
            shares = gbps / ceilings["memory_read_gbps"], gops / ceilings["int8_gops"]
            nearest = f"{max(shares):.0%} of the {'memory' if shares[0] > shares[1] else 'arithmetic'}"
            print(f"{num_tokens:3} tokens, {name:13} {gbps:5.1f} GB/s {gops:5.0f} GOPS, {nearest}")
            result[f"{num_tokens} tokens, {name}"] = seconds
    print(json.dumps(result))


if __name__ == "__main__":
    main()
