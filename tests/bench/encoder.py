"""An encoder's sweep over one prompt, apart from the first step of the decoder, which `penstock bench` times
together with it. The floor is the arithmetic of the encoder and of the cross-attention projections, at the
rate of one product of 512 tokens that is timed right before and after each sweep: the rate of a shared
machine changes from minute to minute.

    python tests/bench/encoder.py FOLDER [--host-memory-gib 6] [--rounds 5]

FOLDER is a converted encoder-decoder; penstock bench --shape cpm-2 makes one with random weights.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.kernels import QuantizedTensor
from penstock.measure import measure_hardware
from penstock.text.tokenizer import NoText
from penstock.weights.layer_weights import LayerWeights
from penstock_server.commands.planning.footprints import footprint_at

TOKENS = 512
#: The inputs and outputs of the product, and how often it is timed.
PRODUCT, TIMES = (20480, 4096), 6


def gops(engine: Engine, weights: list[QuantizedTensor], x: torch.Tensor) -> float:
    """1e9 INT8 operations per second of one product. A token's activations are two rows of INT8."""
    seconds = []
    for number in range(TIMES):
        started = time.perf_counter()
        engine.model.executor.family.kernels.linear(x, weights[number % len(weights)])
        seconds.append(time.perf_counter() - started)
    return 4 * TOKENS * PRODUCT[0] * PRODUCT[1] / statistics.median(seconds) / 1e9


class Stopwatch:
    """Notes when the first layer of the decoder is asked for."""

    def __init__(self, engine: Engine) -> None:
        self.seconds = 0.0
        self._layers = engine.model.executor._streamer.layers
        self._stacks = engine.model.executor.family.encoder_stack_names
        engine.model.executor._streamer.layers = self.layers  # type: ignore[method-assign]

    def begin_step(self, num_tokens: int) -> None: ...

    def layers(self, stack: str) -> Iterator[LayerWeights]:  # type: ignore[override]
        if stack not in self._stacks:
            self.seconds = time.perf_counter()
        return self._layers(stack)


def sweep(engine: Engine, watch: Stopwatch, seed: int) -> tuple[float, float]:
    """Seconds of the encoder, and of the decoder's first step."""
    prompt = random.Random(seed).choices(range(engine.spec.vocab_size), k=TOKENS)
    engine.add(GenerationRequest(prompt, SamplingParams(temperature=0, ignore_eos=True), "prompt"))
    started = time.perf_counter()
    engine.step()
    ended = time.perf_counter()
    engine.abort("prompt")
    return watch.seconds - started, ended - watch.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host-memory-gib", type=float, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    budget = int(options.host_memory_gib * 2**30)
    config = EngineConfig(
        device="cpu",
        host_memory_bytes=budget,
        num_kv_tokens=2048,
        max_num_seqs=8,
        enable_prefix_caching=False,
    )
    hardware = measure_hardware(options.folder, config)
    with Engine.load(options.folder, config, tokenizer=NoText(), hardware=hardware) as engine:
        operations = 4 * TOKENS * footprint_at(options.folder, config).encoder_elements
        weights = [
            QuantizedTensor(torch.randint(-127, 128, PRODUCT, dtype=torch.int8), torch.rand(PRODUCT[0]))
            for _ in range(2)
        ]
        x, watch = torch.randn(TOKENS, PRODUCT[1]), Stopwatch(engine)
        sweep(engine, watch, 0)
        shares = []
        for seed in range(1, options.rounds + 1):
            before = gops(engine, weights, x)
            encoder_s, decoder_s = sweep(engine, watch, seed)
            rate = (before + gops(engine, weights, x)) / 2
            shares.append(operations / rate / 1e9 / encoder_s)
            print(
                f"encoder {encoder_s:6.2f} s, {shares[-1]:.0%} of the floor at {rate:.0f} GOPS; "
                f"the decoder's first step {decoder_s:.2f} s",
                flush=True,
            )
        print(f"median {statistics.median(shares):.0%} of the floor")


if __name__ == "__main__":
    main()
