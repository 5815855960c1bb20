"""One token's attention over a long context by the native kernels, beside reading its K and V once at the
rate that the memory gives in the same run.

    python tests/bench/attention.py [--context 4096] [--build avx2]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time

import torch
from ceilings import memory_read_gbps
from torch import Tensor

from penstock.kernels import AttentionSpec, BatchLayout, LayerKV
from penstock.kernels.cpu import NativeKernels
from penstock.memory.direct_io import aligned_buffer
from penstock.memory.hardware import num_physical_cores

#: Query heads, KV heads, dimensions.
SHAPES = {"TinyLlama": (32, 4, 64), "SOLAR": (32, 8, 128), "no groups": (32, 32, 64)}
BLOCK_SIZE, ROUNDS = 16, 8
#: Of K and V in turn, so that they come from memory.
TOTAL_BYTES = 256 << 20


def _cache(*shape: int) -> Tensor:
    """float16 numbers in such pages as an engine's cache has."""
    return aligned_buffer(2 * math.prod(shape)).view(torch.float16).view(shape).normal_()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--build", help="avx512, avx2 or generic; default: the best")
    options = parser.parse_args()
    gbps = memory_read_gbps()
    torch.set_num_threads(1)
    kernels = NativeKernels(build=options.build)
    kernels.set_num_threads(num_physical_cores())
    print(f"{kernels.build}, memory {gbps:.1f} GB/s, context {options.context}")
    result: dict[str, float | str] = {"bench": "attention", "build": kernels.build, "memory_read_gbps": gbps}
    num_blocks = -(-options.context // BLOCK_SIZE)
    layout = BatchLayout(
        positions=torch.tensor([options.context - 1]),
        slot_mapping=torch.tensor([0]),
        block_tables=torch.randperm(num_blocks).to(torch.int32)[None],
        query_start=torch.tensor([0, 1], dtype=torch.int32),
        context_lens=torch.tensor([options.context], dtype=torch.int32),
    )
    for name, (num_heads, num_kv_heads, head_dim) in SHAPES.items():
        num_bytes = 2 * 2 * num_kv_heads * head_dim * options.context
        layers = [
            LayerKV(
                _cache(num_blocks, num_kv_heads, head_dim, BLOCK_SIZE),
                _cache(num_blocks, num_kv_heads, BLOCK_SIZE, head_dim),
            )
            for _ in range(max(2, TOTAL_BYTES // num_bytes))
        ]
        q, spec = torch.randn(1, num_heads, head_dim), AttentionSpec(num_heads, 1 / math.sqrt(head_dim))
        times = []
        for _ in range(ROUNDS):
            for kv in layers:
                started = time.perf_counter()
                kernels.paged_attention(q, kv, layout, spec)
                times.append(time.perf_counter() - started)
        seconds = statistics.median(times)
        floor = num_bytes / gbps / 1e9
        share = result[name] = seconds / floor
        print(f"{name:10} {seconds * 1e6:6.0f} us, K and V once {floor * 1e6:6.0f} us: {share:.2f} times")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
