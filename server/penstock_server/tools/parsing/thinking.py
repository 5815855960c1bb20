"""ThinkingParser: splits an answer into its reasoning and the rest, which another parser reads.

    Qwen3, DeepSeek-R1, GLM-4.5 and most others   <think>...</think>
    Magistral                                     [THINK]...[/THINK]
    Seed-OSS                                      <seed:think>...</seed:think>
    Granite 3.2 and 3.3                           Here is my thought process:...Here is my response:

No character of either part is lost or trimmed, except the markers and the white space in front of the opener.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock_server.tools.parsers import AnswerParser
from penstock_server.tools.reading import Event, ReasoningPiece, TextPiece, merge


class PlainParser:
    """An answer that is text alone."""

    def feed(self, text: str) -> list[Event]:
        return [TextPiece(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class ThinkingParser:
    """The parser of one answer."""

    def __init__(
        self, inner: AnswerParser, opener: str, closer: str, is_open: bool, ends: Sequence[str] = ()
    ) -> None:
        """inner: reads what is after the thinking. is_open: the prompt has the opener; the model may repeat
        it. ends: other texts that end the thinking, and belong to the answer: a model that calls a tool may
        forget the closer."""
        self._inner = inner
        self._opener, self._closer, self._ends = opener, closer, tuple(ends)
        self._pending = ""
        self._has_begun = False
        #: The answer is in its thinking.
        self.is_thinking = is_open

    def feed(self, text: str) -> list[Event]:
        self._pending += text
        return self._go_on(is_final=False)

    def finish(self) -> list[Event]:
        return merge([*self._go_on(is_final=True), *self._inner.finish()])

    def _go_on(self, is_final: bool) -> list[Event]:
        if not self._has_begun and not self._begins(is_final):
            return []
        if self.is_thinking:
            return self._think(is_final)
        text, self._pending = self._pending, ""
        return self._inner.feed(text) if text else []

    def _begins(self, is_final: bool) -> bool:
        """Takes the opener, if the answer begins with it, or a closer that nothing was thought in front of.
        Returns False as long as that is not certain."""
        begun = self._pending.lstrip()
        if begun.startswith(self._opener):
            self._pending, self.is_thinking = begun[len(self._opener) :], True
        elif begun.startswith(self._closer) and not self.is_thinking:
            self._pending = begun[len(self._closer) :]
        elif not is_final and any(marker.startswith(begun) for marker in (self._opener, self._closer)):
            return False
        self._has_begun = True
        return True

    def _think(self, is_final: bool) -> list[Event]:
        found = [
            (place, marker)
            for marker in (self._closer, *self._ends)
            if (place := self._pending.find(marker)) >= 0
        ]
        if not found:
            held = 0 if is_final else max(overlap(self._pending, m) for m in (self._closer, *self._ends))
            certain = len(self._pending) - held
            text, self._pending = self._pending[:certain], self._pending[certain:]
            return [ReasoningPiece(text)] if text else []
        place, marker = min(found)
        text, self.is_thinking = self._pending[:place], False
        rest = self._pending[place + (len(marker) if marker == self._closer else 0) :]
        self._pending = ""
        return merge([ReasoningPiece(text), *(self._inner.feed(rest) if rest else [])])


def overlap(text: str, marker: str) -> int:
    """The number of characters at the end of `text` that are a beginning of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
