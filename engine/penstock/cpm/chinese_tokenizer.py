"""ChineseTokenizer: the tokenizers of CPM-1, CPM-2, EVA and CPM-Ant, which encode Chinese words, and that of
CPM-Ant+, which knows no words.

transformers' own classes for these models give other tokens than those that the models were trained with.
A special token's name in a text is ordinary text here, as in the originals: jieba cuts the name apart.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor
from transformers import AddedToken, PreTrainedTokenizer

from penstock.cpm.chinese_form import VOCABULARY, Form
from penstock.cpm.dialogue import encode_dialogue
from penstock.cpm.longest_match import LongestMatch, has_chinese
from penstock.cpm.segmentation import load_segmenter
from penstock.errors import CorruptFile
from penstock.text.sentencepiece_tokenizer import read_proto

UNKNOWN = "<unk>"
#: "<eod>", "</s>", "<s_0>", and "<s12>" of CPM-Ant. No vocabulary has other pieces of this shape.
_SPECIAL = re.compile(r"</?\w+>")


class ChineseTokenizer(PreTrainedTokenizer):
    """A transformers tokenizer with the methods that Tokenizer calls.

    Of tokenizer_config.json only the chat template counts. The vocabulary has all special tokens; the files
    that transformers' CpmTokenizer writes have an end token and added tokens that are wrong for CPM-1.
    """

    #: Config files often have the end token of another model.
    is_end_certain = True

    def __init__(self, vocab_file: str, form: Form, chat_template: Any = None, **_: Any) -> None:
        pieces, self._write = _read_vocabulary(Path(vocab_file), form)
        #: PromptForms knows by the form how the model is asked.
        self.form = form
        #: Writes a conversation, for a model without a template (chat.py).
        self.encode_dialogue = (
            functools.partial(encode_dialogue, self) if form.asked_by == "dialogue" else None
        )
        self._segment = load_segmenter() if form.has_words else lambda text: iter((text,))
        self._marks = str.maketrans(dict(form.marks) if form.has_words else {})
        self._pieces = pieces
        self._ids = {piece: token_id for token_id, piece in enumerate(pieces)}
        specials = {self._ids[piece]: piece for piece in pieces if _is_special(piece, form)}
        self._special_ids = frozenset(specials)
        self._texts = [
            piece if token_id in specials else _text_of(piece, form) for token_id, piece in enumerate(pieces)
        ]
        #: Tokens without Chinese characters. Decoding writes a space between two of them.
        self._is_apart = [
            bool(form.continuation) and piece != form.marks[" "] and not has_chinese(piece)
            for piece in pieces
        ]
        self._added_tokens_decoder = {
            token_id: AddedToken(piece, special=True, normalized=False)
            for token_id, piece in specials.items()
        }
        super().__init__(  # type: ignore[no-untyped-call]
            vocab_file=vocab_file,
            chat_template=chat_template,
            unk_token=UNKNOWN,
            eos_token=form.end,
            bos_token=form.start,
        )

    def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
        words = self._segment(text.translate(self.form.replaced))
        ids = self._without_gaps(self._write(word.translate(self._marks) for word in words))
        if not add_special_tokens:
            return ids
        if self.form.drops_unknown:
            unknown = self._ids[UNKNOWN]
            ids = [token_id for token_id in ids if token_id != unknown]
        return ids if self.form.start is None else [self._ids[self.form.start], *ids]

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        text, before = "", None
        for token_id in token_ids:
            if skip_special_tokens and token_id in self._special_ids:
                continue
            if before is not None and self._has_gap(before, token_id):
                text += " "
            text += self._texts[token_id]
            before = token_id
        return text

    def token_text(self, token_id: int) -> str:
        """The text of a token alone. Texts of tokens make a decoded text, except for gaps."""
        return self._texts[token_id]

    def _without_gaps(self, ids: list[int]) -> list[int]:
        """Tokens without the spaces that decoding writes by itself."""
        if not self.form.continuation:
            return ids
        space = self._ids[self.form.marks[" "]]
        inner = zip(ids, ids[1:], ids[2:], strict=False)
        kept = [token_id for before, token_id, after in inner
                if token_id != space or not (self._is_apart[before] and self._is_apart[after])]  # fmt: skip
        return [*ids[:1], *kept, *ids[1:][-1:]]

    def _has_gap(self, before: int, token_id: int) -> bool:
        if not (self._is_apart[before] and self._is_apart[token_id]):
            return False
        return not self._pieces[token_id].startswith(self.form.continuation)

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def get_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids.get(token, self._ids[UNKNOWN])

    def _convert_id_to_token(self, index: int) -> str:
        return self._pieces[index]


Write = Callable[[Iterable[str]], list[int]]


def _read_vocabulary(file: Path, form: Form) -> tuple[list[str], Write]:
    """The pieces of a vocabulary in the order of their ids, and the function that turns words into ids.
    Raises CorruptFile."""
    pieces, write = (_read_text if file.name == VOCABULARY else _read_sentencepiece)(file, form)
    if missing := {UNKNOWN, form.end, *form.marks.values()}.difference(pieces):
        raise CorruptFile(
            f"{file} lacks {', '.join(sorted(missing))}, so the file is not the vocabulary of {form.name}: "
            "copy or download the file again, or correct tokenizer_class in tokenizer_config.json"
        )
    return pieces, write


def _read_text(file: Path, form: Form) -> tuple[list[str], Write]:
    """One piece in each line. An empty line counts: EVA's vocabulary has one."""
    pieces = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    ids = {piece: token_id for token_id, piece in enumerate(pieces)}
    unknown = ids.get(UNKNOWN, 0)
    if not form.has_words:
        return pieces, LongestMatch(_ordinary(ids, form), unknown, max_word_chars=None).encode
    match = LongestMatch(ids, unknown, form.continuation)
    return pieces, lambda words: match.encode(form.word_mark + word for word in words)


def _ordinary(ids: Mapping[str, int], form: Form) -> dict[str, int]:
    """The pieces that a text may have, if nothing cuts the names of special tokens apart: spaces and line
    ends in place of their marks, and no piece in angle brackets."""
    found = {piece: each for piece, each in ids.items() if not (piece[:1] == "<" and piece[-1:] == ">")}
    return found | {text: ids[mark] for text, mark in form.marks.items() if mark in ids}


def _read_sentencepiece(file: Path, form: Form) -> tuple[list[str], Write]:
    proto = read_proto(file)
    if proto is None:
        raise CorruptFile(
            f"{file} is not a sentencepiece model; it may be damaged: copy or download it again"
        )
    processor = SentencePieceProcessor(model_proto=proto.SerializeToString())
    return [piece.piece for piece in proto.pieces], lambda words: processor.encode(" ".join(words))


def _is_special(piece: str, form: Form) -> bool:
    return _SPECIAL.fullmatch(piece) is not None and piece not in form.marks.values()


def _text_of(piece: str, form: Form) -> str:
    """What an ordinary piece decodes to."""
    text = piece.removeprefix(form.continuation)
    if form.word_mark:
        text = text.replace(form.word_mark, "")
    for character, mark in form.marks.items():
        text = text.replace(mark, character)
    return text
