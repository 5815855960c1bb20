"""Two circles of tests: `make test` runs what any change can break, `make test-all` every case.

Of a test with several parameters, the inner circle has so many cases that each value of each one occurs. It
leaves out what takes longer than LONG_S. Two marks say otherwise:

    @pytest.mark.slow    is of the outer circle only; of a case: pytest.param(..., marks=pytest.mark.slow)
    @pytest.mark.inner   the quickest of its cases is of the inner circle, whatever it takes

What took how long is kept in durations.json, which `make test-all` writes: the seconds of files, since what
takes longest comes first, so that both processes end at the same time; and of the tests that take long."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

#: Seconds. Three quarters of the time are spent by tests that take longer.
LONG_S = 1.0
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


@dataclass(frozen=True)
class Durations:
    """Seconds of a whole run."""

    #: Of files, by their names.
    files: dict[str, float] = field(default_factory=dict)
    #: Of the tests that take longer than LONG_S, by their names.
    tests: dict[str, float] = field(default_factory=dict)

    def is_long(self, test: str) -> bool:
        return self.tests.get(test, 0) > LONG_S


def read_durations() -> Durations:
    return Durations(**json.loads(DURATIONS.read_text())) if DURATIONS.exists() else Durations()


def write_durations(phases: Iterable[tuple[str, str, float]]) -> None:
    """phases: of each phase of each test its name, "setup", "call" or "teardown", and seconds. A test's own
    seconds are those of its call: what was made for it may serve the next one, too."""
    files, tests = Counter[str](), dict[str, float]()
    for name, phase, seconds in phases:
        files[name.partition("::")[0]] += seconds
        if phase == "call" and seconds > LONG_S:
            tests[name] = round(seconds, 1)
    known = {name: round(seconds, 1) for name, seconds in sorted(files.items()) if seconds >= 1}
    DURATIONS.write_text(json.dumps({"files": known, "tests": dict(sorted(tests.items()))}, indent=1) + "\n")
