"""The page's words stand in two tables, english.js and chinese.js, and nowhere else."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

UI = Path(__file__).parents[2] / "server" / "penstock_server" / "ui"
TABLES = ("english.js", "chinese.js")
#: The server's errors in languages that the server does not speak.
ERRORS = ("chinese_errors.js",)
SCRIPTS = sorted(path for path in UI.glob("*.js") if path.name not in TABLES + ERRORS)
#: Literals of the scripts that are no words in any language: HTTP, names of keys, units.
NOT_SHOWN = {
    "Authorization", "Content-Type", "Bearer ${apiKey()}", "Retry-After", "GET", "POST", "Enter", "Escape",
    "noopener noreferrer nofollow", "disk, experts", "KiB", "MiB", "GiB", "TiB",
    "Files", "host memory", "spill disk", "AbortError", "QuotaExceededError",
}  # fmt: skip


def table(name: str) -> dict[str, str]:
    return dict(re.findall(r'^\s+(\w+):\s+"(.*)",$', (UI / name).read_text(), re.MULTILINE))


ENGLISH, CHINESE = map(table, TABLES)


def without_comments(text: str) -> str:
    return re.sub(r"^\s*(//|/?\*).*$|\s//: .*$|\s// .*$", "", text, flags=re.MULTILINE)


def values_of(text: str) -> set[str]:
    return set(re.findall(r"\{(\w+)\}", text))


def test_both_languages_have_the_same_keys_and_values() -> None:
    assert list(ENGLISH) == list(CHINESE) and len(ENGLISH) > 100
    for key, text in ENGLISH.items():
        assert values_of(text) == values_of(CHINESE[key]), key
        assert len({frozenset(values_of(form)) for form in text.split("|")}) == 1, key


def test_tables_have_one_line_for_each_key() -> None:
    """What `table` reads is all that a table has."""
    for name, words in zip(TABLES, (ENGLISH, CHINESE), strict=True):
        assert len(re.findall(r"^  \w+:", (UI / name).read_text(), re.MULTILINE)) == len(words)


def test_chinese_is_chinese() -> None:
    same = {key for key, text in CHINESE.items() if not re.search("[\u4e00-\u9fff]", text)}
    assert same <= {"listComma", "topP", "topK"}


def test_every_key_is_used_and_every_used_key_exists() -> None:
    pages = "".join(without_comments(path.read_text()) for path in [*SCRIPTS, UI / "index.html"])
    quoted = set(re.findall(r'"(\w+)"', pages))
    assert set(ENGLISH) - quoted - {"system", "light", "dark"} == set()
    named = re.findall(r'\b(?:words|inEnglish)\("(\w+)"|data-(?:words|label|placeholder)="(\w+)"', pages)
    assert {key for pair in named for key in pair if key} <= set(ENGLISH)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_script_has_words_of_its_own(path: Path) -> None:
    """A literal that begins with a capital letter, or has words side by side and is no class of the style."""
    text = re.sub(r"\bclass: .*", "", without_comments(path.read_text()))
    assert not re.search(r"""(?:\}, |textContent = |aria-label"[:,] |title = |placeholder: )["'`]\w""", text)
    for quote in re.findall(r'"((?:[^"\\\n]|\\.)*)"|`((?:[^`\\]|\\.)*)`', text):
        literal = "".join(quote)
        plain = re.sub(r"\$\{[^}]*\}", "", literal)
        is_sentence = re.search(r"^[A-Z][a-z]+|[A-Za-z]{2,},? [a-z]{2,}|[\u4e00-\u9fff]{2}", plain)
        assert not is_sentence or literal in NOT_SHOWN or is_no_text(literal), literal


def is_no_text(literal: str) -> bool:
    """Paths of drawings, selectors, media queries, tags, the names of what the plan has."""
    return bool(re.fullmatch(r"<\w+ .*>|[MLmlhHvVaAcCzZ\d.,\s-]+|\[.*|\(.*|\./.*|host to device", literal))


class Reader(HTMLParser):
    """Collects the text of index.html and the attributes that a reader sees or hears."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.shown += [f"{name}={value}" for name, value in attrs if name in ("aria-label", "title")]
        self.shown += [f"{name}={value}" for name, value in attrs if name in ("placeholder", "alt")]

    def handle_data(self, data: str) -> None:
        self.shown += [data.strip()] if data.strip() else []


def test_the_html_has_a_name_and_no_words() -> None:
    reader = Reader()
    reader.feed(re.sub(r"<noscript>.*?</noscript>", "", (UI / "index.html").read_text(), flags=re.DOTALL))
    assert reader.shown == ["Penstock", "Penstock"]
