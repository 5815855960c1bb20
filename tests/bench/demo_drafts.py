"""Drafts on real text: tokens in a sweep of the demo mixture, with the demo model as its draft model, and
without any model. Both were trained on the same texts, and their vocabulary is the same. Guesses are weighed
as in a step that waits for its layers, whatever this machine takes for such small models.

    python tests/bench/demo_drafts.py [--tokens 120]
    python tests/bench/demo_drafts.py --planes      (the demo model, of which its upper planes guess)

The last says how many passes over the planes a sweep has, by prices as on a large model: beside a step of a
second, a pass takes 0.1 s, and 0.02 s for each further place.

Three kinds of requests: chat, completion, and copies: the prompt has a text, and its beginning once more.
The demo mixture was made from the demo model and trained on, so the two agree more often than other pairs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence as List

from penstock.config import EngineConfig
from penstock.drafters.draft_model import DraftModel
from penstock.drafters.planes_drafter import PlanesDrafter
from penstock.engine import Engine
from penstock.generation.drafting.asking import Guesser, Place
from penstock.generation.drafting.drafter import NO_DRAFTS, Drafter
from penstock.generation.drafting.speculation import Speculation
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.text.chat import render_chat

QUESTIONS = (
    "What is a penstock?",
    "Tell me a story about a miller.",
    "Why does the water turn the wheel?",
    "Who lives by the river?",
    "What do you do in winter?",
    "How does a turbine work?",
)
BEGINNINGS = (
    "The river",
    "Once upon a time, there was a miller",
    "In the morning the water",
    "A turbine is",
    "The old mill",
    "When the rain came,",
)


def flat_s(num_tokens: int) -> float:
    """Seconds of a step that waits for its layers."""
    return 1.0 + 0.001 * num_tokens


def asked(engine: Engine, kind: str) -> list[list[int]]:
    """Prompts of one kind."""
    tokenizer = engine.tokenizer
    if kind == "chat":
        return [render_chat(tokenizer, [{"role": "user", "content": text}]) for text in QUESTIONS]
    prompts = [tokenizer.encode(text) for text in BEGINNINGS]
    if kind == "completion":
        return prompts
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    told = engine.generate(prompts, params)
    return [[*prompt, *done.token_ids, *prompt] for prompt, done in zip(prompts, told, strict=True)]


def tokens_in_a_sweep(
    engine: Engine, drafter: Drafter, prompts: list[list[int]], params: SamplingParams
) -> tuple[float, list[list[int]]]:
    """One request after the other; and their answers. A prompt's own step counts, too."""
    engine.scheduler._drafter = drafter
    answers, num_steps = list[list[int]](), 0
    for prompt in prompts:
        engine.add(GenerationRequest(prompt, params))
        answers.append([])
        while engine.has_work:
            answers[-1] += [token for output in engine.step() for token in output.token_ids]
            num_steps += 1
    return sum(map(len, answers)) / num_steps, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--planes", action="store_true")
    options = parser.parse_args()
    if options.planes:
        config = EngineConfig(enable_prefix_caching=False, weights="planes", draft_with_planes=True)
        with Engine.load("demo", config) as engine:
            planes = engine.draft_model
            compare(engine, planes, "its upper planes", options.tokens, priced(planes))
        return
    # The draft model comes first: what it guesses takes time, and the choice of guesses knows it.
    draft = DraftModel.load("demo", EngineConfig())
    config = EngineConfig(enable_prefix_caching=False)
    with Engine.load("demo-moe", config) as engine:
        draft.share_vocabulary(engine.tokenizer, engine.spec.vocab_size)
        compare(engine, draft, "demo as draft model", options.tokens)
    draft.close()


def priced(guesser: Guesser | None) -> list[int]:
    """Have a guesser take what a large model's takes. Returns the number of its passes over planes."""
    assert isinstance(guesser, PlanesDrafter)
    guesser.seconds = lambda num_places: 0.08 + 0.02 * num_places  # type: ignore[assignment]
    count, expand = [0], guesser.expand

    def counted(places: List[Place]) -> list[list[tuple[int, float]]]:
        count[0] += 1
        return expand(places)

    guesser.expand = counted  # type: ignore[method-assign]
    return count


def compare(
    engine: Engine, guesser: Guesser | None, name: str, num_tokens: int, passes: list[int] | None = None
) -> None:
    """Prints a line for each kind of requests and temperature. passes: how many there were."""
    print(f"requests     temperature   no model   {name}: tokens in a sweep")
    for kind in ("chat", "completion", "copies"):
        prompts = asked(engine, kind)
        for temperature in (0.0, 0.8):
            params = SamplingParams(temperature=temperature, seed=1, max_tokens=num_tokens)
            _, expected = tokens_in_a_sweep(engine, NO_DRAFTS, prompts, params)
            cells = []
            for model in (None, guesser):
                before, num_before = engine.metrics.num_steps, sum(passes or ())
                found, answers = tokens_in_a_sweep(engine, Speculation(flat_s, model), prompts, params)
                assert answers == expected, "an answer depends on guesses"
                cells.append(f"{found:8.2f}")
                if model is not None and passes is not None:
                    num_steps = engine.metrics.num_steps - before
                    cells[-1] += f", {(sum(passes) - num_before) / num_steps:.1f} passes"
            print(f"{kind:12} {temperature:11} {cells[0]:>10} {cells[1]:>21}", flush=True)


if __name__ == "__main__":
    main()
