"""SentencePieceTokenizer: a sentencepiece model without a tokenizer.json, read by the sentencepiece package.

transformers would translate such a model into rules of its own, which leave out the model's normalizer, its
dummy prefix or its scores. Here the package encodes every text, so that the tokens are the model's.
transformers still reads what the files beside the model say: added tokens, special tokens, chat templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from transformers import AddedToken, PreTrainedTokenizer
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from penstock.errors import ConfigError, CorruptFile
from penstock.text.tokenizer import piece_bytes

#: Names under which a sentencepiece model lies in a folder.
MODEL_FILES = ("tokenizer.model", "spiece.model")
#: transformers' classes that add only begin and end tokens to a sentencepiece model. Other classes (T5's,
#: CPM's) give its pieces other ids or its text another spelling.
_PLAIN_CLASSES = (
    "LlamaTokenizer",
    "CodeLlamaTokenizer",
    "GemmaTokenizer",
    "MistralCommonBackend",
    "PreTrainedTokenizer",
    "PythonBackend",
    "SentencePieceBackend",
    "TokenizersBackend",
)
_WHITE_SPACE = re.compile(r"\s*")
_SPACE = "\u2581"


def find_model(folder: Path) -> Path | None:
    """The sentencepiece model that is a folder's only tokenizer. None where there is another tokenizer, or
    where transformers has a class for the model that does more than the model says. Raises ConfigError."""
    if any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        return None
    found = next((folder / name for name in MODEL_FILES if (folder / name).is_file()), None)
    is_model = found is not None and read_proto(found) is not None
    return found if is_model and _is_plain(folder) else None


class SentencePieceTokenizer(PreTrainedTokenizer):
    """A transformers tokenizer with the methods that Tokenizer calls.

    Control pieces ("<s>", "[INST]") and added tokens that stand in a text become these tokens, as with a
    tokenizer.json. Each text between them is encoded by itself, so the text begins with the dummy prefix if
    the model has one. Where tokenizer_config.json says `"legacy": false`, only the beginning of the whole
    text has the prefix.
    """

    def __init__(
        self,
        vocab_file: str,
        add_bos_token: bool | None = None,
        add_eos_token: bool | None = None,
        legacy: bool | None = None,
        add_prefix_space: bool | None = None,
        **kwargs: Any,
    ) -> None:
        proto = read_proto(Path(vocab_file))
        if proto is None:
            raise CorruptFile(
                f"{vocab_file} is not a sentencepiece model; it may be damaged: copy or download it again"
            )
        self._read_pieces(proto.pieces)
        self._make_processors(proto, add_prefix_space is not False, legacy is not False)
        special_tokens = self._own_special_tokens() | kwargs
        super().__init__(vocab_file=vocab_file, **special_tokens)  # type: ignore[no-untyped-call]
        self._added_ids = self.get_added_vocab()
        self._special_ids = frozenset(self.all_special_ids).union(
            token_id for token_id, token in self._added_tokens_decoder.items() if token.special
        )
        self._added = self._added_pattern(
            {token.content: token for token in self._added_tokens_decoder.values()}
        )
        has_bos = self.bos_token_id is not None and add_bos_token is not False
        self._before = [self.bos_token_id] if has_bos else []
        self._after = [self.eos_token_id] if add_eos_token else []

    def _read_pieces(self, pieces: Any) -> None:
        self._pieces = [piece.piece for piece in pieces]
        self._ids = {piece: token_id for token_id, piece in enumerate(self._pieces)}
        self._user_defined = {piece.piece for piece in pieces if piece.type == piece.USER_DEFINED}
        self._added_tokens_decoder = {
            token_id: AddedToken(piece.piece, special=True, normalized=False)
            for token_id, piece in enumerate(pieces)
            if piece.type == piece.CONTROL
        }

    def _make_processors(self, proto: Any, has_prefix: bool, has_prefix_everywhere: bool) -> None:
        """`_first` encodes a text's beginning, `_next` the text after an added token, `_inside` the rest of
        a text that is cut."""
        normalizer = proto.normalizer_spec
        normalizer.add_dummy_prefix &= has_prefix
        self._drops_first_space = normalizer.add_dummy_prefix or normalizer.remove_extra_whitespaces
        self._first = SentencePieceProcessor(model_proto=proto.SerializeToString())
        normalizer.add_dummy_prefix &= has_prefix_everywhere
        self._next = SentencePieceProcessor(model_proto=proto.SerializeToString())
        normalizer.add_dummy_prefix = False
        self._inside = SentencePieceProcessor(model_proto=proto.SerializeToString())

    def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
        ids = self._encode(text, self._added, self._added_ids)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def encode_renamed(self, text: str, names: Mapping[str, int], cut: str) -> list[int]:
        """Token ids of a text in which control tokens have other `names` (see control_tokens.py) and are
        ordinary text by their own. A control token is ~id. At `cut`, which is dropped, no token goes on."""
        controls = frozenset(names.values())
        others = {name: token_id for name, token_id in self._added_ids.items() if token_id not in controls}
        contents = {name: self._added_tokens_decoder[token_id] for name, token_id in others.items()}
        contents |= {name: self._added_tokens_decoder[token_id] for name, token_id in names.items()}
        return self._encode(text, self._added_pattern(contents), others | dict(names), cut, names)

    def _encode(
        self,
        text: str,
        added: re.Pattern[str],
        added_ids: Mapping[str, int],
        cut: str = "",
        renamed: Collection[str] = (),
    ) -> list[int]:
        ids: list[int] = []
        end = 0
        while match := added.search(text, end):
            token_id = added_ids[match[0]]
            token = self._added_tokens_decoder[token_id]
            before = text[end : match.start()]
            ids += self._encode_between(before.rstrip() if token.lstrip else before, end == 0, cut)
            ids.append(~token_id if match[0] in renamed else token_id)
            end = match.end()
            if token.rstrip:
                end = _WHITE_SPACE.match(text, end).end()  # type: ignore[union-attr]  # it matches ""
        return ids + self._encode_between(text[end:], end == 0, cut)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        """Bytes that are not UTF-8 become U+FFFD. The space that the dummy prefix made is dropped."""
        pieces = [
            self.convert_ids_to_tokens(token_id)
            for token_id in token_ids
            if not (skip_special_tokens and token_id in self._special_ids)
        ]
        if self._drops_first_space and pieces and pieces[0].startswith(_SPACE):
            pieces[0] = pieces[0][1:]
        return b"".join(map(piece_bytes, pieces)).decode("utf-8", errors="replace")

    def _encode_between(self, text: str, is_first: bool, cut: str) -> list[int]:
        first, *others = text.split(cut) if cut else [text]
        ids: list[int] = (self._first if is_first else self._next).encode(first)
        for piece in others:
            ids += self._inside.encode(piece)
        return ids

    def _own_special_tokens(self) -> dict[str, Any]:
        ids = {
            "unk_token": self._first.unk_id(),
            "bos_token": self._first.bos_id(),
            "eos_token": self._first.eos_id(),
        }
        return {name: self._pieces[token_id] for name, token_id in ids.items() if token_id >= 0}

    def _added_pattern(self, tokens: Mapping[str, Any]) -> re.Pattern[str]:
        """A pattern that finds the added token that begins first, and the longest if several begin there.
        tokens: how a text names the tokens. The model's user-defined pieces are left out: the model itself
        finds them, even where a space belongs to them."""
        contents = {
            name: token
            for name, token in tokens.items()
            if token.special or name != token.content or name not in self._user_defined
        }
        longest_first = sorted(contents, key=len, reverse=True)
        words = [
            rf"(?<!\w){re.escape(content)}(?!\w)" if contents[content].single_word else re.escape(content)
            for content in longest_first
        ]
        return re.compile("|".join(words) or r"(?!)")

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def get_vocab(self) -> dict[str, int]:
        renamed = {self._pieces[i] for i in self._added_tokens_decoder if i < len(self._pieces)}
        return {p: i for p, i in self._ids.items() if p not in renamed} | self._added_tokens_encoder

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids.get(token, self._first.unk_id())

    def _convert_id_to_token(self, index: int) -> str:
        piece: str = self._pieces[index]
        return piece


def read_sentencepiece(folder: Path) -> SentencePieceTokenizer | None:
    """The tokenizer of a folder with a sentencepiece model alone; None for another folder. Raises
    ConfigError."""
    if (model := find_model(folder)) is None:
        return None
    made: SentencePieceTokenizer = SentencePieceTokenizer.from_pretrained(
        folder, vocab_file=str(model), local_files_only=True
    )
    return made


def read_proto(file: Path) -> Any:
    """A model file's content. None for a file of another format, such as tiktoken's."""
    proto: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made at import
    try:
        proto.ParseFromString(file.read_bytes())
    except DecodeError:
        return None
    return proto if proto.pieces and proto.HasField("trainer_spec") else None


def _is_plain(folder: Path) -> bool:
    """Whether the folder names no tokenizer class, or a class that adds nothing to the model. Raises
    ConfigError for a class whose code lies in the folder."""
    kind, has_code = _tokenizer_class(folder)
    if kind is None or kind in _PLAIN_CLASSES:
        return True
    is_known = tokenizer_class_from_name(kind) is not None
    if has_code and not is_known:
        raise ConfigError(
            f"the tokenizer in {folder} is a {kind}, Python code of the model's repository, which is not "
            "run: put a tokenizer.json of the same model into the folder"
        )
    return not is_known


def _tokenizer_class(folder: Path) -> tuple[str | None, bool]:
    """The name of the tokenizer class, without "Fast", and whether its code lies in the folder."""
    for name in ("tokenizer_config.json", "config.json"):
        try:
            config = json.loads((folder / name).read_text(encoding="utf-8"))
        # an absent file is no error; the reader that needs a broken file refuses it
        except (OSError, ValueError):
            continue
        if isinstance(config, dict) and isinstance(kind := config.get("tokenizer_class"), str):
            return kind.removesuffix("Fast"), "AutoTokenizer" in (config.get("auto_map") or ())
    return None, False
