"""The documentation: links lead somewhere, pages are short, each table of figures names its machine."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: What git knows; in a copy without git, what lies there.
TRACKED = subprocess.run(
    ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True
).stdout.split() or [
    str(path.relative_to(ROOT))
    for folder in ("clients", "docker", "docs")
    for path in (ROOT / folder).rglob("*.md")
]
PAGES = sorted({*TRACKED, "README.md", "README.zh-CN.md", "CONTRIBUTING.md", "CHANGELOG.md"})
LINK = r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)"


def text_of(path: Path) -> str:
    """Without fenced blocks, whose lines may begin with #."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", text_of(path), re.MULTILINE)
    return {re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-")) for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for file, anchor in re.findall(LINK, text_of(page)):
        target = page.parent / file if file else page
        assert target.exists(), f"{name} links to {file}, which does not exist"
        assert not anchor or anchor in anchors(target), f"{name}: {file} has no heading #{anchor}"


def test_every_page_is_reached_from_the_readme() -> None:
    """By links of Markdown, page by page; docs/measured is linked as a folder."""
    reached, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        for file, _ in re.findall(LINK, text_of(page)):
            target = (page.parent / file).resolve()
            waiting += sorted(target.glob("*.md")) if target.is_dir() else [target] * (target.suffix == ".md")
    missing = {name for name in TRACKED if name.startswith("docs/")} - {
        str(page.relative_to(ROOT)) for page in reached
    }
    assert not missing


def test_pages_are_short() -> None:
    """The front page is read in two minutes, another in five. docs/reference/ is looked up and not read."""
    sizes = {name: len((ROOT / name).read_bytes()) for name in PAGES}
    assert max(sizes["README.md"], sizes["README.zh-CN.md"]) <= 8 << 10
    long = {name: size for name, size in sizes.items() if size > 12 << 10 and "docs/reference/" not in name}
    assert not long
    assert sum(sizes.values()) <= 330 << 10


INSIDE = sorted((ROOT / "docs" / "internals").rglob("*.md"))
#: A file by its name, with folders before it or without, or a folder.
NAMED = r"`([\w-][\w./-]*(?:\w\.(?:py|c|h|cu|cpp|js|json|md)|/))`"


@functools.cache
def paths() -> tuple[str, ...]:
    """Of files and folders from the top folder on; those of folders end with a slash."""
    folders = [ROOT / name for name in ("clients", "docker", "docs", "engine", "server", "tests")]
    found = [*ROOT.glob("*.*"), *folders, *(path for folder in folders for path in folder.rglob("*"))]
    return tuple(f"/{path.relative_to(ROOT)}{'/' * path.is_dir()}" for path in found)


@pytest.mark.parametrize("page", INSIDE, ids=lambda page: page.name)
def test_pages_of_the_inside_name_files_that_are_there(page: Path) -> None:
    """By the ends of their paths: a file that moved to another folder is named there."""
    ends = [f"/{name}" for name in re.findall(NAMED, page.read_text())]
    missing = [end for end in ends if not any(path.endswith(end) for path in paths())]
    assert not missing, f"{page.relative_to(ROOT)} names {missing}, which are not there"


def has_machine(text: str) -> bool:
    return bool(re.search(r"^Machines?\b|no machine is named", text, re.MULTILINE))


def nameless(text: str) -> list[str]:
    """Sections with a table or a command and no machine, in their own text or in a section around them."""
    found, path, is_code = dict[tuple[str, ...], str](), tuple[str, ...](), False
    for line in text.splitlines():
        is_code ^= line.startswith("```")
        if not is_code and (heading := re.match(r"(#+) (.+)", line)):
            path = (*path[: len(heading[1]) - 1], heading[2])
            found[path] = ""
        else:
            found[path] = found.get(path, "") + line + "\n"
    return [
        path[-1]
        for path, own in found.items()
        if ("\n|" in own or "```sh" in own)
        and not any(has_machine(found.get(path[:length], "")) for length in range(1, len(path) + 1))
    ]


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "measured").glob("*.md")), ids=lambda page: page.name
)
def test_each_table_names_its_machine(page: Path) -> None:
    text = page.read_text()
    assert nameless(text) == []
    # The heading leaves the sections that name a machine, and those around them.
    assert nameless(text + "\n# Another\n\n## Tables\n\n| a |\n|---|\n") == ["Tables"]
