"""Drafts that come true as often as published: tokens/s of one sequence with a draft model and without, end
to end, within the same memory. Weights are random, so that the draft model's guesses can't be right: its time
is real, and its guesses are replaced by what the answer without guesses has, wrong at stated rates.

    python tests/bench/forced_drafts.py TARGET DRAFT [--host-memory-gib 6] [--rounds 3] [--tokens 48]
    python tests/bench/forced_drafts.py TARGET planes     (TARGET is in planes, and the upper ones guess)
    python tests/bench/forced_drafts.py TARGET DRAFT --ways off planes "draft model"
    python tests/bench/forced_drafts.py TARGET mtp        (TARGET has a head of multi-token prediction)

The third command has TARGET in planes, too. --answer FILE keeps the answer for later calls, which then need
not compute all of it without guesses. TARGET and DRAFT are folders (`penstock bench --shape NAME` makes
such). The rates are such that the best tree of 32 guesses gives 4.88 tokens in a pass, as OPT-Tree's authors
measured with a model of 1.1 billion parameters for one of 7 billion (Wang et al. 2024, arXiv 2406.17276,
table 1, temperature 0). Upper planes are right in 92% of cases, as docs/measured/speculation.md has it for
the model that is less sure. A head's guesses are right so often that a chain of six gives 4.74 tokens in a
pass, as is reported of Qwen3.6-27B's.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import heapq
import json
import random
import statistics
import time
from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import replace
from pathlib import Path

from penstock.config import EngineConfig
from penstock.drafters.draft_model import DraftModel
from penstock.drafters.mtp_drafter import MTPDrafter
from penstock.drafters.planes_drafter import PlanesDrafter
from penstock.engine import Engine
from penstock.generation.drafting.asking import Guesser, Place
from penstock.generation.drafting.drafter import NO_DRAFTS
from penstock.generation.drafting.speculation import Speculation
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.sequence import Sequence
from penstock.measure import measure_hardware
from penstock.memory.hardware import HardwareProfile
from penstock.text.tokenizer import NoText

TOKENS_IN_A_PASS, NUM_GUESSES = 4.88, 32
#: How often the second, third and fourth guess is right, compared with the first.
BESIDE = (1.0, 0.17, 0.07, 0.04)
PLANES, MTP = Path("planes"), Path("mtp")
PLANES_RATES = [0.92, 0.04, 0.01, 0.01]
MTP_RATES = [0.866, 0.03, 0.01, 0.01]
PROMPT = 32
#: Tokens that nobody chooses.
GARBAGE = 31000
WAYS = ("off", "draft model", "planes", "mtp")


def tokens_in_a_pass(rates: list[float], num_guesses: int) -> float:
    """Expected tokens with the best tree of so many guesses."""
    heap, total = [-rate for rate in rates], 1.0
    heapq.heapify(heap)
    for _ in range(num_guesses):
        chance = heapq.heappop(heap)
        total -= chance
        for rate in rates:
            heapq.heappush(heap, chance * rate)
    return total


def published_rates() -> list[float]:
    low, high = 0.1, 0.78
    for _ in range(50):
        rate = (low + high) / 2
        is_low = tokens_in_a_pass([rate * each for each in BESIDE], NUM_GUESSES) < TOKENS_IN_A_PASS
        low, high = (rate, high) if is_low else (low, rate)
    return [low * each for each in BESIDE]


class Said:
    """What someone says who is right at these rates."""

    def __init__(self, rates: list[float], answer: list[int]) -> None:
        self.rates, self.answer = rates, answer
        #: Of each place on the right path, the number of the answer's token behind it.
        self._path: dict[int, int] = {}

    def behind(self, place: Place) -> list[tuple[int, float]]:
        """Tokens that nobody chooses, and perhaps the right one among them."""
        if place.node < 0:
            self._path = {-1: place.sequence.num_output_tokens}
        elif place.parent in self._path and place.token_id == self._at(self._path[place.parent]):
            self._path[place.node] = self._path[place.parent] + 1
        dice = random.Random(f"{place.sequence.num_tokens} {place.node}")
        said = [GARBAGE + rank for rank in range(len(self.rates))]
        if place.node in self._path:
            draw, rank = dice.random(), 0
            while rank < len(self.rates) and draw >= self.rates[rank]:
                draw, rank = draw - self.rates[rank], rank + 1
            if rank < len(self.rates):
                said[rank] = self._at(self._path[place.node])
        return list(zip(said, self.rates, strict=True))

    def _at(self, index: int) -> int:
        return self.answer[index] if index < len(self.answer) else -1


class Forced:
    """Someone whose time is real, and whose guesses are right at these rates."""

    def __init__(self, model: Guesser, rates: list[float], answer: list[int]) -> None:
        self.model, self.said, self.levels_of_pass = model, Said(rates, answer), model.levels_of_pass
        self.drafting_s, self.num_asked = 0.0, 0

    def seconds(self, num_places: int) -> float:
        return self.model.seconds(num_places)

    def backlog_s(self, sequences: List[Sequence]) -> float:
        return self.model.backlog_s(sequences)

    def start(self, sequences: List[Sequence]) -> list[Sequence]:
        began = time.perf_counter()
        able = self.model.start(sequences)
        self.drafting_s += time.perf_counter() - began
        return able

    def expand(self, places: List[Place]) -> list[list[tuple[int, float]]]:
        began = time.perf_counter()
        self.model.expand(places)
        self.drafting_s += time.perf_counter() - began
        self.num_asked += 1
        return [self.said.behind(place) for place in places]

    def finish(self) -> None:
        self.model.finish()


def answer(engine: Engine, prompt: list[int], num_tokens: int) -> tuple[list[int], float, int]:
    """The answer, tokens per second after its first step, and the number of those steps."""
    # Drawn: a greedy answer of random weights repeats itself, and then the text has guesses enough.
    params = SamplingParams(temperature=1, seed=1, max_tokens=num_tokens, ignore_eos=True)
    engine.add(GenerationRequest(prompt, params, "a"))
    found = [token for output in engine.step() for token in output.token_ids]
    began, num_first, steps = time.perf_counter(), len(found), 0
    while engine.has_work:
        found += [token for output in engine.step() for token in output.token_ids]
        steps += 1
    return found, (len(found) - num_first) / (time.perf_counter() - began), steps


def told(engine: Engine, forced: Forced, per_step: float) -> str:
    """What the guesses took and gave."""
    metrics = engine.metrics
    step_ms = 1e3 * metrics.step_seconds / metrics.num_steps
    drafting_ms = 1e3 * forced.drafting_s / metrics.num_steps
    num_guesses = metrics.draft_tokens / max(1, metrics.draft_chains)
    asked = f"{forced.num_asked / metrics.num_steps:.1f} levels or passes"
    return (
        f"{metrics.num_streamed_layers} layers streamed; {per_step:.2f} tokens in a sweep of "
        f"{num_guesses:.0f} guesses; {step_ms:.0f} ms a step, {drafting_ms:.0f} ms of them in {asked}"
    )


@contextlib.contextmanager
def loaded(
    way: str, options: argparse.Namespace, config: EngineConfig, hardware: HardwareProfile
) -> Iterator[Engine]:
    """The target with whoever guesses for it, within the same memory."""
    draft: DraftModel | None = None
    if way == "draft model":
        draft = DraftModel.load(options.draft, config, hardware=hardware, tokenizer=NoText())
        config, hardware = draft.leave(config, hardware)
    config = replace(config, draft_with_planes=way == "planes", mtp="on" if way == "mtp" else "off")
    drafter = NO_DRAFTS if way == "off" else None
    with Engine.load(
        options.target, config, hardware=hardware, tokenizer=NoText(), drafter=drafter
    ) as engine:
        if draft is not None:  # which the engine closes
            engine.draft_model = draft
        yield engine


def forced_of(engine: Engine, whole: list[int]) -> Forced:
    """What guesses for the engine, with the rates of its kind."""
    guesser = engine.draft_model
    assert isinstance(guesser, DraftModel | PlanesDrafter | MTPDrafter)
    if isinstance(guesser, MTPDrafter):
        return Forced(guesser, MTP_RATES, whole)
    return Forced(guesser, PLANES_RATES if isinstance(guesser, PlanesDrafter) else published_rates(), whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[])
    parser.add_argument("--host-memory-gib", type=float, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--answer", type=Path)
    options = parser.parse_args()
    ways = options.ways or ["off", str(options.draft) if options.draft in (PLANES, MTP) else "draft model"]
    config = EngineConfig(
        host_memory_bytes=int(options.host_memory_gib * 2**30), num_kv_tokens=1024, max_model_len=512,
        max_num_seqs=4, max_num_batched_tokens=128, enable_prefix_caching=False,
    )  # fmt: skip
    hardware = measure_hardware(options.target, config, Path.home() / ".cache" / "penstock" / "hardware.json")
    print("rates of a draft model's guesses:", " ".join(f"{rate:.2f}" for rate in published_rates()))
    prompt = [random.Random(0).randrange(3, 30000) for _ in range(PROMPT)]
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    kept = options.answer
    whole: list[int] = json.loads(kept.read_text()) if kept is not None and kept.exists() else []
    for _ in range(options.rounds):
        for way in ways:
            with loaded(way, options, config, hardware) as engine:
                forced = None
                if way != "off":
                    forced = forced_of(engine, whole)
                    last_step = functools.partial(getattr, engine.metrics, "last_step")
                    engine.scheduler._drafter = Speculation(engine.meter.known_s, forced, last_step=last_step)
                found, speed, steps = answer(engine, prompt, 8 if way == "off" and whole else options.tokens)
                whole = whole or found
                if kept is not None and not kept.exists():
                    kept.write_text(json.dumps(whole))
                assert found == whole[: len(found)], "an answer depends on guesses"
                speeds[way].append(speed)
                streamed = f"{engine.metrics.num_streamed_layers} layers streamed"
                rest = streamed if forced is None else told(engine, forced, (options.tokens - 1) / steps)
                print(f"{way:12} {speed:.3f} tokens/s; {rest}", flush=True)
            del engine, forced  # an engine that is closed keeps its memory as long as somebody has it
    for way, found_speeds in speeds.items():
        print(f"median: {way:12} {statistics.median(found_speeds):.3f} tokens/s")


if __name__ == "__main__":
    main()
