"""The demo model's text: the same from the same seed, correct, and well-formed."""

from __future__ import annotations

import importlib
import itertools
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
        assert not re.search(r"[{}<>]|  |\bNone\b|\.\.|\ba [aeio]|\ban [^aeiouhA]", text), text


def test_chats_alternate_and_end_with_an_answer() -> None:
    for document in itertools.islice(corpus.documents(8), 2000):
        roles = [role for role, _ in document.turns]
        if roles[:1] == ["system"]:
            del roles[0]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


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
