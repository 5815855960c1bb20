"""The flags of `penstock serve` as Markdown, for docs/reference/flags.md.

    python -m penstock_server.settings.flag_reference docs/reference/flags.md

writes them between the two marks in that file.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock_server.settings.entries import GROUPS
from penstock_server.settings.settings import Settings
from penstock_server.settings.sources import flag_help
from penstock_server.settings.values import parse_bool

BEGIN = "<!-- flags: begin (python -m penstock_server.settings.flag_reference docs/reference/flags.md) -->"
END = "<!-- flags: end -->"


def flag_tables() -> str:
    """A heading and a table for each group of settings."""
    return "\n".join(line for name in GROUPS for line in _table(name))


def _table(group: str) -> Iterator[str]:
    yield f"## {GROUPS[group].heading.capitalize()}"
    yield ""
    yield "| Flag | What it is |"
    yield "|---|---|"
    for field in dataclasses.fields(Settings):
        if field.metadata["group"] == group and "serve" in field.metadata["commands"]:
            text = flag_help(field).replace("|", "\\|").replace("<", "&lt;")
            yield f"| `{_flag(field)}` | {text} |"
    yield ""


def _flag(field: dataclasses.Field[Any]) -> str:
    info = field.metadata
    if field.name == "model":
        return str(info["metavar"])
    name = "--" + field.name.replace("_", "-")
    if info["parse"] is parse_bool:
        return name
    value = ", ".join(info["choices"]) if info["choices"] else info["metavar"]
    return f"{name} {value}"


def with_flags(page: str) -> str:
    """The text with new tables between the marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{flag_tables()}\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_flags(path.read_text()))
