"""What a parser found, added up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock_server.tools.reading import ArgumentsPiece, CallBegin, Event, ReasoningPiece, TextPiece


@dataclass
class Found:
    text: str = ""
    #: Name, arguments, id.
    calls: list[list[Any]] = field(default_factory=list)
    reasoning: str = ""

    def add(self, events: Iterable[Event]) -> Found:
        for event in events:
            match event:
                case TextPiece(text):
                    self.text += text
                case ReasoningPiece(text):
                    self.reasoning += text
                case CallBegin(name, call_id):
                    self.calls.append([name, "", call_id])
                case ArgumentsPiece(text):
                    self.calls[-1][1] += text
        return self

    @property
    def named(self) -> list[tuple[str, str]]:
        return [(name, arguments) for name, arguments, _ in self.calls]


def parse(parser: Any, pieces: Sequence[str]) -> Found:
    found = Found()
    for piece in pieces:
        found.add(parser.feed(piece))
    return found.add(parser.finish())


def parse_in_pieces(make: Callable[[], Any], text: str) -> Found:
    """What a parser finds in a text, which is the same however the text comes: whole, by characters, and in
    two pieces cut anywhere."""
    found = parse(make(), [text])
    assert parse(make(), list(text)) == found
    for place in range(1, len(text)):
        assert parse(make(), [text[:place], text[place:]]) == found, place
    return found
