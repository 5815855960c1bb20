"""One token's attention over a long context by the native kernels, with K and V as float16 and as INT8 in
turn, beside reading its K and V once at the memory's rate in the same run, and beside its multiplications at
the rate of registers.

    python tests/bench/attention.py [--context 4096] [--build avx2]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from ceilings import float_gflops, memory_read_gbps
from torch import Tensor

from penstock.cache.kv_cache import kv_views
from penstock.kernels import AttentionSpec, BatchLayout, LayerKV
from penstock.kernels.cpu import NativeKernels
from penstock.memory.direct_io import aligned_buffer
from penstock.memory.hardware import num_physical_cores
from penstock.spec import FLOAT16, INT8, KVLayout

#: Query heads, KV heads, dimensions.
SHAPES = {"TinyLlama": (32, 4, 64), "SOLAR": (32, 8, 128), "no groups": (32, 32, 64)}
#: How blocks follow each other: as an engine hands them out to a prompt, and at worst.
ORDERS: dict[str, Callable[[int], Tensor]] = {"in order": torch.arange, "scattered": torch.randperm}
FORMS = {"float16": FLOAT16, "int8": INT8}
BLOCK_SIZE, ROUNDS = 16, 12
#: Of K and V in turn, so that they come from memory.
TOTAL_BYTES = 256 << 20


def _layer(form: KVLayout, num_blocks: int, num_kv_heads: int, head_dim: int) -> LayerKV:
    """Random numbers in such pages as an engine's cache has."""
    num_bytes = num_blocks * BLOCK_SIZE * form.bytes_per_token(num_kv_heads, head_dim)
    buffer = aligned_buffer(num_bytes)
    kv = LayerKV(form, kv_views(form, buffer, num_blocks, BLOCK_SIZE, num_kv_heads, head_dim))
    for part in kv.parts:
        part.random_(-127, 128) if form is INT8 else part.normal_()
    for scales in kv.int8_parts()[2:] if form is INT8 else ():
        scales.fill_(2**-7)
    return kv


def _layout(context: int, order: Callable[[int], Tensor]) -> BatchLayout:
    """One sequence's last token."""
    return BatchLayout(
        positions=torch.tensor([context - 1]),
        slot_mapping=torch.tensor([0]),
        block_tables=order(-(-context // BLOCK_SIZE)).to(torch.int32)[None],
        query_start=torch.tensor([0, 1], dtype=torch.int32),
        context_lens=torch.tensor([context], dtype=torch.int32),
    )


class Case:
    """One shape in one form: as many layers' K and V as are more than any cache of the processor holds."""

    def __init__(
        self, form: KVLayout, context: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        num_blocks = -(-context // BLOCK_SIZE)
        self.num_bytes = form.bytes_per_token(num_kv_heads, head_dim) * context
        self.num_operations = 2 * 2 * num_heads * head_dim * context
        self._spec = AttentionSpec(num_heads, 1 / math.sqrt(head_dim))
        self._q = torch.randn(1, num_heads, head_dim)
        self._layers = [
            _layer(form, num_blocks, num_kv_heads, head_dim)
            for _ in range(max(2, TOTAL_BYTES // self.num_bytes))
        ]

    def layer_s(self, kernels: NativeKernels, layout: BatchLayout) -> float:
        """Seconds that attention takes in each of the layers, the second time: by then nobody else's threads
        wait for work on our cores."""
        started = 0.0
        for _ in range(2):
            started = time.perf_counter()
            for kv in self._layers:
                kernels.paged_attention(self._q, kv, layout, self._spec)
        return (time.perf_counter() - started) / len(self._layers)


def _report(shapes: Sequence[str], result: dict[str, float]) -> None:
    for shape in shapes:
        for order in ORDERS:
            for form in FORMS:
                name = f"{shape}, {order}, {form}"
                us, reading, multiplying = (
                    result[f"{name}: {what}"] for what in ("us", "of_reading", "of_multiplying")
                )
                faster = result[f"{shape}, {order}, float16: us"] / us
                print(
                    f"{shape:9}, {order:9}, {form:7}: {us:5.0f} us, {reading:.2f} times reading K and V once"
                    + (f", {multiplying:.2f} times the multiplications" if multiplying else "")
                    + (f", {faster:.2f} times as fast as float16" if form != "float16" else "")
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--build", help="avx512, avx2 or generic; default: the best")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    kernels, num_threads = NativeKernels(build=options.build), num_physical_cores()
    cases = {
        (shape, form): Case(layout, options.context, *SHAPES[shape])
        for shape in options.shapes
        for form, layout in FORMS.items()
    }
    layouts = {name: _layout(options.context, order) for name, order in ORDERS.items()}
    samples: dict[str, list[float]] = {}

    def note(name: str, value: float) -> float:
        samples.setdefault(name, []).append(value)
        return value

    for _ in range(options.rounds):
        torch.set_num_threads(num_threads)
        gbps = note("memory_read_gbps", memory_read_gbps(repeats=3))
        gflops = note("float_gflops", float_gflops(num_threads, kernels.build, repeats=1))
        torch.set_num_threads(1)
        kernels.set_num_threads(num_threads)
        for shape in options.shapes:
            for order, layout in layouts.items():
                for form in FORMS:
                    case = cases[shape, form]
                    seconds = case.layer_s(kernels, layout)
                    note(f"{shape}, {order}, {form}: us", seconds * 1e6)
                    note(f"{shape}, {order}, {form}: of_reading", seconds * gbps * 1e9 / case.num_bytes)
                    note(
                        f"{shape}, {order}, {form}: of_multiplying",
                        seconds * gflops * 1e9 / case.num_operations,
                    )
    result = {name: statistics.median(values) for name, values in samples.items()}
    print(
        f"{kernels.build}, {num_threads} threads, context {options.context}: memory "
        f"{result['memory_read_gbps']:.1f} GB/s, float32 {result['float_gflops']:.0f} GFLOPS"
    )
    _report(options.shapes, result)
    print(json.dumps({"bench": "attention", "build": kernels.build, **result}))


if __name__ == "__main__":
    main()
