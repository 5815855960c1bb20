"""What keys and values on disk give, and what writing them costs.

    .venv/bin/python tests/bench/kv_disk.py restart FOLDER --kv-disk KV
    .venv/bin/python tests/bench/kv_disk.py writing FOLDER --kv-disk KV --host-memory 700MiB
    .venv/bin/python tests/bench/kv_disk.py chat FOLDER --kv-disk KV --tokens 40
    .venv/bin/python tests/bench/kv_disk.py preempt FOLDER --kv-disk KV --tokens 1000

`restart`: the time to the first token of a prompt that is computed, and, in a new engine and with the page
cache dropped, of the same prompt read from disk. The tokens and log-probabilities of both must be equal.
`writing`: steps of new prompts, of which every second one's blocks are written meanwhile.
`chat`: ten turns of a chat, each of which brings `--tokens` new tokens, and gets an answer of 32; the engine
is loaded anew before each turn, with the page cache dropped. Tells how many tokens each turn computes.
`preempt`: a sequence of `--tokens` tokens loses its place to another one of the same length, which has one
token to write. The time from the end of the other one to the next token of the first, and what the other one
waited for, with blocks moved and with tokens computed again, in turns.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import time
from pathlib import Path

from penstock.cache.disk.kv_store import KVStore
from penstock.config import EngineConfig
from penstock.engine import Completion, Engine
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.kv_disk.tiers_observer import TiersObserver
from penstock.text.tokenizer import NoText
from penstock_server.settings.values import parse_bytes

#: Turns of a chat, and tokens of an answer.
NUM_TURNS, NUM_ANSWERED = 10, 32


def prompt(num_tokens: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(10, 30000) for _ in range(num_tokens)]


def load(options: argparse.Namespace) -> tuple[Engine, KVStore]:
    config = EngineConfig(
        num_kv_tokens=options.kv_tokens,
        max_num_seqs=4,
        kv_disk=str(options.kv_disk),
        host_memory_bytes=options.host_memory,
    )
    engine = Engine.load(options.model, config, tokenizer=NoText())
    (store,) = (store for each in engine.observers if isinstance(each, TiersObserver) for store in each.tiers)
    return engine, store


def drop_page_cache(*folders: Path) -> None:
    """Of the files in these folders."""
    for file in (file for folder in folders for file in folder.rglob("*") if file.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def first_token(engine: Engine, token_ids: list[int]) -> tuple[float, Completion]:
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=5)
    began_s = time.perf_counter()
    (answer,) = engine.generate([token_ids], params)
    return time.perf_counter() - began_s, answer


def restart(options: argparse.Namespace) -> None:
    asked = prompt(options.tokens, seed=time.time_ns())
    computed_s, expected = compute(options, asked)
    drop_page_cache(Path(options.model), options.kv_disk)
    began_s = time.perf_counter()
    engine, store = load(options)
    with engine:
        store.wait_until_open()
        print(f"the next engine was there after {time.perf_counter() - began_s:.1f} s")
        read_s, answer = first_token(engine, asked)
        reads = engine.scheduler.block_manager.disk.reads["disk"]
    assert (answer.token_ids, answer.logprobs) == (expected.token_ids, expected.logprobs)
    states = f" ({reads.num_states} recurrent states)" if reads.num_states else ""
    megabytes = store.stats.read_bytes / 1e6
    print(
        f"from disk: {read_s:.2f} s, {computed_s / read_s:.0f} times sooner, the same token and "
        f"log-probabilities; {reads.num_blocks} blocks{states}, {megabytes:.0f} MB in {reads.read_s:.2f} s"
    )


def compute(options: argparse.Namespace, asked: list[int]) -> tuple[float, Completion]:
    """The first engine. Its memory is free when this returns."""
    engine, store = load(options)
    with engine:
        computed_s, expected = first_token(engine, asked)
        again_s, _ = first_token(engine, asked)
        store.wait_until_open()
    num_resident, num_streamed = engine.metrics.num_resident_layers, engine.metrics.num_streamed_layers
    print(f"{num_resident} layers in memory, {num_streamed} streamed; {store.stats.num_blocks} blocks kept")
    print(f"computed: {computed_s:.2f} s; found in memory: {again_s:.2f} s")
    return computed_s, expected


def writing(options: argparse.Namespace) -> None:
    engine, store = load(options)
    times: dict[bool, list[float]] = {True: [], False: []}
    with engine:
        store.wait_until_open()
        for number in range(2 * options.rounds):
            is_writing = number % 2 == 0
            store.flush()
            store._pause_until_s = 0.0 if is_writing else math.inf
            # The second prompt's step is timed: the blocks of the first one are written beside it.
            first_token(engine, prompt(options.tokens, 2 * number))
            times[is_writing].append(first_token(engine, prompt(options.tokens, 2 * number + 1))[0])
    pairs = [on / off for on, off in zip(times[True], times[False], strict=True)]
    with_s, without_s = statistics.median(times[True]), statistics.median(times[False])
    print(
        f"{options.tokens} tokens: {with_s:.3f} s while blocks are written, {without_s:.3f} s otherwise, "
        f"{with_s / without_s - 1:+.1%} (median of pairs: {statistics.median(pairs) - 1:+.1%}); "
        f"{store.stats.written_blocks} blocks were written"
    )


def chat(options: argparse.Namespace) -> None:
    text, params = list[int](), SamplingParams(temperature=0, max_tokens=NUM_ANSWERED, ignore_eos=True)
    seed = time.time_ns()
    for turn in range(NUM_TURNS):
        num_before = len(text)
        text += prompt(options.tokens, seed + turn)
        drop_page_cache(Path(options.model), options.kv_disk)
        engine, store = load(options)
        with engine:
            store.wait_until_open()
            began_s = time.perf_counter()
            (answer,) = engine.generate([text], params)
            took_s = time.perf_counter() - began_s
            num_computed = engine.metrics.step_tokens - engine.metrics.draft_tokens
            reads = engine.scheduler.block_manager.disk.reads["disk"]
        num_new = len(text) - num_before + NUM_ANSWERED - 1  # nobody needs the last token's keys and values
        print(
            f"turn {turn + 1}: {len(text)} tokens; {num_new} new with the answer, {num_computed} computed; "
            f"{reads.num_tokens} from disk in {reads.read_s:.2f} s; {took_s:.2f} s in all"
        )
        assert num_computed - num_new <= 2 * engine.config.block_size
        text += answer.token_ids


def preempt(options: argparse.Namespace) -> None:
    options.kv_tokens = options.tokens * 3 // 2
    engine, store = load(options)
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    rate_s = 0.0
    with engine:
        store.wait_until_open()
        engine.meter.prompt_s = lambda num_tokens, _: num_tokens * rate_s  # type: ignore[method-assign]
        began_s = time.perf_counter()
        first_token(engine, prompt(options.tokens, time.time_ns()))
        measured_s = (time.perf_counter() - began_s) / options.tokens
        for number in range(2 * options.rounds):
            is_moved = number % 2 == 0
            rate_s = measured_s if is_moved else 1e-12
            found[is_moved].append(preempted(engine, options.tokens, time.time_ns()))
            store.flush()
        counts = engine.scheduler.block_manager.departures.counts
        assert counts.num_moved == counts.num_recomputed == options.rounds, counts
    for is_moved, times in found.items():
        other_s, back_s = (statistics.median(each) for each in zip(*times, strict=True))
        print(
            f"{'moved' if is_moved else 'computed again'}: the next token {back_s:.3f} s after the other "
            f"sequence, whose first token took {other_s:.3f} s (medians of {len(times)})"
        )


def preempted(engine: Engine, num_tokens: int, seed: int) -> tuple[float, float]:
    """Seconds to the first token of a sequence that takes the place of another, and from there to the next
    token of the other one."""
    few = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine.add(GenerationRequest(prompt(num_tokens - 8, seed), few, "low", priority=1))
    num_found = 0
    while num_found < 3:
        num_found += sum(len(output.token_ids) for output in engine.step())
    last_s, found_s = time.perf_counter(), list[float]()
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    engine.add(GenerationRequest(prompt(num_tokens - 8, seed + 1), one, "high"))
    while engine.has_work:
        if engine.step() and len(found_s) < 2:
            found_s.append(time.perf_counter() - last_s)
            last_s = time.perf_counter()
    return found_s[0], found_s[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=("restart", "writing", "chat", "preempt"))
    parser.add_argument("model", help="a converted folder")
    parser.add_argument("--kv-disk", type=Path, required=True)
    parser.add_argument("--host-memory", type=parse_bytes)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--kv-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    {"restart": restart, "writing": writing, "chat": chat, "preempt": preempt}[options.what](options)


if __name__ == "__main__":
    main()
