"""README.zh-CN.md says what README.md says: the same sections, commands, figures and links."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGLISH, CHINESE = ((ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md"))


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of each fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    """Without fenced blocks, and with each paragraph in one line."""
    return re.sub(r"(?<=\S)\n(?=\S)", " ", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def headings(text: str) -> list[str]:
    return re.findall(r"^(#+) ", prose(text), re.MULTILINE)


def commands(text: str) -> list[str]:
    """The lines of the shell's blocks without comments."""
    lines = (line for language, block in blocks(text) if language == "sh" for line in block.splitlines())
    bare = (re.sub(r"(^|\s+)#.*", "", line).rstrip() for line in lines)
    return [line for line in bare if line]


def figures(text: str) -> list[str]:
    """The numbers of all tables, row by row. A cell may name them in another order."""
    rows = re.findall(r"^\|.*\|$", text, re.MULTILINE)
    return [" ".join(sorted(re.findall(r"\d+(?:[.,]\d+)*(?:e-\d+)?", row))) for row in rows]


def test_both_name_each_other() -> None:
    assert "(README.zh-CN.md)" in ENGLISH[:200] and "(README.md)" in CHINESE[:200]


def test_the_sections_are_the_same() -> None:
    assert headings(ENGLISH) == headings(CHINESE) and len(headings(ENGLISH)) > 6


def test_the_commands_are_the_same() -> None:
    assert commands(ENGLISH) == commands(CHINESE) and len(commands(ENGLISH)) > 8
    python = [
        [block for language, block in blocks(text) if language == "python"] for text in (ENGLISH, CHINESE)
    ]
    assert python[0] == python[1] and len(python[0]) >= 2


@pytest.mark.parametrize(
    "pattern", [r"`([^`\n]+)`", r"\]\(([^#)][^)]*)\)"], ids=["code within the text", "links to files"]
)
def test_names_and_links_are_the_same(pattern: str) -> None:
    one, other = (Counter(set(re.findall(pattern, prose(text)))) for text in (ENGLISH, CHINESE))
    assert set(one - other) <= {"README.zh-CN.md"} and set(other - one) <= {"README.md"}


def test_the_tables_have_the_same_figures() -> None:
    assert figures(ENGLISH) == figures(CHINESE)


def test_links_within_the_page_lead_somewhere() -> None:
    for text in (ENGLISH, CHINESE):
        names = {
            re.sub(r"[^\w-]", "", name.lower().replace(" ", "-"))
            for name in re.findall(r"^#+ (.*)$", text, re.M)
        }
        assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= names
