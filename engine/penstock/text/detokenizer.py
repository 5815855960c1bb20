"""Detokenizer: token ids of an answer, one at a time -> text that no later token changes."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence

from penstock.text.tokenizer import Tokenizer

#: Prompt tokens that are decoded before the answer's, so that the answer's first token has its context:
#: sentencepiece drops the space of the first token that it decodes.
CONTEXT_TOKENS = 6
#: A character has four bytes at most, so the token with its last byte comes at most three tokens after the
#: token with its first byte.
MAX_TOKENS_BACK = 3
#: For the same reason, a longer run of tokens without a complete character is not UTF-8.
MAX_INCOMPLETE_TOKENS = 8
INCOMPLETE = "\ufffd"


class Detokenizer:
    """Returns complete characters only, and no text that might be the beginning of a stop string. All
    returned texts concatenate to the answer's text, cut at the stop string that is complete first."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop: tuple[str, ...] = (),
        *,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._include_stop = include_stop_str_in_output
        self._skip_special = skip_special_tokens
        self._token_ids = list(prompt_token_ids[_context_begin(tokenizer, prompt_token_ids) :])
        #: Tokens from `_begin` on are decoded each time. `_known` is the part of their text that was
        #: returned: the text of the tokens before `_read`. The window moves on each time that text is
        #: returned, so a token's cost does not grow with the answer.
        self._begin, self._read = 0, len(self._token_ids)
        self._known = self._decode(self._token_ids)
        self._held = ""
        #: The stop string that ended the answer.
        self.stopped_by: str | None = None

    def fork(self) -> Detokenizer:
        """A detokenizer of the same tokens, to which others are added."""
        other = copy.copy(self)
        other._token_ids = list(self._token_ids)
        return other

    def add(self, token_id: int) -> str:
        """The text that this token makes certain; "" after a stop string."""
        if self.stopped_by is not None:
            return ""
        self._token_ids.append(token_id)
        text = self._new_text()
        is_incomplete = text.endswith(INCOMPLETE)
        # A special token is no context for the next tokens. The token is decoded twice because a decoder may
        # drop a first space, which would make a space look like a special token.
        if (is_incomplete or not text) and not self._decode([token_id, token_id]):
            self._token_ids.pop()
            return ""
        if is_incomplete:
            if len(self._token_ids) - self._read <= MAX_INCOMPLETE_TOKENS:
                return ""
            # These tokens are no incomplete characters, except perhaps the last.
            self._advance(_context_begin(self._tokenizer, self._token_ids))
            self._known = self._known[:-1]
            return self._emit(text[:-1])
        if text:
            self._advance(self._read)
        return self._emit(text)

    def finish(self) -> str:
        """The text that was held back, with U+FFFD for the bytes of an incomplete character. "" after a stop
        string."""
        if self.stopped_by is not None:
            return ""
        text = self._emit(self._new_text())
        self._advance(self._read)
        if self.stopped_by is None:
            text, self._held = text + self._held, ""
        return text

    def _advance(self, begin: int) -> None:
        self._begin, self._read = begin, len(self._token_ids)
        self._known = self._decode(self._token_ids[begin:])

    def _new_text(self) -> str:
        text = self._decode(self._token_ids[self._begin :])
        if not (text.startswith(self._known) or self._known.endswith(INCOMPLETE)):
            # New byte tokens are no characters. sentencepiece's decoders then decode nothing of the whole run
            # of byte tokens, not even the characters that were returned.
            return self._decode(self._token_ids[self._read :])
        # The known text is compared, not only its length: a prompt may end within a character, whose text
        # changes when the character is complete.
        return text[len(os.path.commonprefix([self._known, text])) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special) if token_ids else ""

    def _emit(self, text: str) -> str:
        """The part of the held text and the new text that can be returned."""
        self._held += text
        if not self._stop:
            text, self._held = self._held, ""
            return text
        found = [(start + len(stop), start, stop) for stop in self._stop
                 if (start := self._held.find(stop)) >= 0]  # fmt: skip
        if found:
            end, start, self.stopped_by = min(found)
            return self._held[: end if self._include_stop else start]
        keep = max(_overlap(self._held, stop) for stop in self._stop)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def _context_begin(tokenizer: Tokenizer, token_ids: Sequence[int]) -> int:
    """Where the last CONTEXT_TOKENS begin. If they would begin within a character, the context begins a
    little before: sentencepiece's decoders find no characters in a run of byte tokens that begins within
    one."""
    begin = max(0, len(token_ids) - CONTEXT_TOKENS)
    first = max(0, begin - MAX_TOKENS_BACK)
    while begin > first and _is_within_character(tokenizer.token_bytes(token_ids[begin])):
        begin -= 1
    return begin


def _is_within_character(token: bytes) -> bool:
    """Whether a token begins with a byte that continues a UTF-8 character."""
    return b"\x80" <= token[:1] < b"\xc0"


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that are a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
