"""Which Chinese form the tokenizer of a folder has, by the folder's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.cpm.chinese_form import (
    CPM1,
    CPM1_VOCABULARY,
    CPM2,
    CPM2_ENGLISH,
    CPM_ANT,
    CPM_ANT_PLUS,
    EVA,
    VOCABULARY,
    Form,
)
from penstock.errors import CheckpointNotFound, ConfigError

#: Names of CPM-1's sentencepiece model. chinese_vocab.model is the name in CPM-1's own repository.
MODEL_FILES = ("spiece.model", "chinese_vocab.model", "tokenizer.model")
#: What the names of tokenizer classes add to a form's name.
_CLASS_ENDINGS = ("fast", "tokenizer")
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
    from penstock.cpm.chinese_tokenizer import ChineseTokenizer  # this imports transformers

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
    # an absent file is no error; the reader that needs a broken file refuses it
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
