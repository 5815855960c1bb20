"""Foreign rules: what a tokenizer file does to a text before its vocabulary is asked, by normalizers and by
patterns that split. A file may bring a pattern that takes hours for some texts, or a replacement that makes a
text a million times as long. Rules that are not known to be harmless are tried in a process that may be lost,
before the program itself follows them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.errors import CorruptFile, PenstockError, RequestError
from penstock.text.word_splits import WORD_RULES

#: WordPiece takes time by the square of a word's length. Published files have 100 or 200 characters.
_MAX_WORD = 10_000
#: Bytes that sentencepiece's table puts in place of a character. Unicode's longest such text has 33. No more
#: characters are put before each part of a text.
_MAX_REPLACEMENT = 64
#: Steps that make a text longer, once. A second one of the kind may do so with what the first one wrote.
_LENGTHENING = frozenset(
    ("BertNormalizer", "ByteLevel", "Lowercase", "Metaspace", "NFC", "NFD", "NFKC", "NFKD", "Precompiled")
)
#: Patterns that take linear time: those of the models that word_splits.py knows, and three that files of
#: GPT-2, GPT-4 and DeepSeek spell in another way.
_KNOWN = frozenset(split for rules in WORD_RULES.values() for split in rules.splits) | {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
}


def unknown_rules(tokenizer: Any) -> str | None:
    """The rules of a tokenizer of the package tokenizers, as JSON, if they must be tried with each text."""
    rules = {name: _state(getattr(tokenizer, name)) for name in ("normalizer", "pre_tokenizer")}
    is_known = all(pattern in _KNOWN for pattern in _patterns(rules))
    return None if is_known and not any(_growing(rules)) and not _repeats(rules) else json.dumps(rules)


def check_rules(tokenizer: Any) -> None:
    """Raises CorruptFile for rules that no published tokenizer has and that could take any time or memory: of
    the decoder, which the engine asks with each token, of WordPiece, and of what is put before each part of a
    text, of which a trial sees one."""
    if (most := getattr(tokenizer.model, "max_input_chars_per_word", 0)) > _MAX_WORD:
        raise CorruptFile(
            f"tokenizer.json: max_input_chars_per_word is {most}; at most {_MAX_WORD} are taken"
        )
    num_prepended = sum(len(each.get("prepend", "")) for each in _objects(_state(tokenizer.normalizer)))
    if num_prepended > _MAX_REPLACEMENT:
        raise CorruptFile(
            f"tokenizer.json: the normalizer prepends {num_prepended} characters; at most {_MAX_REPLACEMENT} "
            "are taken"
        )
    decoder = _state(tokenizer.decoder)
    if pattern := next(_patterns(decoder), None):
        raise CorruptFile(
            f"tokenizer.json: the decoder has the regular expression {pattern!r}, which is not run"
        )
    if content := next(_growing(decoder), None):
        raise CorruptFile(f"tokenizer.json: the decoder makes texts longer, by {content[:40]!r}")


def _state(part: Any) -> Any:
    """A part of a tokenizer, as tokenizer.json has it."""
    return None if part is None else json.loads(part.__getstate__())


def _patterns(rules: Any) -> Iterator[str]:
    for each in _objects(rules):
        if isinstance(pattern := each.get("Regex"), str):
            yield pattern


def _growing(rules: Any) -> Iterator[str]:
    """The replacements that are longer than what they replace. A pattern may match the empty text."""
    for each in _objects(rules):
        content, pattern = each.get("content"), each.get("pattern")
        if isinstance(content, str) and isinstance(pattern, dict):
            yield from [content] if len(content) > len(pattern.get("String", "")) else []
        if isinstance(table := each.get("precompiled_charsmap"), str):
            raw = base64.b64decode(table)
            replacements = raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")
            yield from (
                each.decode(errors="replace") for each in replacements if len(each) > _MAX_REPLACEMENT
            )


def _repeats(rules: Any) -> bool:
    """Whether a step that makes a text longer stands there twice."""
    kinds = [kind for each in _objects(rules) if (kind := each.get("type")) in _LENGTHENING]
    return len(kinds) != len(set(kinds))


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(each)


@contextmanager
def refused_texts() -> Iterator[None]:
    """Raises RequestError for what a tokenizer raises over a text."""
    try:
        yield
    except PenstockError:
        raise
    except BaseException as error:
        if not is_about_a_text(error):
            raise
        raise RequestError(f"the model's tokenizer can't read this text: {error}") from error


def is_about_a_text(error: BaseException) -> bool:
    """Whether a tokenizer raised this over a text. A panic of the package tokenizers is no Exception."""
    is_known = isinstance(error, Exception) or type(error).__name__ == "PanicException"
    return is_known and not isinstance(error, MemoryError)
