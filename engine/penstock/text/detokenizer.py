"""Detokenizer: token ids of an answer, one at a time -> text that is certain."""

from __future__ import annotations

import os
from collections.abc import Sequence

from penstock.text.tokenizer import Tokenizer

#: Prompt tokens that are decoded before the answer's, so that its first token meets its context:
#: sentencepiece drops the space of whatever it is given first.
CONTEXT_TOKENS = 6
#: A character has four bytes at most, so a token that continues one is at most so many behind its first.
MAX_TOKENS_BACK = 3
#: For the same reason, a longer run of tokens without a complete character is not UTF-8.
MAX_INCOMPLETE_TOKENS = 8
INCOMPLETE = "\ufffd"


class Detokenizer:
    """Emits complete characters only, and nothing that might be the beginning of a stop string. All that
    it returns concatenates to the answer's text, cut at the stop string that is complete first."""

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
        #: Tokens from `_begin` are decoded each time; `_known` is what of their text is out, and all of
        #: those before `_read`. The window moves on with each emission, so the cost of a token does not
        #: grow with the answer.
        self._begin, self._read = 0, len(self._token_ids)
        self._known = self._decode(self._token_ids)
        self._held = ""
        #: The stop string that ended the answer.
        self.stopped_by: str | None = None

    def add(self, token_id: int) -> str:
        """The text that this token makes certain; "" after a stop string."""
        if self.stopped_by is not None:
            return ""
        self._token_ids.append(token_id)
        text = self._new_text()
        is_incomplete = text.endswith(INCOMPLETE)
        # A special token is no context for what follows. Decoded twice, as a first space may be dropped.
        if (is_incomplete or not text) and not self._decode([token_id, token_id]):
            self._token_ids.pop()
            return ""
        if is_incomplete:
            if len(self._token_ids) - self._read <= MAX_INCOMPLETE_TOKENS:
                return ""
            # These are no characters in the making, except perhaps the last.
            self._advance(_context_begin(self._tokenizer, self._token_ids))
            self._known = self._known[:-1]
            return self._emit(text[:-1])
        if text:
            self._advance(self._read)
        return self._emit(text)

    def finish(self) -> str:
        """What was held back; bytes of an incomplete character as U+FFFD. "" after a stop string."""
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
            # New byte tokens that are no characters: sentencepiece's decoders then give up the whole run of
            # byte tokens, also its characters that are out.
            return self._decode(self._token_ids[self._read :])
        # Not only its length: a prompt may end within a character, which then reads differently.
        return text[len(os.path.commonprefix([self._known, text])) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special) if token_ids else ""

    def _emit(self, text: str) -> str:
        """What of held and new text is certain."""
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
    """Where the last CONTEXT_TOKENS begin, or a little before, where they would begin within a character: to
    sentencepiece's decoders a run of byte tokens that begins so has no character at all."""
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
