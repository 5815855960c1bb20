"""Filters of the calls that a parser finds: the first call alone, or no call twice."""

from __future__ import annotations

from penstock_server.tools.parsers import AnswerParser
from penstock_server.tools.reading import ArgumentsPiece, CallBegin, Event, ReasoningPiece, TextPiece, merge


class FirstCall:
    """Another parser's events, without all calls after the first."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._num_calls = 0

    def feed(self, text: str) -> list[Event]:
        return self._filter(self._parser.feed(text))

    def finish(self) -> list[Event]:
        return self._filter(self._parser.finish())

    def _filter(self, events: list[Event]) -> list[Event]:
        kept = []
        for event in events:
            self._num_calls += isinstance(event, CallBegin)
            if isinstance(event, TextPiece | ReasoningPiece) or self._num_calls == 1:
                kept.append(event)
        return kept


class DistinctCalls:
    """Another parser's events up to the first call that repeats an earlier one to the letter. The repetition
    ends the list: a small model that begins to repeat itself never stops.

    A call is held back for as long as it may become a repetition.
    """

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._calls: list[tuple[str, str]] = []
        #: The events of the last call while the call is held back.
        self._held: list[Event] = []
        self.is_over = False

    def feed(self, text: str) -> list[Event]:
        return self._filter(self._parser.feed(text))

    def finish(self) -> list[Event]:
        """The last events. A call that was cut off is given as far as it came."""
        return [*self._filter(self._parser.finish()), *self._release()]

    def _filter(self, events: list[Event]) -> list[Event]:
        kept: list[Event] = []
        for event in events:
            if self.is_over:
                break
            match event:
                case TextPiece() | ReasoningPiece():
                    kept.append(event)
                case CallBegin(name):
                    kept += self._release()
                    self._calls.append((name, ""))
                    self._held = [event]
                case ArgumentsPiece(text):
                    kept += self._arguments(event, text)
        return merge(kept)

    def _arguments(self, event: ArgumentsPiece, text: str) -> list[Event]:
        name, so_far = self._calls[-1]
        call = self._calls[-1] = (name, so_far + text)
        if not self._held:
            return [event]
        self._held.append(event)
        others = self._calls[:-1]
        if call in others:
            self.is_over, self._held = True, []
        elif not any(other == name and arguments.startswith(call[1]) for other, arguments in others):
            return self._release()
        return []

    def _release(self) -> list[Event]:
        held, self._held = self._held, []
        return held
