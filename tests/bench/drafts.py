"""Drafts: tokens/s with guesses of the next tokens and without, of one folder, all in RAM or streamed, for
1, 8 and 32 sequences, in turn in one run. Three kinds of answers:

    edited     the answer repeats a text that the request predicts, but for one token in ten
    new        nothing repeats itself
    wrong      a drafter that is always wrong, and that is trusted at first

    python tests/bench/drafts.py FOLDER [--host-memory-gib 1] [--sequences 1 8 32] [--tokens 64]

The rates of the machine are measured first, or kept from before. Weights may be random (penstock bench
--shape makes such folders): the text of "edited" is made of the answers that come without guesses.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.generation.drafting.drafter import NO_DRAFTS, Drafter
from penstock.generation.drafting.repeated_text import Continuation
from penstock.generation.drafting.speculation import MAX_GUESSES, Speculation
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.sequence import Sequence
from penstock.measure import measure_hardware
from penstock.text.tokenizer import NoText

KINDS = ("edited", "new", "wrong")
PROMPT, ROUNDS = 32, 3


class Wrong(Speculation):
    """Guesses at random, as if a long quotation was found."""

    def _look(self, sequence: Sequence) -> object:  # type: ignore[override]
        track = super()._look(sequence)
        dice = random.Random(sequence.num_tokens)
        track.guess = Continuation(tuple(dice.randrange(3, 30000) for _ in range(MAX_GUESSES)), MAX_GUESSES)
        track.rate = track.acceptance.rate(track.guess.num_same)
        return track


def prompts(num_seqs: int) -> list[list[int]]:
    dice = random.Random(0)
    return [[dice.randrange(3, 30000) for _ in range(PROMPT)] for _ in range(num_seqs)]


def edited(answer: list[int]) -> tuple[int, ...]:
    """The answer with one token in ten changed."""
    dice = random.Random(1)
    return tuple(dice.randrange(3, 30000) if dice.random() < 0.1 else token for token in answer)


def run(
    engine: Engine, drafter: Drafter, asked: list[list[int]], params: list[SamplingParams]
) -> tuple[float, list[list[int]], int]:
    """Tokens per second of the steps after the prompts, the answers, and the number of these steps."""
    engine.scheduler._drafter = drafter
    for index, (prompt, each) in enumerate(zip(asked, params, strict=True)):
        engine.add(GenerationRequest(prompt, each, str(index)))
    answers: list[list[int]] = [[] for _ in asked]
    began, num_before, steps = 0.0, 0, 0
    while engine.has_work:
        outputs = engine.step()
        for output in outputs:
            answers[int(output.request_id)] += output.token_ids
        if not began and all(answers):
            began, num_before = time.perf_counter(), sum(map(len, answers))
        else:
            steps += bool(began)
    return (sum(map(len, answers)) - num_before) / (time.perf_counter() - began), answers, steps


def compare(engine: Engine, kind: str, num_seqs: int, num_tokens: int) -> str:
    """One line: tokens/s without and with guesses, their ratio, and tokens per sequence and step."""
    asked = prompts(num_seqs)
    plain = SamplingParams(temperature=1.0, seed=1, max_tokens=num_tokens, ignore_eos=True)
    params = [plain] * num_seqs
    _, answers, _ = run(engine, NO_DRAFTS, asked, params)
    if kind == "edited":
        params = [SamplingParams(**(vars(plain) | {"prediction": edited(each)})) for each in answers]
    maker = Wrong if kind == "wrong" else Speculation
    rates: dict[str, list[float]] = {"off": [], "on": []}
    per_step = 0.0
    for _ in range(ROUNDS):
        off, expected, _ = run(engine, NO_DRAFTS, asked, params)
        on, found, steps = run(engine, maker(engine.meter.known_s), asked, params)
        assert found == expected, "an answer depends on guesses"
        rates["off"].append(off)
        rates["on"].append(on)
        per_step = (num_tokens - 1) / steps
    off, on = (statistics.median(rates[name]) for name in ("off", "on"))
    return f"{kind:8} {num_seqs:3}   {off:8.2f} {on:8.2f}   {on / off:5.2f}   {per_step:5.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host-memory-gib", type=float, help="stream what does not fit")
    parser.add_argument("--sequences", nargs="*", type=int, default=(1, 8, 32))
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    memory = int(options.host_memory_gib * 2**30) if options.host_memory_gib else None
    config = EngineConfig(host_memory_bytes=memory, num_kv_tokens=8192, enable_prefix_caching=False)
    cache = Path.home() / ".cache" / "penstock" / "hardware.json"
    hardware = measure_hardware(options.folder, config, cache)
    with Engine.load(options.folder, config, hardware=hardware, tokenizer=NoText()) as engine:
        metrics = engine.metrics
        print(f"{metrics.num_resident_layers} layers in RAM, {metrics.num_streamed_layers} streamed")
        expected = {count: round(1e3 * engine.meter.known_s(count)) for count in (1, 2, 4, 8, 16, 32, 64)}
        print(f"predicted ms of a step of so many tokens: {expected}")
        print("answers seqs   tok/s off       on   ratio   tokens per sequence and step")
        for num_seqs in options.sequences:
            for kind in options.kinds:
                print(compare(engine, kind, num_seqs, options.tokens), flush=True)


if __name__ == "__main__":
    main()
