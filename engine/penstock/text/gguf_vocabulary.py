"""Vocabulary: the tokens of a GGUF file, what kind each is, and which of them end an answer. Where a file
says nothing, llama.cpp's rules hold, which read the tokens' names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from penstock.errors import CorruptFile
from penstock.gguf_file import Metadata

_PREFIX = "tokenizer.ggml."


class Kind(IntEnum):
    """What a token is (`tokenizer.ggml.token_type`)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


#: Names of tokens that end an answer in some model, and are text in none.
_END_NAMES = frozenset((
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
    "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<end_of_utterance>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
))  # fmt: skip
#: Names that are text in other models: they end an answer where the file calls them control tokens.
_END_NAMES_OF_CONTROLS = frozenset(("</s>", "<eos>"))
#: Names of tokens that tell a code model's files apart. An answer that goes on after one is another file.
_FILE_NAMES = frozenset((
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>",
    "<REPO>", "<reponame>", "<|file_sep|>",
))  # fmt: skip
#: Names of tokens around what a code model fills in.
_MIDDLE_NAMES = frozenset((
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>", "\u2581<PRE>",
    "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>", "\u2581<SUF>",
    "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>", "\u2581<MID>",
    "<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", "<|prefix|>", "<|suffix|>", "<|middle|>",
))  # fmt: skip
#: Where a model has all tokens of a row, "<|end|>" ends one of several messages of an answer, as in gpt-oss.
_MESSAGE_END = "<|end|>"
_HAVE_MESSAGES = (
    {"<|return|>", "<|call|>"},
    {"<|return|>", "<|calls|>"},
    {"<|flush|>", "<|call|>"},
    {"<|flush|>", "<|calls|>"},
)
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
#: transformers' names of special tokens, and the file's.
_SPECIAL_KEYS = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "sep_token": "seperator",
    "pad_token": "padding", "cls_token": "cls", "mask_token": "mask",
}  # fmt: skip


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of one file."""

    path: Path
    metadata: Metadata
    tokens: list[str]
    #: `Kind` of each token.
    kinds: list[int]

    @classmethod
    def of(cls, path: Path, metadata: Metadata) -> Vocabulary:
        """Raises CorruptFile for a vocabulary that is none."""
        tokens = _strings(path, metadata, "tokens")
        if not tokens:
            raise CorruptFile(f"{path} has no vocabulary ({_PREFIX}tokens): download the file again")
        tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens)]
        if len(set(tokens)) != len(tokens):
            twice = _first_again(tokens)
            raise CorruptFile(f"{path} has the token {twice!r} twice in its vocabulary; download it again")
        kinds = _numbers(path, metadata, "token_type", len(tokens)) or [Kind.NORMAL] * len(tokens)
        return cls(path, metadata, tokens, _corrected(tokens, kinds))

    def with_marked_spaces(self, mark: str) -> Vocabulary:
        """The same with `mark` for the spaces in tokens of the model's user, as all other tokens have it.
        Files have spaces there."""
        tokens = [
            token.replace(" ", mark) if kind == Kind.USER_DEFINED else token
            for token, kind in zip(self.tokens, self.kinds, strict=True)
        ]
        return replace(self, tokens=tokens)

    def get(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(_PREFIX + name, default)

    @property
    def model(self) -> str:
        """The kind of tokenizer: "gpt2" (byte-level), "llama" (sentencepiece), ..."""
        return str(self.get("model"))

    @property
    def ids(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens)}

    @property
    def scores(self) -> list[float]:
        """The score of each token. Raises CorruptFile."""
        return _numbers(self.path, self.metadata, "scores", len(self.tokens)) or [0.0] * len(self.tokens)

    @property
    def merges(self) -> list[tuple[str, str]]:
        """Pairs of tokens that become one, the first pairs first. Raises CorruptFile."""
        pairs = _strings(self.path, self.metadata, "merges")
        # A token may be a space itself.
        return [(pair[:cut], pair[cut + 1 :]) for pair in pairs if (cut := pair.find(" ", 1)) > 0]

    def special_tokens(self, defaults: Mapping[str, int]) -> dict[str, int]:
        """The special tokens by transformers' names. An id that the vocabulary does not have counts as
        absent."""
        found = {name: self.get(f"{key}_token_id", defaults.get(name)) for name, key in _SPECIAL_KEYS.items()}
        return {name: token_id for name, token_id in found.items() if _is_id(token_id, len(self.tokens))}

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The chat template; by name, where there are several."""
        plain = self.metadata.get("tokenizer.chat_template")
        named = {
            key.removeprefix("tokenizer.chat_template."): value
            for key, value in self.metadata.items()
            if key.startswith("tokenizer.chat_template.") and isinstance(value, str)
        }
        if not named:
            return plain if isinstance(plain, str) else None
        return ({"default": plain} if isinstance(plain, str) else {}) | named


def end_tokens(metadata: Metadata) -> list[int]:
    """The tokens that end an answer."""
    tokens = metadata.get(f"{_PREFIX}tokens")
    tokens = tokens if isinstance(tokens, list) else []
    kinds = metadata.get(f"{_PREFIX}token_type")
    kinds = kinds if isinstance(kinds, list) and len(kinds) >= len(tokens) else [Kind.NORMAL] * len(tokens)
    keyed = [metadata.get(f"{_PREFIX}{key}_token_id") for key in _END_KEYS]
    found = {token_id for token_id in keyed if isinstance(token_id, int) and token_id >= 0}
    for token_id, token in enumerate(tokens):
        is_control = token in _END_NAMES_OF_CONTROLS and kinds[token_id] == Kind.CONTROL
        if token in _END_NAMES or token in _FILE_NAMES or is_control:
            found.add(token_id)
    found = {token_id for token_id in found if token_id < len(tokens) or not tokens}
    names = {tokens[token_id]: token_id for token_id in found if tokens}
    if any(names.keys() >= row for row in _HAVE_MESSAGES):
        found.discard(names.get(_MESSAGE_END, -1))
    return sorted(found)


def _corrected(tokens: list[str], kinds: list[int]) -> list[int]:
    """Some files call control tokens normal ones, which would be cut into pieces."""
    controls = _END_NAMES | _FILE_NAMES | _MIDDLE_NAMES
    return [
        Kind.CONTROL if kind in (Kind.NORMAL, Kind.UNUSED) and token in controls else kind
        for token, kind in zip(tokens, kinds, strict=True)
    ]


def _first_again(tokens: list[str]) -> str:
    """The first token that was there before; one of them was."""
    seen = set[str]()
    for token in tokens:
        if token in seen:
            break
        seen.add(token)
    return token


def _is_id(value: object, size: int) -> bool:
    return isinstance(value, int) and 0 <= value < size


def _strings(path: Path, metadata: Metadata, name: str) -> list[str]:
    found = metadata.get(_PREFIX + name, [])
    if not isinstance(found, list) or not set(map(type, found)) <= {str}:
        raise CorruptFile(f"{path} has no list of texts as {_PREFIX}{name}; download it again")
    return found


def _numbers(path: Path, metadata: Metadata, name: str, count: int) -> list[Any]:
    found = metadata.get(_PREFIX + name, [])
    if not isinstance(found, list) or (found and len(found) < count):
        raise CorruptFile(f"{path} has no list of {count} numbers as {_PREFIX}{name}; download it again")
    if not set(map(type, found)) <= {int, float}:
        raise CorruptFile(f"{path} has something other than numbers in {_PREFIX}{name}; download it again")
    return found[:count]
