"""A 1.1-billion-parameter Llama (TinyLlama's shape, random INT8 weights, all in RAM): decode tokens/s at
1, 8 and 32 sequences and prompt tokens/s at 512, beside this machine's ceilings and transformers' eager
bfloat16, all in one run. Prints a card, and one JSON line last.

    make bench            (or: python tests/bench/decode.py [--activations int8] [--no-transformers])
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from ceilings import int8_gops, memory_read_gbps
from synthetic import TINYLLAMA, step_weight_bytes, synthetic_engine

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.generation.sequence import SamplingParams
from penstock.memory.hardware import num_physical_cores

BATCHES = (1, 8, 32)
CONTEXT = 64  # tokens before the decode steps that are timed
PROMPT = 512
ROUNDS = 3


def prompt_tokens(num_tokens: int, seed: int) -> list[int]:
    return torch.randint(
        3, TINYLLAMA["vocab_size"], (num_tokens,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


def decode_step_s(engine: Engine, num_seqs: int, num_steps: int) -> float:
    """Median seconds of a step in which each of `num_seqs` sequences gains a token."""
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    for index in range(num_seqs):
        engine.add(str(index), prompt_tokens(CONTEXT, index), params)
    while any(seq.num_pending_tokens > 1 for seq in engine.scheduler):
        engine.step()
    times = []
    for _ in range(num_steps):
        started = time.perf_counter()
        outputs = engine.step()
        times.append(time.perf_counter() - started)
        assert len(outputs) == num_seqs
    for index in range(num_seqs):
        engine.abort(str(index))
    return statistics.median(times)


def prompt_s(engine: Engine) -> float:
    """Seconds of the one step that computes a prompt of 512."""
    engine.add("prompt", prompt_tokens(PROMPT, 0), SamplingParams(temperature=0, max_tokens=1))
    started = time.perf_counter()
    outputs = engine.step()
    assert len(outputs) == 1
    return time.perf_counter() - started


class Eager:
    """transformers' own model of the same shape in bfloat16."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(**{k: v for k, v in TINYLLAMA.items() if k != "architectures"})
        config._attn_implementation = "eager"
        torch.set_default_dtype(torch.bfloat16)
        self.model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)

    @torch.inference_mode()
    def decode_step_s(self, num_seqs: int, num_steps: int) -> float:
        ids = torch.tensor([prompt_tokens(CONTEXT, index) for index in range(num_seqs)])
        result = self.model(ids, use_cache=True, logits_to_keep=1)
        times = []
        for _ in range(num_steps):
            started = time.perf_counter()
            token = result.logits[:, -1:].argmax(-1)
            result = self.model(token, past_key_values=result.past_key_values, use_cache=True)
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    @torch.inference_mode()
    def prompt_s(self) -> float:
        ids = torch.tensor([prompt_tokens(PROMPT, 0)])
        started = time.perf_counter()
        self.model(ids, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - started


def measure(engine: Engine, eager: Eager | None) -> dict[str, Any]:
    """Rounds of everything in turn, so that a drift of the machine meets all alike; medians."""
    samples: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        samples.setdefault(name, []).append(value)

    # The engine's kernels have their own threads, and torch has one; others get all of torch's.
    own_threads, num_threads = torch.get_num_threads(), num_physical_cores()
    for _ in range(ROUNDS):
        torch.set_num_threads(num_threads)
        note("memory_read_gbps", memory_read_gbps())
        note("int8_gops", int8_gops(num_threads))
        if eager is not None:
            for num_seqs in BATCHES:
                note(f"eager_decode_{num_seqs}_s", eager.decode_step_s(num_seqs, 4))
            note("eager_prompt_s", eager.prompt_s())
        torch.set_num_threads(own_threads)
        for num_seqs in BATCHES:
            note(f"decode_{num_seqs}_s", decode_step_s(engine, num_seqs, 12 if num_seqs < 32 else 6))
        note("prompt_s", prompt_s(engine))
    return {name: statistics.median(values) for name, values in samples.items()}


def report(engine: Engine, activations: str, m: dict[str, Any]) -> None:
    """The card, then the JSON line."""
    weight_bytes = step_weight_bytes(engine)
    rows = 2 if activations == "int16" else 1
    print(f"1.1B Llama shape, INT8 weights, {activations} activations, kernels {engine_kernels(engine)},")
    print(f"{num_physical_cores()} threads; weights read per step: {weight_bytes / 1e9:.2f} GB")
    print(f"ceilings: memory read {m['memory_read_gbps']:.1f} GB/s, INT8 {m['int8_gops']:.0f} GOPS")
    for num_seqs in BATCHES:
        seconds = m[f"decode_{num_seqs}_s"]
        floor = max(
            weight_bytes / m["memory_read_gbps"] / 1e9,
            2 * rows * num_seqs * weight_bytes / m["int8_gops"] / 1e9,
        )
        m[f"decode_{num_seqs}_floor_share"] = floor / seconds
        line = (
            f"decode, {num_seqs:2} sequences: {num_seqs / seconds:7.1f} tokens/s, {seconds * 1e3:6.1f} ms a "
            f"step, {floor / seconds:4.0%} of the floor ({weight_bytes / seconds / 1e9:.1f} GB/s)"
        )
        eager = m.get(f"eager_decode_{num_seqs}_s")
        print(line + (f"; transformers bf16 {num_seqs / eager:.1f} tokens/s" if eager else ""))
    seconds = m["prompt_s"]
    matrix_bytes = sum(layout.num_bytes for layout in engine.streamer.store.layouts)
    floor = 2 * rows * PROMPT * matrix_bytes / m["int8_gops"] / 1e9
    m["prompt_floor_share"] = floor / seconds
    line = f"prompt of {PROMPT}: {PROMPT / seconds:.0f} tokens/s, {floor / seconds:.0%} of the INT8 ceiling"
    eager = m.get("eager_prompt_s")
    print(line + (f"; transformers bf16 {PROMPT / eager:.0f} tokens/s" if eager else ""))
    print(json.dumps({"bench": "decode-1.1b", "activations": activations, **m}))


def engine_kernels(engine: Engine) -> str:
    kernels = engine.executor._family.kernels
    return f"{kernels.name} {getattr(kernels, 'build', '')}".strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--activations", choices=("int16", "int8"), default="int16")
    parser.add_argument("--kernels", choices=("auto", "native", "torch"), default="auto")
    parser.add_argument("--no-transformers", action="store_true")
    options = parser.parse_args()
    config = EngineConfig(activations=options.activations, kernels=options.kernels)
    engine = synthetic_engine(TINYLLAMA, config, num_kv_tokens=8192)
    eager = None if options.no_transformers else Eager()
    report(engine, options.activations, measure(engine, eager))


if __name__ == "__main__":
    main()
