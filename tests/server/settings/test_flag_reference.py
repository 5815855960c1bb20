"""docs/reference/flags.md lists the flags as they are."""

from __future__ import annotations

from pathlib import Path

from penstock_server.settings.flag_reference import flag_tables, with_flags

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "flags.md"


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text()
    assert text == with_flags(text), (
        "run: PYTHONPATH=engine:server python -m penstock_server.settings.flag_reference "
        "docs/reference/flags.md"
    )


def test_a_row() -> None:
    assert "| `--port N` | port to listen on; 0 takes a free one (default: 8000) |" in flag_tables()
    assert "| `--kv-dtype float16, float32, int8` |" in flag_tables()
