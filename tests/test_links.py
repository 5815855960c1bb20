"""Links of the guides lead to files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDES = (
    "README.md",
    "README.zh-CN.md",
    "CONTRIBUTING.md",
    *(f"{room}/README.md" for room in ("engine", "server")),
)


def text_of(path: Path) -> str:
    """Without fenced blocks, whose lines may begin with #."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", text_of(path), re.MULTILINE)
    return {re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-")) for heading in headings}


@pytest.mark.parametrize("name", [*GUIDES, "engine/MEASURED.md"])
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    links = re.findall(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)", text_of(page))
    assert links
    for file, anchor in links:
        target = page.parent / file if file else page
        assert target.exists(), f"{name} links to {file}, which does not exist"
        assert not anchor or anchor in anchors(target), f"{name}: {file} has no heading #{anchor}"


def test_measured_says_the_machine_of_each_table() -> None:
    """A section with a table says on which machine it was measured, or that nobody noted it."""
    chapters = re.split(r"^(?=## )", (ROOT / "engine" / "MEASURED.md").read_text(), flags=re.MULTILINE)
    for chapter in chapters:
        if chapter.startswith("## Fidelity"):  # its beginning says so for all its sections
            assert "no machine is named below" in chapter
            continue
        for section in re.split(r"^(?=#+ )", chapter, flags=re.MULTILINE):
            assert "|---|" not in section or "Machine" in section, section.splitlines()[0]
