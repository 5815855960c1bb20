"""Drafts: tokens/s with guesses of the next tokens and without, of one folder, all in RAM or streamed, for
1, 4, 8 and 32 sequences. Some steps of an answer have guesses and the others none, so that both meet the same
minutes of the machine. Three kinds of answers:

    edited     the answer repeats a text that the request predicts, but for one token in ten
    new        nothing repeats itself
    wrong      a drafter that is always wrong, and that is trusted at first

    python tests/bench/drafts.py FOLDER [--host-memory-gib 1] [--sequences 1 4 8 32] [--tokens 64]
        [--rounds 5]

A line has tokens/s without and with guesses, the ratio of the two (the median of the rounds, and the range),
and tokens per sequence and step. Each round begins with a drafter that knows nothing. Then, in milliseconds
of a step with guesses: finding guesses, waiting for layers, and computing (the rest of the step). Last, for
each depth the share of trees of guesses that were right so far.

The rates of the machine are measured first, or kept from before. Weights may be random (penstock bench
--shape makes such folders): the text of "edited" is made of the answers that come without guesses.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List
from pathlib import Path
from typing import NamedTuple

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.generation.drafting.draft_tree import DraftTree
from penstock.generation.drafting.drafter import NO_DRAFTS, Drafter
from penstock.generation.drafting.earlier_texts import Shared
from penstock.generation.drafting.repeated_text import Continuation, RepeatedText
from penstock.generation.drafting.speculation import Speculation
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.sequence import Sequence
from penstock.measure import measure_hardware
from penstock.text.tokenizer import NoText

KINDS = ("edited", "new", "wrong")
PROMPT = 32


class WrongText(RepeatedText):
    """Guesses at random, as if a long quotation was found."""

    def __init__(self) -> None:
        super().__init__()
        self._dice = random.Random(0)

    def guesses(self, length: int) -> list[Continuation]:
        return [Continuation(tuple(self._dice.randrange(3, 30000) for _ in range(length)), 32)]


class Wrong(Speculation):
    """A drafter that is always wrong."""

    def _track(self, sequence: Sequence) -> object:  # type: ignore[override]
        track = super()._track(sequence)
        if not isinstance(track.text, WrongText):
            track.text = WrongText()
        track.shared = Shared()  # nothing that was likely before
        return track


def prompts(num_seqs: int) -> list[list[int]]:
    dice = random.Random(0)
    return [[dice.randrange(3, 30000) for _ in range(PROMPT)] for _ in range(num_seqs)]


def edited(answer: list[int]) -> tuple[int, ...]:
    """The answer with one token in ten changed."""
    dice = random.Random(1)
    return tuple(dice.randrange(3, 30000) if dice.random() < 0.1 else token for token in answer)


class Alternating(Drafter):
    """Guesses in some steps and none in the others, so that both meet the same minutes of the machine."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.is_on = drafter, True
        #: In which guesses were looked for.
        self.seconds = 0.0

    def propose(
        self, sequences: Iterable[Sequence], num_tokens: int, room: int
    ) -> Mapping[Sequence, DraftTree]:
        began = time.perf_counter()
        found = self.drafter.propose(sequences, num_tokens, room) if self.is_on else {}
        self.seconds += time.perf_counter() - began
        self.num_followers = self.drafter.num_followers if self.is_on else 0
        return found

    def learn(
        self, sequence: Sequence, drafts: DraftTree, right: List[int], followers: List[tuple[int, ...]]
    ) -> None:
        if self.is_on:
            self.drafter.learn(sequence, drafts, right, followers)


class Timed(NamedTuple):
    """Seconds and tokens of the steps without guesses (0) and with them (1), in which all sequences ran."""

    answers: list[list[int]]
    seconds: tuple[list[float], list[float]]
    tokens: tuple[list[int], list[int]]
    #: For each step with guesses the seconds in which they were looked for, and those of waiting for layers.
    parts: list[tuple[float, float]]


def run(
    engine: Engine,
    drafter: Alternating | None,
    asked: list[list[int]],
    params: list[SamplingParams],
    seed: int = 0,
) -> Timed:
    """seed: decides which steps have guesses."""
    engine.scheduler._drafter = drafter or NO_DRAFTS
    for index, (prompt, each) in enumerate(zip(asked, params, strict=True)):
        engine.add(GenerationRequest(prompt, each, str(index)))
    timed, dice = Timed([[] for _ in asked], ([], []), ([], []), []), random.Random(seed)
    while engine.has_work:
        is_on = dice.random() < 0.5
        if drafter is not None:
            drafter.is_on, drafter.seconds = is_on, 0.0
        are_all_there = all(timed.answers)
        began = time.perf_counter()
        outputs = engine.step()
        seconds = time.perf_counter() - began
        for output in outputs:
            timed.answers[int(output.request_id)] += output.token_ids
        if are_all_there and len(outputs) == len(asked):
            timed.seconds[is_on].append(seconds)
            timed.tokens[is_on].append(sum(len(output.token_ids) for output in outputs))
            if drafter is not None and is_on and engine.metrics.last_step is not None:
                timed.parts.append((drafter.seconds, engine.metrics.last_step.stall_s))
    return timed


def rates(timed: list[Timed], limit: float) -> tuple[float, float]:
    """Tokens per second without guesses and with them. No step counts for more than `limit` seconds:
    something else ran then."""
    off, on = (
        sum(sum(each.tokens[is_on]) for each in timed)
        / sum(min(seconds, limit) for each in timed for seconds in each.seconds[is_on])
        for is_on in (False, True)
    )
    return off, on


def compare(engine: Engine, kind: str, num_seqs: int, num_tokens: int, num_rounds: int) -> str:
    """One line."""
    asked = prompts(num_seqs)
    plain = SamplingParams(temperature=1.0, seed=1, max_tokens=num_tokens, ignore_eos=True)
    params = [plain] * num_seqs
    expected = run(engine, None, asked, params).answers
    if kind == "edited":
        params = [SamplingParams(**(vars(plain) | {"prediction": edited(each)})) for each in expected]
    maker = Wrong if kind == "wrong" else Speculation
    num_trees, places = engine.metrics.draft_chains, [*engine.metrics.accepted_by_place]
    found = list[Timed]()
    for number in range(num_rounds):
        drafter = Alternating(maker(engine.meter.known_s, last_step=lambda: engine.metrics.last_step))
        found.append(run(engine, drafter, asked, params, number))
        assert found[-1].answers == expected, "an answer depends on guesses"
    with_guesses = [seconds for timed in found for seconds in timed.seconds[True]]
    limit = 3 * statistics.median(with_guesses)
    off, on = rates(found, limit)
    ratios = sorted(fast / slow for slow, fast in (rates([timed], limit) for timed in found))
    ratio = f"{statistics.median(ratios):5.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
    per_step = statistics.mean(count for timed in found for count in timed.tokens[True]) / num_seqs
    parts = [each for timed in found for each in timed.parts]
    guessing, waiting = (statistics.median(each) for each in zip(*parts, strict=True))
    computing = statistics.median(with_guesses) - guessing - waiting
    times = " ".join(f"{1e3 * each:8.1f}" for each in (guessing, waiting, computing))
    num_trees = engine.metrics.draft_chains - num_trees
    counts = (now - then for now, then in zip(engine.metrics.accepted_by_place, places, strict=True))
    shares = " ".join(f"{count / num_trees:.0%}" for count in counts if count)
    return f"{kind:8} {num_seqs:3}   {off:8.2f} {on:8.2f}   {ratio}   {per_step:5.2f}   {times}   {shares}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host-memory-gib", type=float, help="stream what does not fit")
    parser.add_argument("--sequences", nargs="*", type=int, default=(1, 4, 8, 32))
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
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
        print(
            "answers seqs   tok/s off       on   ratio (of rounds)  tokens  ms: guess     wait  compute   "
            "right by depth"
        )
        for num_seqs in options.sequences:
            for kind in options.kinds:
                print(compare(engine, kind, num_seqs, options.tokens, options.rounds), flush=True)


if __name__ == "__main__":
    main()
