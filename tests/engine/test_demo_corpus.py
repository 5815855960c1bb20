"""The demo model's text: the same from the same seed, correct, and well-formed."""

from __future__ import annotations

import importlib
import itertools
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

DEMO = Path(__file__).parents[2] / "engine" / "demo"


def module(name: str) -> Any:
    """The demo is a folder of scripts and no package: import from it as `python train.py` does."""
    sys.path.insert(0, str(DEMO))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(DEMO))


corpus, stories, world = module("corpus"), module("stories"), module("world")


def is_of_tools(text: str) -> bool:
    return corpus.calls.HEAD in text or text.startswith(("<tool_call>", "<tool_response>"))


def texts(seed: int, count: int) -> list[str]:
    """Every text of the first `count` documents."""
    found = []
    for document in itertools.islice(corpus.documents(seed), count):
        found += [document.text] if document.text else [text for _, text in document.turns]
    return found


def test_same_seed_same_documents() -> None:
    first, second = (list(itertools.islice(corpus.documents(5), 300)) for _ in range(2))
    assert first == second
    assert first != list(itertools.islice(corpus.documents(6), 300))


def test_texts_are_filled_in_and_ascii() -> None:
    for text in texts(7, 3000):
        assert text.strip() == text != ""
        assert text.isascii()
        if is_of_tools(text):
            continue
        assert not re.search(r"[{}<>]|  |\bNone\b|\.\.|\ba [aeio]|\ban [^aeiouhA]", text), text


def test_chats_alternate_and_end_with_an_answer() -> None:
    for document in itertools.islice(corpus.documents(8), 2000):
        roles = [role for role, _ in document.turns]
        if roles[:1] == ["system"]:
            del roles[0]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


def test_calls_are_of_offered_tools_with_words_of_the_request() -> None:
    num_calls = num_silent = 0
    for document in itertools.islice(corpus.documents(14), 1500):
        role, first = document.turns[0] if document.turns else ("", "")
        if role != "system" or corpus.calls.HEAD not in first:
            assert not any(is_of_tools(text) for _, text in document.turns)
            continue
        lines = first.partition(corpus.calls.HEAD)[2].strip().splitlines()
        offered = {tool["name"]: tool["parameters"] for tool in map(json.loads, lines)}
        num_before = num_calls
        for (_, request), (_, reply) in itertools.pairwise(document.turns):
            if not reply.startswith("<tool_call>"):
                continue
            call = json.loads(reply.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            assert set(call["arguments"]) == set(offered[call["name"]]["properties"])
            for name, value in call["arguments"].items():
                heard = re.findall(r"\w+", request.lower())
                assert set(re.findall(r"\w+", str(value).lower())) <= set(heard), request
                kind = offered[call["name"]]["properties"][name]["type"]
                assert isinstance(value, str) == (kind == "string")
            num_calls += 1
        num_silent += num_calls == num_before
    assert num_calls > 300 and num_silent > 50


@pytest.mark.parametrize(
    ("maker", "pattern", "compute"),
    [
        ("addition", r"(\d+) plus (\d+) is (\d+)\.", lambda a, b: a + b),
        ("subtraction", r"(\d+) minus (\d+) is (\d+)\.", lambda a, b: a - b),
        ("multiplication", r"(\d+) times (\d+) is (\d+)\.", lambda a, b: a * b),
    ],
)
def test_sums_are_right(maker: str, pattern: str, compute: Any) -> None:
    rng = random.Random(9)
    num_sums = 0
    for _ in range(1000):
        [(request, reply)] = getattr(corpus, maker)(rng)
        if match := re.fullmatch(pattern, reply):
            a, b, result = (int(number) for number in match.groups())
            assert result == compute(a, b)
            assert sorted(re.findall(r"\d+", request)) == sorted([str(a), str(b)])
            num_sums += 1
    assert num_sums > 900  # the rest are in words


def test_sums_in_words_and_problems_are_right() -> None:
    rng = random.Random(10)
    for _ in range(500):
        [(_, reply)] = corpus.addition(rng)
        if match := re.fullmatch(r"(\w+) plus (\w+) is ([a-z]+)\.", reply.lower()):
            a, b, result = (corpus.NUMBERS.index(word) for word in match.groups())
            assert a + b == result
        [(problem, reply)] = corpus.word_problem(rng)
        a, b = (int(number) for number in re.findall(r"\d+", problem))
        result = a + b if " more. " in problem else a - b
        assert re.findall(r"\d+", reply) == [str(result)]


def test_comparisons_and_counts_are_right() -> None:
    rng = random.Random(11)
    for _ in range(500):
        [(_, reply)] = corpus.comparison(rng)
        a, b = (int(number) for number in re.findall(r"\d+", reply))
        assert (a > b) == ("bigger" in reply)
        [(_, reply)] = corpus.counting(rng)
        numbers = [int(number) for number in re.findall(r"\d+", reply)]
        assert {y - x for x, y in itertools.pairwise(numbers)} <= {numbers[1] - numbers[0]}


def test_the_chat_template_writes_what_was_learned() -> None:
    train = module("train")
    tokenizer = train.Tokenizer.from_file(str(DEMO.parent / "penstock/demo_model/tokenizer.json"))
    chat = train.chat_tokenizer(tokenizer)
    rng = random.Random(15)
    for _ in range(50):
        (task, *others), prompt = corpus.calls.tasks(rng), rng.choice(("", "Be kind and clear."))
        tools = [task.tool(rng), *(other.tool(rng) for other in others)]
        turns = [("system", "\n".join([*([prompt, ""] if prompt else []), corpus.calls.HEAD, *tools]))]
        document = corpus.Document(turns=(*turns, *corpus.calls.turns(rng, task)))
        result = task.response.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
        function = {"name": task.name, "arguments": task.arguments}
        messages: list[dict[str, Any]] = [{"role": "system", "content": prompt}] if prompt else []
        messages += [
            {"role": "user", "content": document.turns[1][1]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": function}],
            },
            {"role": "tool", "content": result},
            {"role": "assistant", "content": task.answer},
        ]
        offered = [{"type": "function", "function": json.loads(tool)} for tool in tools]
        shown = chat.apply_chat_template(messages, tools=offered, tokenize=False)
        ids = tokenizer.encode(shown, add_special_tokens=False).ids
        assert ids == [token for token, _ in train.encode(tokenizer, document)]


def test_stories_keep_to_their_subject() -> None:
    rng = random.Random(12)
    for _ in range(2000):
        story = stories.Story(rng)
        (request, text), facts = story.asked(), story.facts
        assert facts["k"] in text
        assert facts["n"] in text
        assert facts["hn"] in text
        assert 60 <= len(text.split()) <= 260
        if match := re.search(r" named (\w+)| called (\w+)", request):
            assert (match[1] or match[2]) in text
        if story.plot == "seek" and facts["obj"] in request:
            assert text.count(facts["obj"]) >= 3


def test_every_plot_tells_its_facts() -> None:
    rng = random.Random(13)
    for plot in stories.PLOTS:
        story = stories.Story(rng, plot)
        assert story.plot == plot
        assert all("{" not in part for pair in story.questions() for part in pair)


def test_tables_of_the_world_are_complete() -> None:
    assert {len(row) for row in world.ANIMALS} == {10}
    assert {len(row) for row in world.COUNTRIES} == {3}
    names = [row[0] for row in world.ANIMALS] + list(world.BEINGS) + list(world.RARE_HEROES)
    assert not set(world.DAYS) & set(names)
    assert all(row[2] in stories.SKILLS for row in world.ANIMALS)
