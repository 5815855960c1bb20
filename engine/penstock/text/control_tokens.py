"""ControlTokens: the tokens that only a chat template may write, and never the text of a message.

A model takes "<|im_end|>" for the end of a turn, even in a message. A rendered text comes with the origin of
each of its characters (traced_text.py). A name is a control token where all its characters are the template's
own, and ordinary text elsewhere. A second tokenizer, with the same model, normalizer and rules, knows the
control tokens under secret names alone: the template's own get these names, and all others are ordinary text
to it. A conversation without a control token's name is tokenized as ever.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Protocol

from penstock.errors import InvalidParameter

#: Added tokens of this shape control a model, also where its files don't call them special: Qwen's
#: <|fim_prefix|>.
_SHAPE = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)
_NUM_DIGITS = 24


class Spelling(Protocol):
    """What ControlTokens asks of a Tokenizer (tokenizer.py)."""

    backend: Any

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def try_rules(self, text: str) -> None: ...


class ControlTokens:
    """The control tokens of one tokenizer and its chat templates."""

    def __init__(self, tokenizer: Spelling, template: str) -> None:
        """template: the sources of the chat templates. A token that stands in them is one of theirs, also
        where the tokenizer's files don't call it special."""
        self._tokenizer = tokenizer
        added: Mapping[int, Any] = getattr(tokenizer.backend, "added_tokens_decoder", {})
        self._added = added
        #: The text of each control token -> its id.
        self.ids: dict[str, int] = {
            token.content: token_id
            for token_id, token in sorted(added.items())
            if token.content.strip()
            and (token.special or _is_of_template(token.content, template))
            and token_id in tokenizer.encode(token.content, add_special_tokens=False)
        }
        self._cut, self._own = _draw(), _draw()
        names = "|".join(map(re.escape, sorted(self.ids, key=len, reverse=True))) or "(?!)"
        self._names = re.compile(names)

    def has_foreign(self, rendered: str, origins: bytes) -> bool:
        """Whether a rendered text has a control token's name that is not the template's own."""
        from penstock.text.text_process import FOREIGN

        return any(
            FOREIGN in origins[found.start() : found.end()] for found in self._names.finditer(rendered)
        )

    # -- tokens ---------------------------------------------------------------------------------

    def encode(self, rendered: str, origins: bytes) -> list[int]:
        """The token ids of a rendered text. Raises InvalidParameter for a control token's name in a message
        that the tokenizer can't write as ordinary text."""
        from penstock.text.foreign_rules import refused_texts

        self._tokenizer.try_rules(rendered)
        parts = list(self._parts(rendered, origins))
        for is_cut in (False, True):
            with refused_texts():
                ids = self._encode(parts, is_cut)
            if self._forbidden.isdisjoint(ids):
                return [~token_id if token_id < 0 else token_id for token_id in ids]
        raise InvalidParameter(
            "messages",
            "a message has the name of a control token, which this model's tokenizer can't write as text: "
            "leave the name out",
        )

    def _parts(self, rendered: str, origins: bytes) -> Iterator[tuple[str, bool]]:
        """The rendered text in pieces: (text, whether it is a control token of the template's own). Between
        the pieces lie the places where a name that is no control token must be cut apart."""
        from penstock.text.text_process import FOREIGN

        end = place = 0
        while found := self._names.search(rendered, place):
            is_own = FOREIGN not in origins[found.start() : found.end()]
            # In a foreign name, a name of the template's own may begin.
            place = found.end() if is_own else found.start() + 1
            yield rendered[end : found.start()], False
            yield rendered[found.start() : place], is_own
            end = place
        yield rendered[end:], False

    def _encode(self, parts: list[tuple[str, bool]], is_cut: bool) -> list[int]:
        """The token ids of the parts; ~id for the template's own control tokens."""
        cut = self._cut if is_cut else ""
        text, is_behind_text = "", False
        for part, is_own in parts:
            if not part:
                continue
            text += self._own + part if is_own else (cut if is_behind_text else "") + part
            is_behind_text = not is_own
        if (fast := self._fast) is not None:
            tokenizer, ids = fast
            found = tokenizer.encode(text, add_special_tokens=False).ids
            return [true for token_id in found if (true := ids.get(token_id, token_id)) is not None]
        if own := getattr(self._tokenizer.backend, "encode_renamed", None):
            names = {self._own + name: token_id for name, token_id in self.ids.items()}
            return list[int](own(text, names, self._cut))
        return self._encode_slowly(text)

    def _encode_slowly(self, text: str) -> list[int]:
        """With a tokenizer that is Python code of transformers'."""
        ids: list[int] = []
        for piece in re.split(f"({self._own}(?:{self._names.pattern}))|{self._cut}", text):
            if piece and piece.startswith(self._own):
                ids.append(~self.ids[piece.removeprefix(self._own)])
            elif piece:
                ids += self._tokenizer.backend.encode(
                    piece, add_special_tokens=False, split_special_tokens=True
                )
        return ids

    @cached_property
    def _forbidden(self) -> frozenset[int]:
        """The ids that no ordinary text may have. The unknown token also stands for unknown characters."""
        return frozenset(self.ids.values()) - {getattr(self._tokenizer.backend, "unk_token_id", None)}

    @cached_property
    def _fast(self) -> tuple[Any, dict[int, int | None]] | None:
        """A tokenizer with the same model and rules, whose control tokens have other names, and the ids of
        its added tokens -> the true ids, ~id for a control token, or None for the mark of a cut. None for a
        tokenizer without tokenizer.json."""
        fast = getattr(self._tokenizer.backend, "backend_tokenizer", None)
        if fast is None:
            return None
        from tokenizers import AddedToken, Tokenizer

        renamed = Tokenizer(fast.model)  # it shares the vocabulary
        if fast.normalizer is not None:
            renamed.normalizer = fast.normalizer
        if fast.pre_tokenizer is not None:
            renamed.pre_tokenizer = fast.pre_tokenizer
        ids: dict[int, int | None] = {}
        for token_id, token in sorted(self._added.items()):
            is_control = token.content in self.ids
            name = self._own + token.content if is_control else token.content
            flags = {flag: getattr(token, flag) for flag in ("single_word", "lstrip", "rstrip")}
            # A name that is searched for in the normalized text may be missed, and would stay in the text.
            flags["normalized"] = token.normalized and not is_control
            renamed.add_tokens([AddedToken(name, special=token.special, **flags)])
            its_id: Any = renamed.token_to_id(name)
            ids[its_id] = ~token_id if is_control else token_id
        renamed.add_tokens([AddedToken(self._cut, normalized=False)])
        cut_id: Any = renamed.token_to_id(self._cut)
        return renamed, ids | {cut_id: None}


def _is_of_template(name: str, template: str) -> bool:
    return name in template or _SHAPE.fullmatch(name) is not None


def _draw() -> str:
    return "".join(str(secrets.randbelow(10)) for _ in range(_NUM_DIGITS))
