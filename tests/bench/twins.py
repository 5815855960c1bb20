"""What two ways to compute one shape (random weights, all in RAM) take for a decode step, in turn in one run:
Penstock's own family against transformers' modules, or a dense model against one whose token reads as many
bytes: a mixture of which one layer alone has experts (INT8 both), or a hybrid (4 bits; also a prompt of 512;
`--shape` and `--layers` say which). Prints medians of seconds and of the processor's seconds, and ratios.

    python tests/bench/twins.py transformers [--sequences 1 8]
    python tests/bench/twins.py experts [--sequences 1 8]
    python tests/bench/twins.py hybrids [--shape qwen3.5-4b] [--layers 8]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from decode import Clock, decode_step_s, prompt_s
from synthetic import step_weight_bytes, synthetic_engine

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


def hybrids(name: str, num_layers: int) -> tuple[Engine, Engine]:
    """A dense model and the first layers of a hybrid without experts, with a small vocabulary."""
    config = EngineConfig(max_num_batched_tokens=512, weights="int4", max_model_len=4096)
    shape = find_shape(name) | {"vocab_size": 32000, "num_hidden_layers": num_layers}
    for kinds in ("layer_types", "layers_block_type"):
        if shape.get(kinds):
            shape[kinds] = shape[kinds][:num_layers]
    hybrid, heads = engine(shape, config), shape["num_attention_heads"]
    shared = ("hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size", "tie_word_embeddings")
    dense = {key: shape[key] for key in shared if key in shape} | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_attention_heads": heads,
        "head_dim": shape.get("head_dim") or shape["hidden_size"] // heads, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096, "rope_theta": 1e6, "intermediate_size": shape["intermediate_size"],
    }  # fmt: skip
    # As many bytes: an mlp's inner width changes them by so much.
    lack = step_weight_bytes(hybrid) - step_weight_bytes(engine(dense, config))
    inner = dense["intermediate_size"] + lack / (3 * shape["hidden_size"] * num_layers * (0.5 + 1 / 64))
    return engine(dense | {"intermediate_size": round(inner / 128) * 128}, config), hybrid


def engine(shape: dict[str, Any], config: EngineConfig, family: Any = None) -> Engine:
    return synthetic_engine(shape, config, num_kv_tokens=4096, family=family)


#: What is timed, and by which clock.
CLOCKS = {"ms": time.perf_counter, "ms of the processor": time.process_time}


def compare(what: str, pair: Sequence[Engine], seconds: Callable[[Engine, Clock], float]) -> None:
    """Of one measurement, in turn."""
    for unit, clock in CLOCKS.items():
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(ROUNDS):
            for one, found in zip(pair, times, strict=True):
                found.append(1000 * seconds(one, clock))
        ratios = [second / first for first, second in zip(*times, strict=True)]
        print(
            f"{what}: {statistics.median(times[0]):.2f} and {statistics.median(times[1]):.2f} {unit}, median "
            f"of the rounds' ratios {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )


def _decode_s(number: int, one: Engine, clock: Clock) -> float:
    return decode_step_s(one, number, STEPS, clock)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("way", choices=("transformers", "experts", "hybrids"))
    parser.add_argument("--shape", default="qwen3.5-4b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequences", nargs="*", type=int, default=[1, 8])
    options = parser.parse_args()
    is_hybrid = options.way == "hybrids"
    pair = hybrids(options.shape, options.layers) if is_hybrid else twins(options.way)
    for number in options.sequences:
        compare(f"a step of {number}", pair, partial(_decode_s, number))
    if is_hybrid:
        compare("a prompt", pair, prompt_s)


if __name__ == "__main__":
    main()
