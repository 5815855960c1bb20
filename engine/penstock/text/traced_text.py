"""Traced: a text that knows which of its characters a chat template wrote itself.

A Traced behaves as the str that it is in every way: it compares, searches, splits and strips alike, so that a
template writes exactly what it would write with plain texts. Texts that are made of it know their characters'
origin, too. What goes through a function that is not known here comes out as a plain str; its characters
count as foreign."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

from jinja2.environment import Environment
from jinja2.nodes import EvalContext
from jinja2.runtime import Undefined

from penstock.text.text_process import FOREIGN, OWN

#: The origin of a whole text. A text of several origins has bytes: one of FOREIGN and OWN for each character.
Origin = int | bytes
#: Stand for a character of each origin, in place of texts that a format string gets.
_STAND_INS = {FOREIGN: "\ue000", OWN: "\ue001"}
#: Values that hold no text of anybody.
_WITHOUT_TEXT = (type(None), bool, int, float, Undefined)


class Traced(str):
    __slots__ = ("_origin",)
    _origin: Origin

    def __new__(cls, text: str = "", origin: Origin = FOREIGN) -> Traced:
        new = str.__new__(cls, text)
        new._origin = origin
        return new

    def __str__(self) -> Traced:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str.__add__(self, ""),)

    # -- parts ------------------------------------------------------------------------------

    def _part(self, start: int, end: int) -> Traced:
        origin = self._origin
        return Traced(str.__getitem__(self, slice(start, end)), _cut(origin, slice(start, end)))

    def __getitem__(self, key: Any) -> Traced:
        return Traced(str.__getitem__(self, key), _cut(self._origin, key))

    def __iter__(self) -> Iterator[Traced]:
        return (self._part(index, index + 1) for index in range(len(self)))

    def lstrip(self, chars: str | None = None, /) -> Traced:
        return self._part(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> Traced:
        return self._part(0, len(str.rstrip(self, chars)))

    def strip(self, chars: str | None = None, /) -> Traced:
        end = len(str.rstrip(self, chars))
        start = len(self) - len(str.lstrip(self, chars))
        return self._part(start, max(start, end))

    def removeprefix(self, prefix: str, /) -> Traced:
        return self._part(len(self) - len(str.removeprefix(self, prefix)), len(self))

    def removesuffix(self, suffix: str, /) -> Traced:
        return self._part(0, len(str.removesuffix(self, suffix)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Traced]:  # type: ignore[override]
        return self._found(str.split(self, sep, maxsplit), 0 if sep is None else len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Traced]:  # type: ignore[override]
        return self._found(str.rsplit(self, sep, maxsplit), 0 if sep is None else len(sep))

    def splitlines(self, keepends: bool = False) -> list[Traced]:  # type: ignore[override]
        whole = str.splitlines(self, True)
        kept = self._found(whole, 0)
        lines = whole if keepends else str.splitlines(self)
        return [line._part(0, len(text)) for line, text in zip(kept, lines, strict=True)]

    def partition(self, sep: str, /) -> tuple[Traced, Traced, Traced]:
        first, found, _ = str.partition(self, sep)
        return self._three(len(first), len(found))

    def rpartition(self, sep: str, /) -> tuple[Traced, Traced, Traced]:
        first, found, _ = str.rpartition(self, sep)
        return self._three(len(first), len(found))

    def _three(self, first: int, found: int) -> tuple[Traced, Traced, Traced]:
        end = first + found
        return self._part(0, first), self._part(first, end), self._part(end, len(self))

    def _found(self, pieces: list[str], gap: int) -> list[Traced]:
        """The pieces, which stand in this text in their order, at least `gap` characters apart."""
        found, place = [], 0
        for piece in pieces:
            place = str.find(self, piece, place)
            found.append(self._part(place, place + len(piece)))
            place += len(piece) + gap
        return found

    # -- texts of several parts -------------------------------------------------------------

    def __add__(self, other: Any) -> Any:
        return joined((self, other)) if _is_text(other) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return joined((other, self)) if _is_text(other) else NotImplemented

    def __mul__(self, number: Any) -> Any:
        text = str.__mul__(self, number)
        if text is NotImplemented or isinstance(self._origin, int):
            return text if text is NotImplemented else Traced(text, self._origin)
        return Traced(text, self._origin * int(number))

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> Traced:
        return formatted(self, lambda values: str.__mod__(self, values), values)

    def join(self, texts: Iterable[str], /) -> Traced:
        parts: list[str] = []
        for index, text in enumerate(texts):
            parts += (self, text) if index else (text,)
        return joined(parts)

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> Traced:
        if not isinstance(old, str) or not isinstance(new, str) or not old:
            return self._mixed(str.replace(self, old, new, count), new)
        return Traced.join(new if isinstance(new, Traced) else Traced(new), self.split(old, count))

    # -- other characters in place of the text's own -----------------------------------------

    def _changed(self, text: str, change: Callable[[str], str] | None = None) -> Traced:
        """`text`, which a method made of this text; `change` makes the same of one character."""
        origin = self._origin
        if isinstance(origin, int):
            return Traced(text, origin)
        if change is None:
            return Traced(text)
        lengths = [len(change(character)) for character in str.__str__(self)]
        if sum(lengths) != len(text):
            return Traced(text)
        return Traced(text, bytes(each for each, n in zip(origin, lengths, strict=True) for _ in range(n)))

    def _mixed(self, text: str, other: Any) -> Traced:
        """`text`, which a method made of this text and of the texts in `other`."""
        return Traced(text, OWN if has_only_own((self, other)) else FOREIGN)

    def upper(self) -> Traced:
        return self._changed(str.upper(self), str.upper)

    def lower(self) -> Traced:
        return self._changed(str.lower(self), str.lower)

    def title(self) -> Traced:
        return self._changed(str.title(self), str.title)

    def capitalize(self) -> Traced:
        return self._changed(str.capitalize(self), str.lower)

    def swapcase(self) -> Traced:
        return self._changed(str.swapcase(self), str.swapcase)

    def casefold(self) -> Traced:
        return self._changed(str.casefold(self), str.casefold)

    def ljust(self, width: SupportsIndex, fill: str | None = None, /) -> Traced:
        return self._mixed(str.ljust(self, width, " " if fill is None else fill), fill)

    def rjust(self, width: SupportsIndex, fill: str | None = None, /) -> Traced:
        return self._mixed(str.rjust(self, width, " " if fill is None else fill), fill)

    def center(self, width: SupportsIndex, fill: str | None = None, /) -> Traced:
        return self._mixed(str.center(self, width, " " if fill is None else fill), fill)

    def zfill(self, width: SupportsIndex, /) -> Traced:
        return self._changed(str.zfill(self, width))

    def expandtabs(self, tabsize: SupportsIndex = 8) -> Traced:
        return self._changed(str.expandtabs(self, tabsize))

    def translate(self, table: Any, /) -> Traced:
        return self._mixed(str.translate(self, table), table)


def joined(parts: Iterable[Any]) -> Traced:
    """ "".join() of texts."""
    texts = list(parts)
    whole = "".join(texts)
    filled = [text for text in texts if text]
    origins = [text._origin if isinstance(text, Traced) else FOREIGN for text in filled]
    first = origins[0] if origins else OWN
    if isinstance(first, int) and all(origin == first for origin in origins):
        return Traced(whole, first)
    return Traced(whole, b"".join(map(_each, filled, origins)))


def formatted(form: str, write: Callable[..., str], *args: Any, **kwargs: Any) -> Traced:
    """write(*args, **kwargs), where `form` is the format string that it writes. It is written a second time,
    with characters that tell the origin in place of the texts."""
    text = write(*args, **kwargs)
    literal = form._origin if isinstance(form, Traced) and form._origin == OWN else FOREIGN
    try:
        marked = write(*_stand_in(args), **{name: _stand_in(value) for name, value in kwargs.items()})
    except (ValueError, TypeError, LookupError):
        marked = ""
    origins = {mark: origin for origin, mark in _STAND_INS.items()}
    if len(marked) != len(text) or any(
        mark not in origins and mark != character for mark, character in zip(marked, text, strict=True)
    ):
        return Traced(text)
    return Traced(text, bytes(origins.get(character, literal) for character in marked))


def has_only_own(value: Any) -> bool:
    """Whether all texts in a value are the template's own. A value of another type may hold any text."""
    match value:
        case Traced():
            origin = value._origin
            return origin == OWN if isinstance(origin, int) else FOREIGN not in origin
        case str():
            return not value
        case Mapping():
            return all(has_only_own(key) and has_only_own(item) for key, item in value.items())
        case list() | tuple() | set():
            return all(map(has_only_own, value))
    return isinstance(value, (*_WITHOUT_TEXT, Environment, EvalContext))


def origins_of(text: Traced) -> bytes:
    """The origin of each character."""
    return _each(text, text._origin)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not hasattr(value, "__html__")  # Markup adds in its own way


def _cut(origin: Origin, key: Any) -> Origin:
    return origin if isinstance(origin, int) else origin[key]


def _each(text: str, origin: Origin) -> bytes:
    return bytes((origin,)) * len(text) if isinstance(origin, int) else origin


class _Marks(str):
    """Stands for a text that is written, or whose repr() is. Equal to itself alone, so that no key of a dict
    takes another one's place."""

    __slots__ = ("_shown",)
    _shown: str

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return self._shown


class _MarkedDict(dict[Any, Any]):
    """A dict that is written with marks. Its values are found by the keys that the marks stand for."""

    def __init__(self, values: dict[Any, Any]) -> None:
        self._found = {key: _stand_in(value) for key, value in values.items()}
        super().__init__((_stand_in(key), value) for key, value in self._found.items())

    def __missing__(self, key: Any) -> Any:
        return self._found[key]


def _stand_in(value: Any) -> Any:
    """What is written in a value's place. Raises TypeError for a value that may hold texts of any origin."""
    match value:
        case str():
            origins = _each(value, value._origin if isinstance(value, Traced) else FOREIGN)
            marks = _Marks("".join(_STAND_INS[each] for each in origins))
            marks._shown = _STAND_INS[OWN if has_only_own(value) else FOREIGN] * len(repr(value))
            return marks
        case dict():
            return _MarkedDict(value)
        case list():
            return [_stand_in(item) for item in value]
        case tuple():
            return tuple(_stand_in(item) for item in value)
    if not isinstance(value, _WITHOUT_TEXT):
        raise TypeError(f"the texts of a {type(value).__name__} are not known")
    return value
