"""Blanks: the form of an answer that fills in the blanks of a text; BlankMatcher: where an answer stands in
the form. No torch here, and no tokenizer: the form is one of tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.errors import InvalidParameter


@dataclass(frozen=True)
class Blanks:
    """The answer is, for each blank, the blank's text and the token that closes the blank. The first blank is
    open when the answer begins. In the last blank the model's end token may come as well."""

    closers: tuple[int, ...]
    #: Tokens that no blank may have: the markers of other blanks, and the unknown token.
    forbidden: tuple[int, ...] = ()
    #: The most tokens of each blank's text. None: no blank has a limit of its own.
    max_tokens_per_blank: int | None = None

    def __post_init__(self) -> None:
        if not self.closers:
            raise InvalidParameter("blanks", "blanks has no token that closes a blank; it needs at least one")
        if min(self.token_ids) < 0:
            raise InvalidParameter("blanks", "blanks has a token id below 0")
        most = self.max_tokens_per_blank
        if most is not None and most < 1:
            raise InvalidParameter(
                "max_tokens_per_blank", f"max_tokens_per_blank is {most}; it must be at least 1"
            )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the form."""
        return (*self.closers, *self.forbidden)


class BlankMatcher:
    """Has the attributes of the Matcher of a grammar (matching.py)."""

    error = ""

    def __init__(self, blanks: Blanks, end_token_ids: Iterable[int]) -> None:
        self._blanks = blanks
        self._ends = _bits(end_token_ids)
        self._forbidden = _bits(blanks.forbidden)
        #: The open blank, and the tokens of its text.
        self._index = self._num_tokens = 0
        #: The same, before the last token.
        self._before = 0, 0

    @property
    def is_complete(self) -> bool:
        return self._index == len(self._blanks.closers)

    @property
    def forced(self) -> int | None:
        """A full blank can only be closed."""
        is_full = self._num_tokens == self._blanks.max_tokens_per_blank
        return self._blanks.closers[self._index] if is_full and not self.is_complete else None

    @property
    def allowed(self) -> int:
        """Bit i: token i may come next. A negative number has all bits of the tokens beyond its own."""
        if self.is_complete:
            return self._ends
        closer = 1 << self._blanks.closers[self._index]
        if self.forced is not None:
            return closer
        is_last = self._index == len(self._blanks.closers) - 1
        return ~(self._forbidden | (0 if is_last else self._ends)) | closer

    def advance(self, token_id: int) -> None:
        self._before = self._index, self._num_tokens
        self._num_tokens += 1
        if token_id == self._blanks.closers[self._index]:
            self._index, self._num_tokens = self._index + 1, 0

    def after(self, token_id: int) -> BlankMatcher:
        other = self.fork()
        other.advance(token_id)
        return other

    def fork(self) -> BlankMatcher:
        return copy.copy(self)

    def retreat(self) -> None:
        """Take the last token back, once."""
        self._index, self._num_tokens = self._before


def _bits(token_ids: Iterable[int]) -> int:
    return sum(1 << token_id for token_id in set(token_ids))
