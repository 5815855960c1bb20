"""`penstock bench --drafts`: what speculative decoding gave.

Random weights say nothing that repeats itself. So each answer is made once without guesses, and again while
the request predicts it, with one token in ten wrong: an edited text. The answers must be the same.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace

from penstock import Engine, GenerationRequest, SamplingParams
from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock_server.facade.inside import model_of, snapshot_of

#: Tokens of each prompt and answer, and the share of a prediction's tokens that are wrong.
PROMPT, ANSWER, WRONG = 16, 48, 0.1


@dataclass(frozen=True)
class DraftsMeasurement:
    """The same answers without guesses and with guesses."""

    num_seqs: int
    plain_tokens_per_s: float
    tokens_per_s: float
    #: Tokens that each sequence gained in a sweep of the weights.
    tokens_per_sweep: float
    num_guesses: int
    num_accepted: int
    #: For each depth the share of the trees of guesses that were right so far.
    accepted_by_depth: list[float]

    @property
    def line(self) -> str:
        name = f"edited text, {self.num_seqs} sequence{'s' if self.num_seqs > 1 else ''}"
        text = f"{name:26} {self.tokens_per_s:8.2f} tokens/s, without guesses {self.plain_tokens_per_s:.2f}"
        text += f"; {self.tokens_per_sweep:.2f} tokens a sweep"
        if not self.num_guesses:
            return f"{text}; no guess was expected to pay"
        shares = " ".join(f"{share:.0%}" for share in self.accepted_by_depth)
        return f"{text}; {self.num_accepted} of {self.num_guesses} guesses right; by depth {shares}"


def drafts_lines(found: list[DraftsMeasurement]) -> list[str]:
    if not found:
        return ["--drafts measures what speculative decoding gives"]
    head = f"answers that are predicted, with one token in {round(1 / WRONG)} wrong, and the same answers:"
    return [head, *(each.line for each in found)]


def check_drafts(config: EngineConfig) -> None:
    """Raises ConfigError where there are no guesses."""
    if config.speculation == "off":
        raise ConfigError("--speculation off has no guesses to measure: leave it or --drafts out")


def measure_drafts(engine: Engine, num_seqs: int) -> DraftsMeasurement:
    """So many answers without guesses, and then with guesses."""
    size, dice = model_of(engine).vocab_size, random.Random(0)
    length = min(PROMPT, engine.max_model_len // 2)
    prompts = [dice.choices(range(size), k=length) for _ in range(num_seqs)]
    num_tokens = min(ANSWER, engine.max_model_len - length)
    plain = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, speculation=False)
    plain_rate, _, expected = _run(engine, prompts, [plain] * num_seqs)
    edited = [_edited(answer, size, dice) for answer in expected]
    before = snapshot_of(engine).stats
    guided = [replace(plain, speculation=True, prediction=text) for text in edited]
    rate, per_sweep, found = _run(engine, prompts, guided)
    assert found == expected, "an answer depends on guesses"
    after = snapshot_of(engine).stats
    num_trees = after.draft_chains - before.draft_chains
    places = zip(after.accepted_by_place, before.accepted_by_place, strict=True)
    shares = [(now - then) / num_trees for now, then in places] if num_trees else []
    return DraftsMeasurement(
        num_seqs,
        plain_rate,
        rate,
        per_sweep,
        after.draft_tokens - before.draft_tokens,
        after.accepted_tokens - before.accepted_tokens,
        [share for share in shares if share],
    )


def _edited(answer: list[int], vocab_size: int, dice: random.Random) -> tuple[int, ...]:
    return tuple(dice.randrange(vocab_size) if dice.random() < WRONG else token for token in answer)


def _run(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[float, float, list[list[int]]]:
    """Of the steps after all first tokens: tokens per second, and tokens of a sequence in a step; and the
    answers."""
    for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        engine.add(GenerationRequest(prompt, each, str(index)))
    answers: list[list[int]] = [[] for _ in prompts]
    began, num_before, num_steps = 0.0, 0, 0
    while engine.has_work:
        outputs = engine.step()
        for output in outputs:
            answers[int(output.request_id)] += output.token_ids
        num_steps += bool(began)
        if not began and all(answers):
            began, num_before = time.perf_counter(), sum(map(len, answers))
    num_tokens = sum(map(len, answers)) - num_before
    per_step = num_tokens / max(1, num_steps) / len(prompts)
    return num_tokens / (time.perf_counter() - began), per_step, answers
