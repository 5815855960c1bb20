"""Experts of a layer in one call, beside the same experts one by one, in turn in one run: the shape of
Qwen3-30B-A3B's experts, each token with 8 of 128 experts that are drawn alike. The shares are those of the
time in which memory delivers each expert once.

    python tests/bench/experts.py [--weights int8] [--build avx512]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

import torch
from ceilings import memory_read_gbps

from penstock.kernels.cpu import NativeKernels
from penstock.kernels.cpu_builds import compiled_builds
from penstock.kernels.experts import ExpertKernels, ExpertRows, GatedExpert, PlainExperts
from penstock.memory.direct_io import aligned_buffer
from penstock.memory.hardware import num_physical_cores
from penstock.model.known_shapes import find_shape
from penstock.model.registry import find_family
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.store import quantized_tensors
from penstock.weights.tensors import UnitLayout

#: Experts in memory, more than the caches hold; tokens of a step; rounds of each.
NUM_EXPERTS, TOKENS, ROUNDS = 192, (1, 8, 32), 15
CHOSEN, OF = 8, 128


def random_experts(weights: str) -> tuple[list[GatedExpert], int]:
    """Experts side by side in memory, and the bytes of one."""
    shape = find_shape("qwen3-30b-a3b") | {"num_hidden_layers": 1}
    family = find_family(shape)
    tensors = quantized_tensors(family.model_tensors(family.read_spec(shape)), {}, weights, None)
    layout = UnitLayout.of(next(unit for unit in tensors.units if unit.key.expert == 0).tensors)
    first, generator = aligned_buffer(layout.num_bytes), torch.Generator().manual_seed(0)
    for slot in layout.slots:
        slot.tensor.format.fill_random(slot.arrays(first), generator)
    buffers = [aligned_buffer(layout.num_bytes).copy_(first) for _ in range(NUM_EXPERTS)]
    return [LayerWeights.views(layout, buffer).gated for buffer in buffers], layout.num_bytes


def step_s(kernels: ExpertKernels, experts: list[GatedExpert], num_tokens: int) -> tuple[float, int]:
    """Seconds of a layer's experts, and how many they were."""
    chosen = torch.cat([torch.randperm(OF)[:CHOSEN] for _ in range(num_tokens)])
    order, first = chosen.argsort(stable=True), random.randrange(NUM_EXPERTS - OF)
    rows: list[ExpertRows] = []
    for number, count in zip(*(each.tolist() for each in chosen.unique(return_counts=True)), strict=True):
        start = rows[-1][2] if rows else 0
        rows.append((experts[first + number], start, start + count))
    x, y = torch.randn(num_tokens, 2048), torch.empty(len(chosen), 2048)
    started = time.perf_counter()
    kernels.compute(x, order // CHOSEN, rows, "silu", y)
    return time.perf_counter() - started, len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--weights", choices=("int8", "int4"), default="int4")
    parser.add_argument("--build", choices=compiled_builds())
    options = parser.parse_args()
    kernels = NativeKernels(build=options.build)
    kernels.set_num_threads(num_physical_cores())
    experts, num_bytes = random_experts(options.weights)
    ways = {"together": kernels.experts, "one by one": PlainExperts(kernels)}
    gbps, found = [memory_read_gbps()], {}
    for num_tokens in TOKENS:
        samples: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, way in ways.items():
                samples[name].append(step_s(way, experts, num_tokens))
        number = statistics.mean(count for _, count in samples["together"])
        found[num_tokens] = {name: statistics.median(s for s, _ in each) for name, each in samples.items()}
        found[num_tokens]["experts"] = number
    gbps.append(memory_read_gbps())
    print(f"{options.weights}, kernels {kernels.build}, memory {gbps[0]:.1f} and {gbps[1]:.1f} GB/s")
    for num_tokens, each in found.items():
        floor_s = each["experts"] * num_bytes / statistics.mean(gbps) / 1e9
        texts = [f"{name} {each[name] * 1e3:.2f} ms ({floor_s / each[name]:.0%})" for name in ways]
        print(f"{num_tokens:2} tokens, {each['experts']:.0f} experts: {', '.join(texts)}")
    print(json.dumps({"bench": "experts", "weights": options.weights, "memory_gbps": gbps, "steps": found}))


if __name__ == "__main__":
    main()
