"""Vectors a second: a random model of BERT-base's shape here and in transformers (float32), in turn.

.venv/bin/python tests/bench/embeddings.py
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.text.tokenizer import NoText

ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="of each text")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(0)
        transformers.BertModel(transformers.BertConfig()).save_pretrained(name)
        measure(Path(name), options.texts, options.tokens, options.threads)


def measure(folder: Path, num_texts: int, num_tokens: int, num_threads: int) -> None:
    model = transformers.BertModel.from_pretrained(folder).eval()
    engine = Engine.load(folder, EngineConfig(num_threads=num_threads), tokenizer=NoText())
    generator = random.Random(0)
    texts = [[generator.randrange(1000, 30000) for _ in range(num_tokens)] for _ in range(num_texts)]

    def theirs() -> None:
        torch.set_num_threads(num_threads)
        with torch.inference_mode():
            model(torch.tensor(texts)).last_hidden_state.mean(1)
        torch.set_num_threads(1)

    ways: dict[str, Callable[[], object]] = {
        "penstock": lambda: engine.pool(texts),
        "transformers, float32": theirs,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            times[name] += [time.perf_counter() - start] if number else []  # the first round warms up
    for name, seconds in times.items():
        print(f"{name:22} {num_texts / statistics.median(seconds):6.1f} texts/s")


if __name__ == "__main__":
    main()
