"""Two circles of tests: `make test` runs what any change can break, `make test-all` every case.

    @pytest.mark.slow    is of the outer circle only; of a case: pytest.param(..., marks=pytest.mark.slow)

Of a test with several parameters, the inner circle has so many cases that each value of each one occurs.

What took how long, by file, is kept in durations.json, which `make test-all` writes: files that take longest
come first, so that both processes end at the same time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

DURATIONS = Path(__file__).with_name("durations.json")


def covering(cases: Sequence[Mapping[str, object]]) -> list[int]:
    """Indexes of cases, in order, in which each value of each parameter occurs. cases: parameters' names
    and values. The greedy choice: the case with the most values that are missing yet comes next."""
    values = [{(name, _known(value)) for name, value in case.items()} for case in cases]
    missing, chosen = set().union(*values), list[int]()
    if not missing:
        return list(range(len(cases)))
    while missing:
        best = max(range(len(cases)), key=lambda index: len(values[index] & missing))
        chosen.append(best)
        missing -= values[best]
    return sorted(chosen)


def _known(value: object) -> object:
    """What tells values apart: False is not 0. Lists and the like are told apart as objects."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def read_durations() -> dict[str, float]:
    """Seconds of each file of tests, by its name."""
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}


def write_durations(tests: Iterable[tuple[str, float]]) -> None:
    """tests: names of tests and their seconds, of a whole run."""
    files = Counter[str]()
    for name, seconds in tests:
        files[name.partition("::")[0]] += seconds
    known = {name: round(seconds, 1) for name, seconds in sorted(files.items()) if seconds >= 1}
    DURATIONS.write_text(json.dumps(known, indent=1) + "\n")
