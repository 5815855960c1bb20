"""Drafts: tokens/s with guesses of the next tokens and without, of one folder, all in RAM or streamed, for
1, 4, 8 and 32 sequences, in turn in one run. Four kinds of answers:

    edited     the answer repeats a text that the request predicts, but for one token in ten
    drafted    a pretended draft model, which knows the answer and errs as often as one of 1.1B does in trees
               (expectation.py says where that was published). Each of its levels sleeps for --level-ms
    new        nothing repeats itself
    wrong      a drafter that is always wrong, and that is trusted at first

    python tests/bench/drafts.py FOLDER [--host-memory-gib 1] [--sequences 1 4 8 32] [--tokens 64]

A line has tokens/s without and with guesses, and tokens per sequence and step. Then, in milliseconds of a
step with guesses: finding guesses, computing (the rest of the step), and waiting for layers. Last, for each
depth the share of trees of guesses that were right so far.

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
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.generation.drafting.asking import Place
from penstock.generation.drafting.draft_tree import DraftTree
from penstock.generation.drafting.drafter import NO_DRAFTS, Drafter
from penstock.generation.drafting.expectation import assumed_model
from penstock.generation.drafting.recycled_tokens import RecycledTokens
from penstock.generation.drafting.repeated_text import Continuation, RepeatedText
from penstock.generation.drafting.speculation import Speculation, _Track
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.sequence import Sequence
from penstock.measure import measure_hardware
from penstock.text.tokenizer import NoText

KINDS = ("edited", "drafted", "new", "wrong")
PROMPT, ROUNDS = 32, 3
VOCABULARY = range(3, 30000)


class Noise(RepeatedText):
    """Guesses at random, as if a long quotation was found."""

    def follow(self, token_ids: List[int]) -> None:
        self._dice = random.Random(len(token_ids))

    def guesses(self, length: int) -> list[Continuation]:
        return [Continuation(tuple(self._dice.choices(VOCABULARY, k=length)), EngineConfig.prompt_lookup_max)]


class Wrong(Speculation):
    def _track(self, sequence: Sequence) -> _Track:
        track = super()._track(sequence)
        track.text, track.recycled = Noise(), RecycledTokens()
        return track


class Pretended:
    """A draft model (asking.Guesser) that knows each answer by its prompt. Of the tokens that it names at a
    place, one is right as often as `rates` say, and none is on a path that is wrong already."""

    def __init__(self, answers: Mapping[tuple[int, ...], list[int]], level_s: float) -> None:
        self.answers, self.level_s = answers, level_s
        self.rates = assumed_model(1_100_000_000, lambda _: 0.0).rates
        self._right: dict[Sequence, dict[int, int]] = {}

    def seconds(self, num_places: int) -> float:
        return self.level_s

    def start(self, sequences: List[Sequence]) -> list[Sequence]:
        self._right = {each: {-1: each.num_output_tokens} for each in sequences}
        return list(sequences)

    def expand(self, places: List[Place]) -> list[list[tuple[int, float]]]:
        time.sleep(self.level_s)
        return [self._followers(place) for place in places]

    def _followers(self, place: Place) -> list[tuple[int, float]]:
        right = self._right[place.sequence]
        answer = self.answers[tuple(place.sequence.request.prompt_token_ids)]
        before = right.get(place.parent) if place.node >= 0 else None
        if before is not None and answer[before : before + 1] == [place.token_id]:
            right[place.node] = before + 1
        number = right.get(place.node)
        dice = random.Random(f"{number} {place.token_id} {len(answer)} {answer[:4]}")
        tokens = dice.sample(VOCABULARY, k=len(self.rates))
        if number is not None and number < len(answer):
            drawn, rank = dice.random(), 0
            while rank < len(tokens) and drawn >= self.rates[rank]:
                drawn -= self.rates[rank]
                rank += 1
            if rank < len(tokens):
                tokens[rank] = answer[number]
        return list(zip(tokens, self.rates, strict=True))


class Timed(Drafter):
    """Measures another drafter."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.seconds = drafter, 0.0

    @property
    def num_followers(self) -> int:  # type: ignore[override]
        return self._drafter.num_followers

    def propose(
        self, sequences: Iterable[Sequence], num_tokens: int, room: int
    ) -> Mapping[Sequence, DraftTree]:
        began = time.perf_counter()
        found = self._drafter.propose(sequences, num_tokens, room)
        self.seconds += time.perf_counter() - began
        return found

    def learn(
        self, sequence: Sequence, drafts: DraftTree, right: List[int], followers: List[tuple[int, ...]]
    ) -> None:
        began = time.perf_counter()
        self._drafter.learn(sequence, drafts, right, followers)
        self.seconds += time.perf_counter() - began


@dataclass
class Run:
    """The steps after the prompts: tokens per second, the answers, and where the time of a step went."""

    tokens_per_s: float
    answers: list[list[int]]
    num_steps: int
    drafting_ms: float
    computing_ms: float
    waiting_ms: float


def prompts(num_seqs: int) -> list[list[int]]:
    dice = random.Random(0)
    return [[dice.choice(VOCABULARY) for _ in range(PROMPT)] for _ in range(num_seqs)]


def edited(answer: list[int]) -> tuple[int, ...]:
    """The answer with one token in ten changed."""
    dice = random.Random(1)
    return tuple(dice.choice(VOCABULARY) if dice.random() < 0.1 else token for token in answer)


def run(engine: Engine, drafter: Drafter, asked: list[list[int]], params: list[SamplingParams]) -> Run:
    timed = Timed(drafter)
    engine.scheduler._drafter = timed
    for index, (prompt, each) in enumerate(zip(asked, params, strict=True)):
        engine.add(GenerationRequest(prompt, each, str(index)))
    answers: list[list[int]] = [[] for _ in asked]
    began, num_before, num_steps, stall_s = 0.0, 0, 0, 0.0
    while engine.has_work:
        for output in engine.step():
            answers[int(output.request_id)] += output.token_ids
        num_steps += bool(began)
        if not began and all(answers):
            began, num_before = time.perf_counter(), sum(map(len, answers))
            timed.seconds, stall_s = 0.0, engine.metrics.stall_seconds
    seconds = time.perf_counter() - began
    waiting_s = engine.metrics.stall_seconds - stall_s
    parts = (timed.seconds, seconds - timed.seconds - waiting_s, waiting_s)
    rate = (sum(map(len, answers)) - num_before) / seconds
    return Run(rate, answers, num_steps, *(1e3 * part / num_steps for part in parts))


def compare(engine: Engine, kind: str, num_seqs: int, num_tokens: int, level_s: float) -> str:
    """One line."""
    asked = prompts(num_seqs)
    plain = SamplingParams(temperature=1.0, seed=1, max_tokens=num_tokens, ignore_eos=True)
    params = [plain] * num_seqs
    answers = run(engine, NO_DRAFTS, asked, params).answers
    if kind == "edited":
        params = [replace(plain, prediction=edited(each)) for each in answers]
    known = {tuple(prompt): answer for prompt, answer in zip(asked, answers, strict=True)}
    pretended = Pretended(known, level_s) if kind == "drafted" else None
    maker = Wrong if kind == "wrong" else Speculation
    off, on = [], []
    metrics = engine.metrics
    num_trees, places = metrics.draft_chains, [*metrics.accepted_by_place]
    for _ in range(ROUNDS):
        off.append(run(engine, NO_DRAFTS, asked, params))
        on.append(run(engine, maker(engine.meter.known_s, pretended), asked, params))
        assert on[-1].answers == off[-1].answers, "an answer depends on guesses"
    num_trees = metrics.draft_chains - num_trees
    shares = [
        (now - then) / num_trees
        for now, then in zip(metrics.accepted_by_place, places, strict=True)
        if num_trees
    ]
    plain_rate, rate = (statistics.median(each.tokens_per_s for each in runs) for runs in (off, on))
    middle = sorted(on, key=lambda each: each.tokens_per_s)[ROUNDS // 2]
    times = " ".join(f"{ms:8.1f}" for ms in (middle.drafting_ms, middle.computing_ms, middle.waiting_ms))
    return (
        f"{kind:8} {num_seqs:3}   {plain_rate:8.2f} {rate:8.2f}   {rate / plain_rate:5.2f}   "
        f"{(num_tokens - 1) / middle.num_steps:5.2f}   {times}   "
        + " ".join(f"{share:.0%}" for share in shares if share)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host-memory-gib", type=float, help="stream what does not fit")
    parser.add_argument("--sequences", nargs="*", type=int, default=(1, 4, 8, 32))
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--level-ms", type=float, default=35.0, help="a level of the pretended draft model")
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
            "answers seqs   tok/s off       on   ratio   tokens  ms: guess  compute     wait   right by depth"
        )
        for num_seqs in options.sequences:
            for kind in options.kinds:
                print(compare(engine, kind, num_seqs, options.tokens, options.level_ms / 1e3), flush=True)


if __name__ == "__main__":
    main()
