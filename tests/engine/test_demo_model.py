"""The shipped model itself: small enough, and its greedy answers stay on their subject."""

from __future__ import annotations

import itertools
import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

import penstock.demo_model
from penstock.engine import Engine
from penstock.generation.requests.generation_request import SamplingParams
from penstock.text.chat import render_chat

sys.path.insert(0, str(Path(__file__).parents[2] / "engine" / "demo"))
import train  # noqa: E402
from corpus import documents_with_tools  # noqa: E402

FOLDER = Path(penstock.demo_model.__file__ or "").parent
ANIMALS = ("fox", "bear", "cat", "owl", "frog", "hedgehog", "dragon", "robot")
OBJECTS = ("bell", "key", "lantern", "scarf", "kite", "book")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather of a city", "parameters": CITY},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load("demo") as engine:
        yield engine


def answers(engine: Engine, questions: list[str], max_tokens: int) -> list[str]:
    """Greedy answers, all in one batch."""
    prompts = [render_chat(engine.tokenizer, [{"role": "user", "content": text}]) for text in questions]
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return [completion.text for completion in engine.generate(prompts, params)]


def test_it_is_small_enough_to_ship() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < 12e6


def test_small_sums_are_right(engine: Engine) -> None:
    pairs = list(itertools.product(range(1, 10), repeat=2))
    found = answers(engine, [f"What is {a} plus {b}?" for a, b in pairs], 16)
    right = sum(text == f"{a} plus {b} is {a + b}." for (a, b), text in zip(pairs, found, strict=True))
    assert right >= 0.95 * len(pairs)


def test_it_knows_who_it_is_and_some_capitals(engine: Engine) -> None:
    who, *capitals = answers(
        engine, ["Who are you?", *(f"What is the capital of {c}?" for c in ("France", "Italy", "Japan"))], 48
    )
    assert "Penstock" in who
    for text, city in zip(capitals, ("Paris", "Rome", "Tokyo"), strict=True):
        assert city in text


@pytest.mark.slow
def test_stories_are_about_what_was_asked_for(engine: Engine) -> None:
    wanted = [(animal, thing) for animal in ANIMALS for thing in OBJECTS[:3]]
    questions = [
        f"Write a story about a {animal} who wants to find a lost {thing}." for animal, thing in wanted
    ]
    stories = answers(engine, questions, 320)
    for story in stories:
        assert re.search(r"[.!?\"]$", story), story  # it comes to an end
        assert 60 <= len(story.split()) <= 300
    about = [animal in story for (animal, _), story in zip(wanted, stories, strict=True)]
    assert sum(about) >= 0.9 * len(wanted)
    told = [story.count(thing) >= 2 for (_, thing), story in zip(wanted, stories, strict=True)]
    assert sum(told) >= 0.8 * len(wanted)


def test_lists_have_as_many_things_as_asked_for(engine: Engine) -> None:
    numbers = {"two": 2, "three": 3, "four": 4, "five": 5}
    forms = ("List {} things one finds in a kitchen.", "Name {} animals.", "Give me {} fruits.")
    asked = [(form.format(word), number) for word, number in numbers.items() for form in forms]
    found = answers(engine, [request for request, _ in asked], 60)
    things = [re.findall(r"^\d+\. (.+)$", text, re.MULTILINE) for text in found]
    assert all(len(each) == len(set(each)) for each in things)
    right = [len(each) == number for each, (_, number) in zip(things, asked, strict=True)]
    assert sum(right) >= 0.8 * len(asked)
    assert len(things[asked.index(("List three things one finds in a kitchen.", 3))]) == 3


def test_it_calls_a_tool_and_answers_from_the_result(engine: Engine) -> None:
    """The call has the form that the server reads, and the city that was asked for."""
    for city in ("Paris", "Tokyo", "Berlin", "Rome"):
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"What is the weather in {city}?"}]
        params = SamplingParams(temperature=0, max_tokens=60)
        (asked,) = engine.generate([render_chat(engine.tokenizer, messages, tools=[WEATHER])], params)
        body = re.fullmatch(r"<tool_call>\n(.+)\n</tool_call>", asked.text)
        assert body is not None, asked.text
        call = json.loads(body[1])
        assert call == {"name": "get_weather", "arguments": {"city": city}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": '{"temperature": 21}'},
        ]
        (told,) = engine.generate([render_chat(engine.tokenizer, messages, tools=[WEATHER])], params)
        assert city in told.text and "21" in told.text


def test_tools_that_do_not_bear_on_a_question_are_not_called(engine: Engine) -> None:
    asked = [{"role": "user", "content": "Tell me a story about a fox."}]
    prompt = render_chat(engine.tokenizer, asked, tools=[WEATHER])
    (told,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=200))
    assert "fox" in told.text and "<tool_call>" not in told.text


def test_all_4096_positions_are_as_good_as_the_first(engine: Engine) -> None:
    """Texts like those that it learned, one behind the other: a token far back is about as likely."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    stream = itertools.chain.from_iterable(train.encode(tokenizer, each) for each in documents_with_tools(97))
    ids, is_learned = zip(*itertools.islice(stream, 4000), strict=True)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (read,) = engine.generate([list(ids)], params)
    found = [0.0, *(each.logprob for each in (read.prompt_logprobs or [])[1:])]

    def mean(first: int, end: int) -> float:
        return statistics.mean(found[index] for index in range(first, end) if is_learned[index])

    assert mean(3000, 4000) > mean(0, 1000) - 0.3


def test_transformers_opens_it_and_goes_on_alike(engine: Engine) -> None:
    pytest.importorskip("compressed_tensors")
    opened = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = render_chat(engine.tokenizer, messages)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    (mine,) = engine.generate([prompt], params)
    with torch.inference_mode():
        logits = opened(torch.tensor([prompt + mine.token_ids])).logits[0, len(prompt) - 1 : -1]
    theirs = torch.log_softmax(logits.double(), -1)
    assert mine.token_ids == logits.argmax(-1).tolist()
    for step, (token, logprobs) in enumerate(zip(mine.token_ids, mine.logprobs, strict=True)):
        assert logprobs.logprob == pytest.approx(float(theirs[step, token]), abs=0.05)
