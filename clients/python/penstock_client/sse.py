"""Server-sent events from bytes, by the rules of the WHATWG standard. Pure and incremental.

This file knows nothing of JSON or [DONE]. It does not reconnect: the field `retry`, which says when to
reconnect, is ignored like an unknown field.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

# str.splitlines is no choice: it also splits at characters that are legal inside a line, such as U+2028.
_LINE_END = re.compile("\r\n|\n|\r")


@dataclass(frozen=True)
class Event:
    """One dispatched event. `id` is the last id seen in the stream, not only in this event."""

    data: str
    event: str = "message"
    id: str = ""


class SSEParser:
    r"""Turns blocks of bytes, split anywhere, into events.

    >>> parser = SSEParser()
    >>> parser.feed(b": keep-alive\n\ndata: a\nda")
    []
    >>> parser.feed(b"ta: b\n\n")
    [Event(data='a\nb', event='message', id='')]

    An event that is not complete when the stream ends is dropped, as the standard demands.
    """

    def __init__(self) -> None:
        # "-sig" drops one leading byte order mark; invalid bytes become U+FFFD.
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._partial_line = ""
        self._ended_with_cr = False
        self._data: list[str] = []
        self._event = ""
        self._id = ""

    def feed(self, block: bytes) -> list[Event]:
        """The events that `block` completes."""
        text = self._decoder.decode(block)
        if not text:
            return []
        # A CR ends its line at once; an LF that opens the next block belongs to that CR.
        if self._ended_with_cr and text[0] == "\n":
            text = text[1:]
        self._ended_with_cr = text.endswith("\r")
        *lines, self._partial_line = _LINE_END.split(self._partial_line + text)
        events = (self._take_line(line) for line in lines)
        return [event for event in events if event is not None]

    def _take_line(self, line: str) -> Event | None:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        elif name == "id" and "\0" not in value:
            self._id = value
        # Other lines are ignored. A comment is a line whose name is empty.
        return None

    def _dispatch(self) -> Event | None:
        data, event = self._data, self._event
        self._data, self._event = [], ""
        if not data:
            return None
        return Event("\n".join(data), event or "message", self._id)
