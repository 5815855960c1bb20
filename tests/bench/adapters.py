"""Decode steps with adapters (LoRA) on all linear modules, beside steps of the same sequences without, in
turn within one run: random weights of a known shape, all resident."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import torch
from ceilings import memory_read_gbps
from decode import CONTEXT, engine_kernels, prompt_tokens
from synthetic import synthetic_engine

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.kernels import LowRank, LowRankPart
from penstock.model.known_shapes import find_shape
from penstock.weights.adapters.adapter import Adapter
from penstock.weights.adapters.loaded_adapters import side_by_side
from penstock.weights.tensors import TensorSpec

METHOD = """
--sequences sequences have a context of 64 tokens; each step gives each of them one token. --adapters adapters
have --rank ranks for each linear module (q, k and v apart, gate and up apart), and as many sequences each. A
round is one step of each kind: none of the sequences has an adapter, each has one of the adapters, or all
have the first adapter. Medians of the rounds; "slower" is the median of the rounds' own ratios to the step
without, so that work of others that lasts longer than a round weighs on both. Memory's rate is read before
and after.

    python tests/bench/adapters.py [--weights int4] [--rank 64] [--adapters 32]
"""
ROUNDS = 25


def module_outputs(engine: Engine, tensor: TensorSpec) -> list[int]:
    """The outputs of each module of a matrix of Llama."""
    spec = engine.spec
    rows = {"qkv": [spec.num_heads * spec.head_dim, *[spec.num_kv_heads * spec.head_dim] * 2]}
    return rows.get(tensor.name, [tensor.shape[0] // len(tensor.parts)] * len(tensor.parts))


def random_adapter(engine: Engine, name: str, rank: int) -> Adapter:
    """Of every linear module of the layers."""
    layers: dict[tuple[str, int], dict[str, LowRank]] = {}
    for unit in engine.model.store.tensors.dense_units:
        shares = layers.setdefault((unit.key.stack, unit.key.layer), {})
        for tensor in (each for each in unit.tensors if each.is_matrix):
            parts, first = list[LowRankPart](), 0
            for number, count in enumerate(module_outputs(engine, tensor)):
                b = torch.randn(count, rank).mul_(0.01).half()
                parts.append(LowRankPart.of(b, number * rank, first))
                first += count
            a = torch.randn(len(parts) * rank, tensor.shape[1]).mul_(0.01).half()
            shares[tensor.name] = LowRank.of(a, torch.ones(len(a)), tuple(parts))
    return Adapter(name, "random", side_by_side(layers))


def step_s(engine: Engine, adapters: Sequence[Adapter | None]) -> float:
    """Seconds of a step in which sequence i has adapter i modulo their number."""
    for index, sequence in enumerate(engine.scheduler):
        object.__setattr__(sequence.request, "adapter", adapters[index % len(adapters)])
    started = time.perf_counter()
    engine.step()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=METHOD, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", default="tinyllama-1.1b")
    parser.add_argument("--weights", choices=("int8", "int4"), default="int8")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    config = EngineConfig(weights=options.weights, speculation="off", max_num_batched_tokens=2048)
    engine = synthetic_engine(find_shape(options.shape), config, num_kv_tokens=8192)
    adapters = [random_adapter(engine, str(index), options.rank) for index in range(options.adapters)]
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    for index in range(options.sequences):
        engine.add(GenerationRequest(prompt_tokens(CONTEXT, index), params, str(index)))
    while any(sequence.num_pending_tokens > 1 for sequence in engine.scheduler):
        engine.step()
    kinds: dict[str, Sequence[Adapter | None]] = {"none": [None], "each": adapters, "one": adapters[:1]}
    gbps = [memory_read_gbps()]
    for kind in kinds.values():
        step_s(engine, kind)
    rounds = [{name: step_s(engine, kind) for name, kind in kinds.items()} for _ in range(options.rounds)]
    gbps.append(memory_read_gbps())
    print(json.dumps({
        "kernels": engine_kernels(engine), "memory_gbps": [round(each, 1) for each in gbps],
        "adapter_mib": round(adapters[0].num_bytes / 2**20, 1),
        "step_ms": {name: round(1e3 * statistics.median(each[name] for each in rounds), 1) for name in kinds},
        "slower": {
            name: round(statistics.median(each[name] / each["none"] for each in rounds) - 1, 3)
            for name in kinds if name != "none"
        },
    }))  # fmt: skip


if __name__ == "__main__":
    main()
