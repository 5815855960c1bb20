"""Tokenizer: strings <-> token ids, by a tokenizer of transformers or one with the same methods, from local
files alone."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from penstock.errors import CheckpointNotFound, ConfigError, CorruptFile, PenstockError, RequestError
from penstock.text.control_tokens import ControlTokens

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "*.tiktoken",
    "*.spm",
    "*.model",
)

#: What reads the tokenizer of a GGUF file: (file, guesses) -> tokenizer, eos_token_ids.
_GGUF = "penstock.text.gguf_tokenizer:read_gguf"

_SENTINELS = ("<s_{}>", "<extra_id_{}>", "\u2581<extra_id_{}>")
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """One model's tokenizer. Threads share the tokenizer without a lock, since it only reads what was loaded.
    With a lock, a long prompt would hold up the engine."""

    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int]) -> None:
        """`tokenizer` is a transformers tokenizer, or has the methods of one that are called here."""
        from penstock.text.foreign_rules import check_rules, unknown_rules

        self.backend = tokenizer
        self.vocab_size: int = len(tokenizer)
        # A vocabulary may have a piece twice; get_vocab() then has only one of the two ids.
        vocab = tokenizer.get_vocab()
        self._known_ids = frozenset(vocab.values()) | frozenset(range(tokenizer.vocab_size))
        #: Characters of the longest token, or more. A text of n characters has at least n / max_token_chars
        #: tokens, unless a normalizer drops most of the text.
        self.max_token_chars: int = max(map(len, vocab), default=1)
        #: Rules of the tokenizer that must be tried with each text, in a process that may be lost.
        self._unknown_rules: str | None = None
        if fast := getattr(tokenizer, "backend_tokenizer", None):
            check_rules(fast)
            self._unknown_rules = unknown_rules(fast)
            # The file's truncation and padding are not meant for prompts. transformers would turn them off
            # during encode(), which other threads would notice.
            fast.no_truncation()
            fast.no_padding()
        self.eos_token_ids = eos_token_ids
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.token_bytes = lru_cache(maxsize=65536)(self._token_bytes)

    @classmethod
    def load(cls, folder: Path, guesses: bool = False) -> Tokenizer:
        """The tokenizer of a folder or of a GGUF file (EngineConfig.guess_tokenizer says what `guesses` is).
        Raises CheckpointNotFound if the folder has no tokenizer, CorruptFile if the tokenizer can't be read,
        UnsupportedModel if a GGUF file has another kind of tokenizer, ConfigError if reading it needs a
        package that is not installed."""
        is_file = folder.is_file()
        if not is_file and not any(next(folder.glob(pattern), None) for pattern in TOKENIZER_FILES):
            raise CheckpointNotFound(_no_tokenizer(folder))
        try:
            if is_file:
                return cls(*resolve_name(_GGUF)(folder, guesses))
            tokenizer = _read_folder(folder)
        except PenstockError:
            raise
        except ImportError as error:
            raise ConfigError(
                f"the tokenizer in {folder} needs a package that is not installed: {error}"
            ) from error
        except Exception as error:  # transformers and its parsers raise many types; the files are at fault
            raise CorruptFile(f"the tokenizer in {folder} can't be loaded: {error}") from error
        return cls(tokenizer, _eos_token_ids(folder, tokenizer))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. add_special_tokens: add the tokens that the model wants around a prompt."""
        from penstock.text.foreign_rules import refused_texts

        self.try_rules(text)
        # verbose=True would warn of texts longer than the context. The engine checks the length itself.
        with refused_texts():
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return ids

    def try_rules(self, text: str) -> None:
        """Raises RequestError for a text with which the tokenizer's own rules take too much time or memory.
        Does nothing where the rules are known."""
        from penstock.text.text_process import TextLost, Trial, text_process

        if self._unknown_rules is None:
            return
        try:
            text_process().try_rules(Trial(self._unknown_rules, text))
        except TextLost:
            raise RequestError(
                "the model's tokenizer takes too much time or memory for this text: its tokenizer.json has "
                "patterns or replacements that do not end for it. Send another text"
            ) from None

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Token ids of two texts with the tokens that the model wants around and between them, and the place
        where the second text begins; 0 if the tokenizer does not say."""
        from penstock.text.foreign_rules import refused_texts

        self.try_rules(first)
        self.try_rules(second)
        with refused_texts():
            encoded = self.backend(first, second, return_token_type_ids=True, verbose=False)
        ids, types = list(encoded["input_ids"]), list(encoded["token_type_ids"])
        return ids, types.index(1) if 1 in types else 0

    def cut(self, text: str, num_tokens: int) -> list[int]:
        """encode(), with so many tokens at most: the end of the text is left out, and the tokens that the
        model wants around it stay."""
        whole, own = self.encode(text), self.encode(text, add_special_tokens=False)
        if len(whole) <= num_tokens:
            return whole
        places = range(len(whole) - len(own) + 1)
        start = next((place for place in places if whole[place : place + len(own)] == own), 0)
        end = start + len(own) - (len(whole) - num_tokens)
        return [*whole[:end], *whole[start + len(own) :]] if end > start else whole[:num_tokens]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Bytes that are not UTF-8 become U+FFFD. Spaces stay as they are. Ids that the
        tokenizer does not have give no text: models pad their vocabulary."""
        known = [token_id for token_id in token_ids if token_id in self._known_ids]
        try:  # each token of each sequence comes here
            text: str = self.backend.decode(
                known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        except BaseException as error:  # an error here would end the engine
            from penstock.text.foreign_rules import is_about_a_text

            if not is_about_a_text(error):
                raise
            skipped = self.special_token_ids if skip_special_tokens else frozenset()
            pieces = [self.token_bytes(token_id) for token_id in known if token_id not in skipped]
            text = b"".join(pieces).decode("utf-8", errors="replace")
        return text

    @property
    def has_chat_template(self) -> bool:
        return bool(self.backend.chat_template)

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Tokens as the vocabulary spells them, such as "\u0120the"; "" for unknown ids."""
        return [
            self.backend.convert_ids_to_tokens(token_id) or "" if token_id in self._known_ids else ""
            for token_id in token_ids
        ]

    @cached_property
    def tool_template(self) -> str:
        """The source of the chat template that is used for messages with tools. "" if the model has none."""
        template = self.backend.chat_template or ""
        if isinstance(template, dict):
            template = template.get("tool_use", template.get("default", ""))
        return str(template)

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """The tokens that the chat template may write, and messages may not."""
        template = self.backend.chat_template or ""
        return ControlTokens(self, json.dumps(template, ensure_ascii=False))

    def token_text(self, token_id: int) -> str:
        """The text of one token alone. A part of a character becomes U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def _token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token's text (a special token's name; nothing for an unknown id).

        An added token is spelled like any other token, as in decode(): Gemma's "\u2581\u2581" is two
        spaces."""
        if token_id not in self._known_ids:
            return b""
        if own_text := getattr(self.backend, "token_text", None):
            return str(own_text(token_id)).encode()
        piece = self.backend.convert_ids_to_tokens(token_id)
        if piece is None:  # a gap in the vocabulary
            return b""
        if isinstance(piece, bytes):  # tiktoken-style
            return piece
        if not self._is_byte_level:
            return piece_bytes(piece)
        if all(character in _BYTE_OF_CHARACTER for character in piece):
            return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
        return str(piece).encode()  # an added token with other characters

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that decode() skips."""
        added: dict[int, Any] = getattr(self.backend, "added_tokens_decoder", {})
        special = {token_id for token_id, token in added.items() if token.special}
        return frozenset(special.union(self.backend.all_special_ids))

    @cached_property
    def sentinels(self) -> tuple[int, ...]:
        """The tokens that stand for the blanks of a text, in order: `<s_0>` and so on in the CPM models,
        `<extra_id_0>` in T5. mT5 has them as ordinary pieces, with the mark of a space in front."""
        vocab, ids = self.backend.get_vocab(), list[int]()
        name = next((name for name in _SENTINELS if name.format(0) in vocab), _SENTINELS[0])
        while (token_id := vocab.get(name.format(len(ids)))) is not None:
            ids.append(token_id)
        return tuple(ids)

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether pieces are spelled with the characters that stand for bytes in GPT-2's vocabulary."""
        fast = getattr(self.backend, "backend_tokenizer", None)
        if fast is None:
            return bool(getattr(self.backend, "byte_decoder", None))
        return '"ByteLevel"' in json.dumps(json.loads(fast.to_str()).get("decoder"))


def piece_bytes(piece: str) -> bytes:
    """The bytes of a text that a sentencepiece piece spells: "<0xE4>" is one byte, U+2581 a space."""
    if match := _BYTE_PIECE.fullmatch(piece):
        return bytes.fromhex(match[1])
    return piece.replace("\u2581", " ").encode()


def _no_tokenizer(folder: Path) -> str:
    if (folder / "tekken.json").is_file():
        return (
            f"the tokenizer in {folder} is tekken.json alone, the format of Mistral's mistral-common, "
            "which is not read here. Copy tokenizer.json and tokenizer_config.json of the model's repository "
            "on Hugging Face into the folder"
        )
    if model := next(folder.glob("tokenizer.model.v*"), None):
        return (
            f"the tokenizer in {folder} is {model.name} alone, a sentencepiece model under a name of "
            "Mistral's: rename it to tokenizer.model"
        )
    return (
        f"{folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there. Copy the tokenizer files "
        "of the original repository into it"
    )


class NoText(Tokenizer):
    """A tokenizer for engines that only need token ids: every text is empty, and no token ends an answer."""

    def __init__(self) -> None:
        self.eos_token_ids = frozenset()
        self.token_bytes = lru_cache(self._token_bytes)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return []

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""

    def _token_bytes(self, token_id: int) -> bytes:
        return b""


def _byte_stand_ins() -> dict[str, int]:
    """Character -> byte in GPT-2's spelling. Printable Latin-1 characters stand for their own byte; the
    characters from U+0100 on stand for the other bytes, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {chr(byte): byte for byte in printable}
    return stand_ins | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_stand_ins()


#: What reads the tokenizers of folders, asked in this order: folder -> tokenizer, or None for one of another
#: form. A module is imported when it is asked.
_FORMS = (
    "penstock.text.file_tokenizer:read_file_tokenizer",
    "penstock.cpm.chinese_folder:read_chinese",
    "penstock.text.sentencepiece_tokenizer:read_sentencepiece",
    "penstock.text.auto_tokenizer:read_auto_tokenizer",
)


def _read_folder(folder: Path) -> Any:
    return next(found for form in _FORMS if (found := resolve_name(form)(folder)) is not None)


def _eos_token_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer: all that config.json, generation_config.json and the tokenizer name. A
    fine-tune often has its own end token in one of them alone. Where the tokenizer is sure of the model's end
    token (`is_end_certain`), a file without this token is wrong."""
    own = frozenset(() if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])
    named = [_named_ends(folder / name) for name in ("generation_config.json", "config.json")]
    is_certain = getattr(tokenizer, "is_end_certain", False)
    return own.union(*(ends for ends in named if own <= ends or not is_certain))


def _named_ends(path: Path) -> frozenset[int]:
    """The end tokens that a file names, for the whole model or for its text part. Raises CorruptFile."""
    if not path.is_file():
        return frozenset()
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        named = [config.get("eos_token_id"), (config.get("text_config") or {}).get("eos_token_id")]
    except (ValueError, AttributeError, RecursionError) as error:
        raise CorruptFile(
            f"{path} is not a JSON object ({error}): copy or download the file again"
        ) from error
    ids = [token_id for ends in named for token_id in (ends if isinstance(ends, list) else [ends])]
    ids = [token_id for token_id in ids if token_id is not None]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise CorruptFile(f"{path}: eos_token_id is {ids}; it must be one token id or a list of them")
    return frozenset(ids)
