"""Steps with parts of layers in one call of the C kernels, and operation by operation, in turn: medians.

    tests/bench/sublayers.py [--shape tinyllama-1.1b] [--layers N] [--weights int4] [--steps 300]
                             [--sequences 1 8 16 32] [--threads 1]

Random weights, all in memory. The bits are the same (tests/engine/test_sublayers.py). Beyond
MOST_TOKENS sequences (kernels/sublayers/native.py) the one call is tried as well."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from itertools import chain, cycle, islice, repeat
from typing import Any

from synthetic import synthetic_engine

import penstock.kernels.sublayers.native as native
from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.model.known_shapes import find_shape

#: Tokens of all prompts together, and steps of one kind that follow each other.
PROMPT, AT_ONCE = 100, 3


def compare(engine: Engine, num_seqs: int, num_steps: int, vocab_size: int) -> tuple[float, float]:
    """Seconds of a step operation by operation, and in one call."""
    dice = random.Random(0)
    for index in range(num_seqs):
        prompt = dice.choices(range(vocab_size), k=max(1, PROMPT // num_seqs))
        params = SamplingParams(temperature=0, ignore_eos=True, speculation=False)
        engine.add(GenerationRequest(prompt, params, str(index)))
    while any(each.num_pending_tokens > 1 for each in engine.scheduler):
        engine.step()
    kernels: Any = engine.model.executor.family.kernels
    together, seconds = kernels.sublayers, dict[bool, list[float]]({False: [], True: []})
    for is_together in islice(cycle(chain(repeat(False, AT_ONCE), repeat(True, AT_ONCE))), 2 * num_steps):
        kernels.sublayers = together if is_together else None
        started = time.perf_counter()
        engine.step()
        seconds[is_together].append(time.perf_counter() - started)
    kernels.sublayers = together
    for index in range(num_seqs):
        engine.abort(str(index))
    return statistics.median(seconds[False]), statistics.median(seconds[True])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", default="tinyllama-1.1b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--weights", default="int8", choices=("int8", "int4"))
    parser.add_argument("--steps", type=int, default=300, help="of each kind")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1])
    parser.add_argument("--threads", type=int)
    asked = parser.parse_args()
    shape: dict[str, Any] = dict(find_shape(asked.shape))
    if asked.layers:
        shape["num_hidden_layers"] = asked.layers
    config = EngineConfig(
        weights=asked.weights,
        group_size=64 if asked.weights == "int4" else None,
        num_threads=asked.threads,
        max_num_seqs=max(asked.sequences),
    )
    native.MOST_TOKENS = max(native.MOST_TOKENS, *asked.sequences)
    num_kv_tokens = max(asked.sequences) * (2 * asked.steps + 2 * PROMPT)
    with synthetic_engine(shape, config, num_kv_tokens=num_kv_tokens) as engine:
        for num_seqs in asked.sequences:
            apart_s, one_s = compare(engine, num_seqs, asked.steps, shape["vocab_size"])
            print(
                f"{num_seqs} sequence{'s' * (num_seqs > 1)}: operation by operation {1e3 * apart_s:.2f} ms, "
                f"in one call {1e3 * one_s:.2f} ms a step ({one_s / apart_s:.3f} times)",
                flush=True,
            )


if __name__ == "__main__":
    main()
