"""Engines that keep keys and values on disk, and are killed at random moments under load. Each goes on with
what the ones before it left, and compares all its answers with those of an engine that keeps nothing. The
test kills a few; the script as many as are asked for:

    PYTHONPATH=tests .venv/bin/python tests/engine/killed_engines.py --rounds 200
"""

from __future__ import annotations

import argparse
import mmap
import pickle
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from engine_features import disk_of
from tiny_models import VOCAB_SIZE, build

from penstock.cache.disk.kv_folder import summaries
from penstock.cache.disk.shelf import Shelf
from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.generation.logprobs import TokenLogprobs
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.memory.pages import PAGE
from penstock.text.tokenizer import NoText
from warm_python import WarmProcess

PLAIN = EngineConfig(max_model_len=160, max_num_batched_tokens=64, enable_prefix_caching=False, num_threads=1)
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
#: Room for fewer blocks than the prompts have, so that blocks give way all the time.
LIMIT_BYTES, NUM_KV_TOKENS = 60 * 2 * PAGE, 320


Answer = tuple[list[int], list[TokenLogprobs]]


def prompts() -> list[list[int]]:
    """Some begin alike."""
    dice = random.Random(5)
    heads = [[dice.randrange(3, VOCAB_SIZE) for _ in range(50)] for _ in range(4)]
    return [
        dice.choice(heads) + [dice.randrange(3, VOCAB_SIZE) for _ in range(dice.choice((20, 60)))]
        for _ in range(24)
    ]


def work(folder: str, seed: int) -> None:
    """Answer prompts, some at a time, until somebody kills this process. Prints each wrong answer."""
    dice, asked = random.Random(seed), prompts()
    expected = pickle.loads((Path(folder) / "expected").read_bytes())
    settings = replace(
        PLAIN,
        enable_prefix_caching=True,
        kv_disk=f"{folder}/kv",
        kv_disk_bytes=LIMIT_BYTES,
        num_kv_tokens=NUM_KV_TOKENS,
    )
    print("begun", flush=True)
    with Engine.load(f"{folder}/model", settings, tokenizer=NoText()) as engine:
        stats = disk_of(engine).stats
        while True:
            chosen = dice.choices(range(len(asked)), k=dice.choice((1, 2, 5)))
            got: list[Answer] = [([], []) for _ in chosen]
            for place, index in enumerate(chosen):
                engine.add(GenerationRequest(asked[index], PARAMS, str(place)))
            while engine.has_work:
                for output in engine.step():
                    got[int(output.request_id)][0].extend(output.token_ids)
                    got[int(output.request_id)][1].extend(output.logprobs)
            for place, index in enumerate(chosen):
                if got[place] != expected[index]:
                    print(f"wrong {index}: {got[place]}", flush=True)
            print(stats.reads.num_blocks, stats.written_blocks, stats.corrupt_blocks, flush=True)


def kill_some(rounds: int, folder: Path, seed: int = 0, model: str = "Llama") -> Iterator[tuple[int, int]]:
    """Kill so many engines. Yields what became of each one's blocks: (read, written). Raises AssertionError
    for a wrong answer, and for a block on disk that is not whole."""
    build(model, folder / "model")
    with Engine.load(folder / "model", PLAIN, tokenizer=NoText()) as engine:
        done = [engine.generate([prompt], PARAMS)[0] for prompt in prompts()]
    (folder / "expected").write_bytes(pickle.dumps([(each.token_ids, each.logprobs) for each in done]))
    dice = random.Random(seed)
    own = [str(folder) for folder in Path(__file__).parents[:2]]
    for number in range(rounds):
        program = (
            f"import sys; sys.path[:0] = {own!r}; import killed_engines; "
            f"killed_engines.work({str(folder)!r}, {seed + number})"
        )
        process = WarmProcess("-c", program)
        with process.stdout, process.stderr:
            assert process.stdout.readline() == "begun\n"
            time.sleep(dice.choice((0.1, 0.5, 1.0, 2.0)) * dice.random())
            process.kill()
            process.wait()
            yield _check(process.stdout.read(), folder / "kv")


def _check(told: str, folder: Path) -> tuple[int, int]:
    """What an engine has printed before it was killed, and what it has left."""
    assert "wrong" not in told, told
    lines = told.splitlines(keepends=True)
    whole = [line.split() for line in lines if line.endswith("\n")]
    num_read, num_written, num_damaged = map(int, whole[-1]) if whole else (0, 0, 0)
    assert num_damaged == 0
    for summary in summaries(folder):
        assert summary.num_bytes <= LIMIT_BYTES
        shelf = Shelf.reopen(summary.folder)
        assert shelf is not None and shelf.is_writer
        with shelf:
            buffer = memoryview(mmap.mmap(-1, shelf.extent_bytes))
            assert all(shelf.read(key, buffer) for key in shelf.all_keys())
    return num_read, num_written


def main() -> None:
    parser = argparse.ArgumentParser(description="kills engines that keep keys and values on disk")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="Llama", help="a name of tiny_models.py, such as LFM2")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        total = [0, 0]
        killed = kill_some(options.rounds, Path(folder), options.seed, options.model)
        for number, counts in enumerate(killed, start=1):
            total = [before + new for before, new in zip(total, counts, strict=True)]
            print(f"\r{number} killed: {total[0]} blocks read, {total[1]} written", end="", file=sys.stderr)
    print(f"\n{options.rounds} engines were killed: every answer was right, every block on disk was whole")


if __name__ == "__main__":
    main()
