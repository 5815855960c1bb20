"""What two ways to compute one shape (random INT8 weights, all in RAM) take for a decode step, in turn in one
run: Penstock's own family against transformers' modules, or a dense model against a mixture of which one
layer alone has experts, whose token reads as many bytes. Prints medians and their ratio.

    python tests/bench/twins.py transformers [--sequences 1 8]
    python tests/bench/twins.py experts [--sequences 1 8]
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from decode import decode_step_s
from synthetic import synthetic_engine

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.model.known_shapes import find_shape
from penstock.model.through_transformers.family import ThroughTransformers

SHAPE = "tinyllama-1.1b"
ROUNDS, STEPS = 9, 8


def twins(way: str) -> tuple[Engine, Engine]:
    """The plain engine, and the one that is compared with it."""
    shape = find_shape(SHAPE)
    config = EngineConfig(max_num_batched_tokens=512)
    if way == "transformers":
        return engine(shape, config), engine(shape, config, ThroughTransformers)
    layers = shape["num_hidden_layers"]
    dense = shape | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    mixture: dict[str, Any] = dense | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 2,
        "num_experts_per_tok": 1, "moe_intermediate_size": shape["intermediate_size"],
        "mlp_only_layers": list(range(1, layers)), "norm_topk_prob": True,
    }  # fmt: skip
    return engine(dense, config), engine(mixture, config)


def engine(shape: dict[str, Any], config: EngineConfig, family: Any = None) -> Engine:
    return synthetic_engine(shape, config, num_kv_tokens=4096, family=family)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("way", choices=("transformers", "experts"))
    parser.add_argument("--sequences", nargs="*", type=int, default=[1, 8])
    options = parser.parse_args()
    pair = twins(options.way)
    for number in options.sequences:
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(ROUNDS):
            for one, found in zip(pair, times, strict=True):
                found.append(decode_step_s(one, number, STEPS))
        ratios = [second / first for first, second in zip(*times, strict=True)]
        plain, other = (1000 * statistics.median(found) for found in times)
        print(
            f"{number} sequences: {plain:.2f} and {other:.2f} ms a step, median of the rounds' ratios "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )


if __name__ == "__main__":
    main()
