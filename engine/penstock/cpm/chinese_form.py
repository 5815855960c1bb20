"""Form: the rules of one original tokenizer of the CPM models, and how a folder says which form it has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from penstock.errors import CheckpointNotFound, ConfigError

VOCABULARY = "vocab.txt"
#: Names of CPM-1's sentencepiece model. chinese_vocab.model is the name in CPM-1's own repository.
MODEL_FILES = ("spiece.model", "chinese_vocab.model", "tokenizer.model")
#: What the names of tokenizer classes add to a form's name.
_CLASS_ENDINGS = ("fast", "tokenizer")


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

#: Names of forms in lower case: a model_type or an architecture of config.json, or a tokenizer_class.
_FORMS = {
    "cpm": CPM1, "cpm1": CPM1,
    "cpm2": CPM2,
    "eva": EVA, "evamodel": EVA,
    "cpmantplus": CPM_ANT_PLUS,
    "cpmant": CPM_ANT, "cpmantforcausallm": CPM_ANT,
}  # fmt: skip
_TOKENIZER_CLASSES = (
    "CpmTokenizer (CPM-1), CPM2Tokenizer, EVATokenizer, CpmAntTokenizer or CPMAntPlusTokenizer"
)


def read_chinese(folder: Path) -> Any:
    """The tokenizer of a folder; None for those of other models. Raises ConfigError, CheckpointNotFound and
    CorruptFile."""
    if (found := find_form(folder)) is None:
        return None
    from penstock.cpm.chinese_tokenizer import ChineseTokenizer

    form, file = found
    return ChineseTokenizer.from_pretrained(folder, vocab_file=str(file), form=form, local_files_only=True)


def find_form(folder: Path) -> tuple[Form, Path] | None:
    """The form of a folder's tokenizer, and the file that has the vocabulary. None for the tokenizers of
    other models.

    config.json decides by model_type and architectures, then tokenizer_config.json by tokenizer_class (EVA's
    folders name CpmTokenizerFast). Where neither names a form, the pieces of a sentencepiece model tell
    CPM-1, and a vocab.txt without another tokenizer is refused: nothing tells which form the file has.
    Raises ConfigError, CheckpointNotFound."""
    form = _named_form(folder)
    if form is None and not (folder / "tokenizer.json").is_file():
        form = CPM1 if _cpm1_model(folder) else None
    if form is not None:
        return _with_file(form, folder)
    if (folder / VOCABULARY).is_file() and not _has_other_tokenizer(folder):
        raise ConfigError(
            f"the tokenizer in {folder} is {VOCABULARY} alone, and nothing says for which model. Write "
            f'{{"tokenizer_class": "..."}} into tokenizer_config.json, with {_TOKENIZER_CLASSES}; '
            f"for other models, put a tokenizer.json beside {VOCABULARY}"
        )
    return None


def _named_form(folder: Path) -> Form | None:
    config, tokenizer_config = (_read(folder / name) for name in ("config.json", "tokenizer_config.json"))
    architectures = config.get("architectures")
    names = [config.get("model_type"), *(architectures if isinstance(architectures, list) else ())]
    for source in (tokenizer_config, config):
        names.append(_without_endings(source.get("tokenizer_class")))
    forms = [form for name in names if (form := _FORMS.get(str(name).lower()))]
    # The model CPM-Ant+ is a CPM-Ant: the class of the tokenizer alone tells it.
    return CPM_ANT_PLUS if CPM_ANT_PLUS in forms else next(iter(forms), None)


def _without_endings(kind: object) -> str:
    name = str(kind).lower()
    for ending in _CLASS_ENDINGS:
        name = name.removesuffix(ending)
    return name


def _with_file(form: Form, folder: Path) -> tuple[Form, Path]:
    names = (*MODEL_FILES, VOCABULARY) if form is CPM1 else (VOCABULARY,)
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        raise CheckpointNotFound(
            f"{folder} has the tokenizer of {form.name}, and the file {' or '.join(names)} is missing: "
            "copy it from the model's repository into the folder"
        )
    if form is CPM1 and file.name == VOCABULARY:
        return CPM1_VOCABULARY, file
    return CPM2_ENGLISH if form is CPM2 and _has_continuations(file) else form, file


def _has_continuations(vocabulary: Path) -> bool:
    """CPM-2's vocabulary for Chinese and English has thousands of such pieces, the Chinese one has none."""
    return f"\n{CPM2_ENGLISH.continuation}" in vocabulary.read_text(encoding="utf-8", errors="replace")


def _cpm1_model(folder: Path) -> bool:
    """Whether the folder has a sentencepiece model with CPM-1's own pieces."""
    file = next((folder / name for name in MODEL_FILES if (folder / name).is_file()), None)
    if file is None:
        return False
    from penstock.text.sentencepiece_tokenizer import read_proto

    proto = read_proto(file)
    return proto is not None and {CPM1.end, *CPM1.marks.values()} <= {piece.piece for piece in proto.pieces}


def _has_other_tokenizer(folder: Path) -> bool:
    patterns = ("tokenizer.json", "vocab.json", "*.model", "*.tiktoken", "*.spm")
    return any(next(folder.glob(pattern), None) for pattern in patterns)


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # an absent file is no error; whoever needs a broken file refuses it
        return {}
    return content if isinstance(content, dict) else {}
