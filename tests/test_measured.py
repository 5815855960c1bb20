"""Each table of engine/MEASURED.md stands below a line that names its machine, or says that none is noted."""

from __future__ import annotations

import re
from pathlib import Path

MEASURED = Path(__file__).parents[1] / "engine" / "MEASURED.md"


def sections(text: str) -> dict[tuple[str, ...], str]:
    """The own text of each section, by the headings that lead to it."""
    found, path, is_code = dict[tuple[str, ...], str](), tuple[str, ...](), False
    for line in text.splitlines():
        is_code ^= line.startswith("```")
        if not is_code and (heading := re.match(r"(#+) (.+)", line)):
            path = (*path[: len(heading[1]) - 1], heading[2])
            found[path] = ""
        else:
            found[path] = found.get(path, "") + line + "\n"
    return found


def has_machine(text: str) -> bool:
    return bool(re.search(r"^Machines?\b|no machine is named", text, re.MULTILINE))


def nameless(text: str) -> list[tuple[str, ...]]:
    """Sections with a table or a command, and no machine in their own text or above."""
    found = sections(text)
    return [
        path
        for path, own in found.items()
        if ("\n|" in own or "```sh" in own)
        and not any(has_machine(found.get(path[:length], "")) for length in range(2, len(path) + 1))
    ]


def test_each_table_names_its_machine() -> None:
    text = MEASURED.read_text()
    assert len(sections(text)) > 40 and nameless(text) == []
    assert nameless(text + "\n## New\n\n### Tables\n\n| a |\n|---|\n") == [
        ("What was measured", "New", "Tables")
    ]
