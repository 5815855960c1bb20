"""docs/reference/goes-with.md: made of the table of what goes with what."""

from pathlib import Path

from penstock.goes_with import REFUSALS
from penstock_server.settings.goes_with_reference import crossings, reasons, with_tables

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "goes-with.md"


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text()
    assert with_tables(text) == text, "run python -m penstock_server.settings.goes_with_reference"


def test_each_refused_pair_has_its_letter_and_its_reason() -> None:
    letters = "".join(line[62:] for line in list(crossings())[2:])
    assert letters.count("-") + letters.count("o") == len(REFUSALS)
    for (first, second), refusal in REFUSALS.items():
        (row,) = (
            row
            for row in reasons()
            if first.value in row.split("|")[1] and second.value in row.split("|")[2] and refusal.why in row
        )
        assert refusal.advice in row
