"""Reads one call, {"name": ..., "arguments": {...}}, from an answer that comes in pieces.

The events depend on the characters alone, never on how they were cut into pieces. Arguments are passed on as
they come, so that a call can't be taken back. A call therefore begins only when its name is known and the
first character of its arguments shows an object. Until then the text may still turn out to be no call."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass

_WHITESPACE = " \t\r\n"
_FIRST_OF_VALUE = '"{[-0123456789tfn'
#: Models were trained on either key.
_ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(frozen=True)
class TextPiece:
    """A piece of the text beside calls."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    name: str
    #: The id that the model wrote; None: it wrote none.
    call_id: str | None = None


@dataclass(frozen=True)
class ArgumentsPiece:
    """A piece of the arguments of the last call, as the model wrote them."""

    text: str


@dataclass(frozen=True)
class ReasoningPiece:
    """A piece of what the model thinks before it answers."""

    text: str


Event = TextPiece | CallBegin | ArgumentsPiece | ReasoningPiece


def merge(events: Iterable[Event]) -> list[Event]:
    """The events with neighbouring pieces joined, and without empty pieces."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if not isinstance(event, CallBegin) and not event.text:
            continue
        if isinstance(event, TextPiece) and isinstance(last, TextPiece):
            merged[-1] = TextPiece(last.text + event.text)
        elif isinstance(event, ReasoningPiece) and isinstance(last, ReasoningPiece):
            merged[-1] = ReasoningPiece(last.text + event.text)
        elif isinstance(event, ArgumentsPiece) and isinstance(last, ArgumentsPiece):
            merged[-1] = ArgumentsPiece(last.text + event.text)
        else:
            merged.append(event)
    return merged


class ValueReader:
    """Finds the end of a JSON value. It looks at strings and brackets only, so that a mistake inside, such as
    a line end in a string, does no harm."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._has_begun = False

    def feed(self, text: str) -> int | None:
        """The number of characters of `text` that belong to the value; None: all, and the value goes on."""
        for index, character in enumerate(text):
            if not self._has_begun:
                self._has_begun = True
            elif self._depth == 0 and not self._is_in_string and character in ",]}" + _WHITESPACE:
                return index  # the end of a number or word
            if self._takes_end(character):
                return index + 1
        return None

    def _takes_end(self, character: str) -> bool:
        if self._is_in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._is_in_string = False
                return self._depth == 0
            return False
        if character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth <= 0
        return False


class CallReader:
    """Reads one call from its opening brace on. Feed the reader until `is_over`. Then `is_malformed` says
    that the text is no call, unless the call `has_begun`."""

    def __init__(self, known_names: Collection[str] | None = None) -> None:
        """known_names: a call of another name is no call; None: every name is allowed."""
        self._known_names = known_names
        self.is_over = False
        self.is_malformed = False
        self.has_begun = False
        #: The text that was read.
        self.text = ""
        self._awaits = "{"
        self._key = ""
        self._value = ValueReader()
        self._value_text = ""
        self._name: str | None = None
        self._arguments: str | None = None
        self._is_telling = False
        self._events: list[Event] = []

    def feed(self, text: str) -> tuple[list[Event], str]:
        """The events that `text` makes, and the rest of `text` after the call, once `is_over`."""
        position = 0
        while position < len(text) and not self.is_over:
            if self._awaits in ("key", "value"):
                taken = self._value.feed(text[position:])
                piece = text[position:] if taken is None else text[position : position + taken]
                self._take_value(piece, taken is not None)
                position += len(piece)
            elif self._takes_mark(text[position]):
                position += 1
        self.text += text[:position]
        events, self._events = merge(self._events), []
        return events, text[position:]

    def _takes_mark(self, character: str) -> bool:
        """Takes a character outside of keys and values. Returns False if it is the first character of a key
        or value, or is wrong."""
        if character in _WHITESPACE:
            return True
        match self._awaits, character:
            case "{", "{":
                self._awaits = "key or }"
            case "key or }" | "key after ,", '"':
                self._begin_value("key")
                return False
            case "key or }" | ", or }", "}":
                self._end()
            case ", or }", ",":
                self._awaits = "key after ,"
            case ":", ":":
                self._awaits = "first of value"
            case "first of value", _ if character in _FIRST_OF_VALUE:
                self._is_telling = self._key in _ARGUMENT_KEYS and character == "{" and self._begins()
                if not self.is_malformed:
                    self._begin_value("value")
                return False
            case _:
                self._fail()
                return False
        return not self.is_malformed

    def _begin_value(self, awaits: str) -> None:
        self._awaits, self._value, self._value_text = awaits, ValueReader(), ""

    def _take_value(self, piece: str, is_whole: bool) -> None:
        self._value_text += piece
        if self._is_telling:
            self._events.append(ArgumentsPiece(piece))
        if is_whole and self._awaits == "key":
            self._key, self._awaits = _string(self._value_text) or "", ":"
        elif is_whole:
            self._is_telling = False
            self._take_member()

    def _take_member(self) -> None:
        self._awaits = ", or }"
        if self._key == "name":
            if self.has_begun:
                return
            self._name = _string(self._value_text)
            if self._name is None:
                self._fail()
        elif self._key in _ARGUMENT_KEYS and not self.has_begun:
            self._arguments = _arguments(self._value_text)
            if self._arguments is None:
                self._fail()

    def _begins(self) -> bool:
        """Begins the call if its name is known and it has not begun yet; returns whether it did."""
        if self.has_begun or self._name is None:
            return False
        if not self._name or (self._known_names is not None and self._name not in self._known_names):
            self._fail()
            return False
        self.has_begun = True
        self._events.append(CallBegin(self._name))
        return True

    def _end(self) -> None:
        self.is_over = True
        if self._begins():
            self._events.append(ArgumentsPiece(self._arguments or "{}"))
        self.is_malformed |= not self.has_begun

    def _fail(self) -> None:
        self.is_over = self.is_malformed = True


def _string(text: str) -> str | None:
    """The value of a JSON string; None: `text` is no JSON string."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def _arguments(text: str) -> str | None:
    """The arguments: an object, or an object written as a string. null is an empty object."""
    if text.startswith("{"):
        return text
    return "{}" if text == "null" else _string(text)
