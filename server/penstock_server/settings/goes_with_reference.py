"""The tables of penstock.goes_with as Markdown.

    python -m penstock_server.settings.goes_with_reference docs/reference/goes-with.md

writes them after the mark in that file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from penstock.goes_with import FACTS, REFUSALS, Feature, Refusal

BEGIN = "<!-- python -m penstock_server.settings.goes_with_reference docs/reference/goes-with.md -->"
_CHOICES = [feature for feature in Feature if feature not in FACTS]


def crossings() -> Iterator[str]:
    """A row for each feature, and a column for each that a user chooses."""
    numbers = [f"{place:2}" for place in range(1, len(_CHOICES) + 1)]
    for digits in zip(*numbers, strict=True):
        yield f"{'':62}{''.join(digits)}"
    for place, feature in enumerate(Feature):
        number = f"{place + 1:2}" if feature in _CHOICES else "  "
        row = "".join(_letter(other, feature) for other in _CHOICES[:place])
        yield f"{number} {feature.value:58} {row}".rstrip()


def _letter(first: Feature, second: Feature) -> str:
    refusal = REFUSALS.get((first, second))
    return "+" if refusal is None else "-" if refusal.is_final else "o"


def reasons() -> Iterator[str]:
    """A row for each reason."""
    yield "| | can't be used with | since | so |"
    yield "|---|---|---|---|"
    pairs: dict[Refusal, list[tuple[Feature, Feature]]] = {}
    for pair, refusal in REFUSALS.items():
        pairs.setdefault(refusal, []).append(pair)
    for refusal, found in pairs.items():
        these, those = (", ".join(dict.fromkeys(pair[side].value for pair in found)) for side in (0, 1))
        yet = "" if refusal.is_final else " (yet)"
        yield f"| {these} | {those}{yet} | {refusal.why} | {refusal.advice} |"


def with_tables(page: str) -> str:
    """The text with new tables after the mark."""
    lines = [BEGIN, "", "```text", *crossings(), "```", "", *reasons(), ""]
    return page.partition(BEGIN)[0] + "\n".join(lines)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text()))
