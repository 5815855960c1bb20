import doctest
import io
import re
import sys

import pytest

from penstock_client import progress
from penstock_client.progress import BatchProgress, Tally, bar, reporter
from penstock_client.results import Usage


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def at(num_done: int, total: int | None = 20) -> BatchProgress:
    return BatchProgress(num_done, 0, total, 0, 0, 2.0)


def test_tally():
    tally = Tally(3, began_s=10.0)
    tally.add(False, Usage(5, 7, 12))
    tally.add(True, None)
    assert tally.snapshot(12.5) == BatchProgress(2, 1, 3, 0, 7, 2.5)


def test_bar():
    assert bar(at(0)) == f"0/20 [{'.' * 24}] 2 s"
    assert bar(at(20)) == f"20/20 [{'#' * 24}] 2 s"
    assert bar(at(5, None)) == "5 2 s"
    assert bar(at(0, 0)) == "0 2 s"


def test_a_terminal_shows_one_line(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    draw = reporter(True)
    for value in (at(1), at(2), None):
        draw(value)
    assert sys.stderr.getvalue() == f"\r{bar(at(1))}\x1b[K\r{bar(at(2))}\x1b[K\n"


def test_a_log_shows_tenths(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    draw = reporter(True)
    for number in range(21):
        for _ in range(3):  # retries change something else
            draw(at(number))
    draw(None)
    assert len(sys.stderr.getvalue().splitlines()) == 11


@pytest.mark.parametrize(("total", "shown"), [(25, [*range(0, 25, 2), 25]), (None, [0, 10, 20, 25])])
def test_a_log_shows_the_last(monkeypatch, total, shown):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    draw = reporter(True)
    for number in range(26):
        draw(at(number, total))
    draw(None)
    lines = sys.stderr.getvalue().splitlines()
    assert [int(re.match(r"\d+", line)[0]) for line in lines] == shown


def test_nothing_is_shown_unless_asked_for(capsys):
    reporter(False)(at(1))
    reporter(False)(None)
    assert capsys.readouterr() == ("", "")


def test_a_function_is_told_values_only():
    seen = []
    report = reporter(seen.append)
    report(at(1))
    report(None)
    assert seen == [at(1)]


def test_examples_in_the_docstrings():
    result = doctest.testmod(progress)
    assert result.attempted and not result.failed


@pytest.mark.parametrize("num_done", [0, 1, 19])
def test_a_bar_is_as_long_whatever_is_done(num_done):
    assert bar(at(num_done)).partition("[")[2].index("]") == 24
