"""The original tokenizers of the CPM models, written once more from their rules, as oracles for tests."""

from __future__ import annotations

import re
import tempfile
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path

import jieba
from sentencepiece import SentencePieceProcessor

Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]


@cache
def _jieba() -> jieba.Tokenizer:
    tokenizer = jieba.Tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.tmp_dir = folder
        tokenizer.initialize()
    return tokenizer


def cut(text: str) -> list[str]:
    return list(_jieba().cut(text, cut_all=False, HMM=True))


def lines_of(folder: Path) -> list[str]:
    return (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()


def cpm1(folder: Path) -> tuple[Encode, Decode]:
    """Words joined by spaces go through the sentencepiece package; decoded spaces are dropped."""
    processor = SentencePieceProcessor(model_file=str(next(folder.glob("*.model"))))

    def encode(text: str) -> list[int]:
        words = [word.replace(" ", "\u2582").replace("\n", "\u2583") for word in cut(text)]
        return list(processor.encode(" ".join(words)))

    def decode(ids: list[int]) -> str:
        text: str = processor.decode(ids)
        return text.replace(" ", "").replace("\u2582", " ").replace("\u2583", "\n")

    return encode, decode


def longest(pieces: list[str]) -> Callable[[str], list[str]]:
    """Alternatives of a pattern are tried in their order, so the longest piece wins. A character without a
    piece is a match of its own."""
    known, ordered = set(pieces), sorted(filter(None, pieces), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, ordered)) + "|.", re.DOTALL)

    def split(word: str) -> list[str]:
        if len(word) > 200:
            return ["<unk>"]
        return [part if part in known else "<unk>" for part in pattern.findall(word)]

    return split


def _vocabulary(folder: Path, spell: Callable[[str], str]) -> tuple[Encode, Decode]:
    """`spell` changes a text before jieba."""
    lines = lines_of(folder)
    split = longest(lines)

    def encode(text: str) -> list[int]:
        words = [word.replace(" ", "\u2582").replace("\n", "\u2583") for word in cut(spell(text))]
        return [lines.index(piece) for word in words for piece in split(word)]

    def decode(ids: list[int]) -> str:
        return "".join(lines[i] for i in ids).replace("\u2582", " ").replace("\u2583", "\n")

    return encode, decode


def narrow(text: str, kept: str = "") -> str:
    """NFKC makes ASCII's full-width forms, and the ideographic space, half-width."""
    return "".join(
        unicodedata.normalize("NFKC", c) if c not in kept and ("！" <= c <= "～" or c == "\u3000") else c
        for c in text
    )


def cpm2(folder: Path) -> tuple[Encode, Decode]:
    return _vocabulary(folder, lambda text: narrow(text, "，。！（）？、；："))


def eva(folder: Path) -> tuple[Encode, Decode]:
    wide = {chr(ord(c) + 0xFEE0): c for c in "!\"#$%&'()*+,-/:;<=>?@[\\]^_`{|}~"}
    quotes = dict.fromkeys("〝〞“”‟", '"') | dict.fromkeys("‘’‛", "'")
    table = str.maketrans(wide | quotes)
    return _vocabulary(folder, lambda text: text.replace("…", "...").translate(table))


def cpm1_of_bminf(folder: Path) -> tuple[Encode, Decode]:
    lines = lines_of(folder)
    split = longest(lines)

    def encode(text: str) -> list[int]:
        spelled = narrow(text).replace("…", "...")
        words = ["\u2581" + word.replace(" ", "\u2582").replace("\n", "\u2583") for word in cut(spelled)]
        return [lines.index(piece) for word in words for piece in split(word)]

    def decode(ids: list[int]) -> str:
        text = "".join(lines[i] for i in ids).replace("\u2582", " ").replace("\u2583", "\n")
        return text.replace("\u2581", "")

    return encode, decode


def ant(folder: Path) -> tuple[Encode, Decode]:
    lines = lines_of(folder)
    texts = [{"</_>": " ", "</n>": "\n"}.get(line, line) for line in lines]
    split = longest(texts)

    def encode(text: str) -> list[int]:
        return [texts.index(piece) for word in cut(text) for piece in split(word)]

    return encode, lambda ids: "".join(texts[i] for i in ids)


def ant_plus(folder: Path) -> tuple[Encode, Decode]:
    """No words, and no piece in angle brackets but those for a space and a line end."""
    texts = [{"</_>": " ", "</n>": "\n"}.get(line, line) for line in lines_of(folder)]
    usable = sorted((t for t in texts if not re.fullmatch("<.*>", t)), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, usable)) + "|.", re.DOTALL)

    def encode(text: str) -> list[int]:
        found = pattern.findall(text)
        return [texts.index(part if part in usable else "<unk>") for part in found]

    return encode, lambda ids: "".join(texts[i] for i in ids)


def is_chinese(piece: str) -> bool:
    return re.search("[\u4e00-\u9fff]", piece) is not None or piece == "\u2582"


def cpm2_english(folder: Path) -> tuple[Encode, Decode]:
    """Within a word, pieces without Chinese characters are those with "##". Spaces between two pieces without
    Chinese characters are left out; decoding writes them."""
    lines = lines_of(folder)
    split = longest(lines)
    split_inner = longest([line.removeprefix("##") for line in lines if is_chinese(line) or line[:2] == "##"])

    def spell(word: str) -> list[str]:
        if len(word) > 200:
            return ["<unk>"]
        first = split(word)[0]
        length = 1 if first == "<unk>" else len(first)
        rest = split_inner(word[length:])
        names = [part if is_chinese(part) or part == "<unk>" else f"##{part}" for part in rest]
        return [first, *names]

    def encode(text: str) -> list[int]:
        words = [word.replace(" ", "\u2582").replace("\n", "\u2583") for word in cut(text)]
        pieces = [piece for word in words for piece in spell(word)]
        last = len(pieces) - 1
        kept = [
            piece
            for i, piece in enumerate(pieces)
            if not (
                piece == "\u2582"
                and 0 < i < last
                and not is_chinese(pieces[i - 1])
                and not is_chinese(pieces[i + 1])
            )
        ]
        return [lines.index(piece) for piece in kept]

    def decode(ids: list[int]) -> str:
        text, before = "", "\u2582"
        for piece in (lines[i] for i in ids):
            is_gap = not (is_chinese(before) or is_chinese(piece) or piece.startswith("##"))
            text += " " * is_gap + piece.removeprefix("##")
            before = piece
        return text.replace("\u2582", " ").replace("\u2583", "\n")

    return encode, decode
