"""Form: the rules of one original tokenizer of the CPM models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

VOCABULARY = "vocab.txt"


def _half_width(kept: str = "") -> dict[int, str]:
    """Unicode has the ASCII characters in full width from U+FF01 on, and a full-width space at U+3000."""
    table = {0xFEE0 + code: chr(code) for code in range(0x20, 0x7F)} | {0x3000: " "}
    return {code: half for code, half in table.items() if chr(code) not in kept}


#: EVA keeps letters, digits, spaces and the full stop in full width.
_EVA_PUNCTUATION = {
    code: half for code, half in _half_width("．").items() if half != " " and not half.isalnum()
}


@dataclass(frozen=True)
class Form:
    """Rules of a tokenizer. Characters are translated, jieba cuts the text into words, and each word becomes
    the longest pieces of the vocabulary. Without words, the whole text becomes the longest pieces."""

    name: str
    #: The token that ends an answer, whatever the folder's config files say: transformers' classes fill in
    #: the end tokens of other models.
    end: str = "<eod>"
    #: The token in front of a prompt.
    start: str | None = None
    has_words: bool = True
    #: The pieces that stand for a space and for a line end.
    marks: Mapping[str, str] = field(default_factory=lambda: {" ": "\u2582", "\n": "\u2583"})
    #: Character -> what is encoded in its place.
    replaced: Mapping[int, str] = field(default_factory=dict)
    #: What stands in front of each word. Decoding drops it.
    word_mark: str = ""
    #: What pieces begin with that continue a word without Chinese characters. A space between two such
    #: words has no token, and decoding writes the space.
    continuation: str = ""
    #: Whether a prompt loses characters that the vocabulary does not have.
    drops_unknown: bool = False
    #: How the model is asked: by a text that it continues, by a text with sentinel tokens in place of what is
    #: missing, or by what two people have said to each other.
    asked_by: Literal["text", "sentinels", "dialogue"] = "text"


#: CPM-1 has a sentencepiece model, with U+2581 in front of each word.
CPM1 = Form("CPM-1", word_mark="\u2581")
#: BMInf has CPM-1's pieces in a vocab.txt, and takes the longest pieces.
CPM1_VOCABULARY = Form("CPM-1 of BMInf", word_mark="\u2581", replaced=_half_width() | {ord("…"): "..."})
CPM2 = Form("CPM-2", replaced=_half_width("，！（）？；："), asked_by="sentinels")
CPM2_ENGLISH = Form("CPM-2 for Chinese and English", continuation="##", asked_by="sentinels")
EVA = Form(
    "EVA",
    end="<sep>",
    replaced=_EVA_PUNCTUATION | dict.fromkeys(map(ord, "“”‟〝〞"), '"') | dict.fromkeys(map(ord, "‘’‛"), "'")
    | {ord("…"): "..."},
    asked_by="dialogue",
)  # fmt: skip
CPM_ANT = Form("CPM-Ant", end="</s>", start="<s>", marks={" ": "</_>", "\n": "</n>"}, drops_unknown=True)
#: CPM-Bee reads a text so as well.
CPM_ANT_PLUS = replace(CPM_ANT, name="CPM-Ant+", has_words=False)
