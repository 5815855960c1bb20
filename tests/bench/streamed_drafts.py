"""Drafts on real text where layers are streamed: tokens in a sweep and tokens/s of a trained model, whose
layers are all read from disk in each step, without guesses, with those that need no model, and with draft
models. Guesses are chosen by the measured rates of the machine, as in a server.

    python engine/demo/larger.py --output larger --small-output small
    for each in larger small; do penstock convert $each $each-int8; done
    python tests/bench/streamed_drafts.py larger-int8 --drafts demo small-int8

Requests are chats, completions and copies: to write a text again, to edit or to quote it; these texts are
none of those of the training. One request follows the other; for each, the drafters take turns. A prompt's
own step counts. Answers must not depend on guesses. "copyable" says what the text alone can bring: tokens in
a sweep if each guess were the longest piece of the true answer that stands in the text already.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from pathlib import Path

from demo_drafts import BEGINNINGS, QUESTIONS

from penstock.config import EngineConfig
from penstock.drafters.draft_model import DraftModel
from penstock.engine import Engine
from penstock.generation.drafting.asking import Guesser
from penstock.generation.drafting.draft_tree import DraftTree
from penstock.generation.drafting.drafter import Drafter
from penstock.generation.drafting.speculation import Speculation
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.sequence import Sequence
from penstock.measure import measure_hardware
from penstock.text.chat import render_chat

sys.path.insert(0, str(Path(__file__).parents[2] / "engine" / "demo"))
HELD_OUT_SEED = 29


class Timed(Drafter):
    """A drafter, and the seconds in which it looked for guesses."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.seconds = drafter, 0.0

    def propose(
        self, sequences: Iterable[Sequence], num_tokens: int, room: int
    ) -> Mapping[Sequence, DraftTree]:
        began = time.perf_counter()
        found = self._drafter.propose(sequences, num_tokens, room)
        self.seconds += time.perf_counter() - began
        self.num_followers = self._drafter.num_followers
        return found

    def learn(
        self, sequence: Sequence, drafts: DraftTree, right: List[int], followers: List[tuple[int, ...]]
    ) -> None:
        self._drafter.learn(sequence, drafts, right, followers)


@dataclass
class Found:
    """What a drafter gave, over all requests of a kind."""

    answers: list[list[int]] = field(default_factory=list)
    num_sweeps: int = 0
    seconds: float = 0.0
    drafting_s: float = 0.0

    @property
    def cell(self) -> str:
        """Tokens in a sweep, tokens/s, and milliseconds of guessing in a sweep."""
        count = sum(map(len, self.answers))
        drafting_ms = 1e3 * self.drafting_s / self.num_sweeps
        return f"{count / self.num_sweeps:6.2f} {count / self.seconds:7.1f} {drafting_ms:6.1f}"


def asked(engine: Engine, kind: str, count: int) -> list[list[int]]:
    """Prompts of one kind."""
    from copies import copied  # engine/demo is no package

    if kind == "completion":
        return [engine.tokenizer.encode(text) for text in BEGINNINGS[:count]]
    if kind == "chat":
        questions: Iterable[str] = QUESTIONS
    else:
        dice = random.Random(HELD_OUT_SEED)
        questions = (copied(dice).turns[0][1] for _ in itertools.count())
    chats = ([{"role": "user", "content": text}] for text in itertools.islice(questions, count))
    return [render_chat(engine.tokenizer, chat) for chat in chats]


def num_copying_sweeps(prompt: List[int], answer: List[int], most: int = EngineConfig.max_guesses) -> int:
    """Sweeps for an answer if each guess were the longest piece of it, of at most so many tokens, that stands
    in prompt or answer already."""
    text, left, sweeps = [*prompt], [*answer], 0
    while left:
        length = 0
        for place in range(len(text)):
            end = min(most, len(left) - 1, len(text) - place)
            same = next((n for n in range(end) if text[place + n] != left[n]), end)
            length = max(length, same)
        text, left, sweeps = text + left[: length + 1], left[length + 1 :], sweeps + 1
    return sweeps


def answer(engine: Engine, drafter: Drafter, prompt: list[int], params: SamplingParams, found: Found) -> None:
    timed = Timed(drafter)
    engine.scheduler._drafter = timed
    engine.add(GenerationRequest(prompt, params))
    found.answers.append([])
    began = time.perf_counter()
    while engine.has_work:
        found.answers[-1] += [token for output in engine.step() for token in output.token_ids]
        found.num_sweeps += 1
    found.seconds += time.perf_counter() - began
    found.drafting_s += timed.seconds


def compare(
    engine: Engine, drafters: dict[str, Drafter], kind: str, params: SamplingParams, count: int
) -> str:
    """A line."""
    found = {name: Found() for name in drafters}
    prompts = asked(engine, kind, count)
    for prompt in prompts:
        for name, drafter in drafters.items():
            answer(engine, drafter, prompt, params, found[name])
    texts = [each.answers for each in found.values()]
    assert all(each == texts[0] for each in texts), "an answer depends on guesses"
    cells = "   ".join(each.cell for each in found.values())
    sweeps = sum(num_copying_sweeps(prompt, each) for prompt, each in zip(prompts, texts[0], strict=True))
    copyable = sum(map(len, texts[0])) / sweeps
    return f"{kind:10} {params.temperature:4}   {cells}   {copyable:6.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="of the larger model")
    parser.add_argument("--drafts", nargs="*", default=["demo"], help="draft models")
    parser.add_argument("--kinds", nargs="*", default=["chat", "completion", "copies"])
    parser.add_argument("--requests", type=int, default=len(QUESTIONS), help="of each kind")
    parser.add_argument("--tokens", type=int, default=80)
    options = parser.parse_args()
    config = EngineConfig(num_resident_layers=0, enable_prefix_caching=False, mtp="off")
    hardware = measure_hardware(options.folder, config, Path.home() / ".cache" / "penstock" / "hardware.json")
    drafts = {name: DraftModel.load(name, config, hardware=hardware) for name in options.drafts}
    with Engine.load(options.folder, config, hardware=hardware) as engine:
        models: dict[str, Guesser | None] = {"no model": None, **drafts}
        for draft in drafts.values():
            draft.share_vocabulary(engine.tokenizer, engine.spec.vocab_size)
        expected = {count: round(1e3 * engine.meter.known_s(count), 1) for count in (1, 8, 32)}
        num_layers = engine.metrics.num_streamed_layers
        print(f"{num_layers} layers streamed; predicted ms of a step of so many tokens: {expected}")
        print(
            "tokens in a sweep, tokens/s, ms of guessing in a sweep: off, " + ", ".join(models) + "; copyable"
        )
        for kind in options.kinds:
            for temperature in (0.0, 0.8):
                params = SamplingParams(temperature=temperature, seed=1, max_tokens=options.tokens)
                drafters: dict[str, Drafter] = {"off": Drafter()}
                drafters |= {name: Speculation(engine.meter.known_s, each) for name, each in models.items()}
                print(compare(engine, drafters, kind, params, options.requests), flush=True)
    for draft in drafts.values():
        draft.close()


if __name__ == "__main__":
    main()
