"""Steps with parts of layers in one call of the C kernels, and operation by operation, in turn: medians.

    tests/bench/sublayers.py [--shape tinyllama-1.1b] [--layers N] [--weights int4] [--steps 300]

Random weights, all in memory. The bits are the same (tests/engine/test_sublayers.py)."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from itertools import chain, cycle, islice, repeat
from typing import Any

from synthetic import synthetic_engine

from penstock.config import EngineConfig
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.model.known_shapes import find_shape

#: Tokens of the prompt, and steps of one kind that follow each other.
PROMPT, AT_ONCE = 100, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="tinyllama-1.1b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--weights", default="int8", choices=("int8", "int4"))
    parser.add_argument("--steps", type=int, default=300, help="of each kind")
    asked = parser.parse_args()
    shape: dict[str, Any] = dict(find_shape(asked.shape))
    if asked.layers:
        shape["num_hidden_layers"] = asked.layers
    config = EngineConfig(weights=asked.weights, group_size=64 if asked.weights == "int4" else None)
    with synthetic_engine(shape, config, num_kv_tokens=2 * asked.steps + 2 * PROMPT) as engine:
        prompt = random.Random(0).choices(range(shape["vocab_size"]), k=PROMPT)
        engine.add(
            GenerationRequest(prompt, SamplingParams(temperature=0, ignore_eos=True, speculation=False), "0")
        )
        for _ in range(PROMPT // 5):
            engine.step()
        kernels: Any = engine.executor.family.kernels
        together, seconds = kernels.sublayers, dict[bool, list[float]]({False: [], True: []})
        for is_together in islice(
            cycle(chain(repeat(False, AT_ONCE), repeat(True, AT_ONCE))), 2 * asked.steps
        ):
            kernels.sublayers = together if is_together else None
            started = time.perf_counter()
            engine.step()
            seconds[is_together].append(time.perf_counter() - started)
    apart, one = (statistics.median(seconds[kind]) * 1e3 for kind in (False, True))
    print(f"operation by operation {apart:.2f} ms, in one call {one:.2f} ms a step ({one / apart:.3f} times)")


if __name__ == "__main__":
    main()
