"""JSON that clients send, read within limits: the whole body of a request, and JSON that stands in a text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from penstock_server.protocol.errors import ApiError
from penstock_server.protocol.json_cost import JsonCost

#: The deepest nesting of lists and objects. Functions that walk through JSON call themselves for each level.
MAX_LEVELS = 128
#: JSON up to this size is read without a look at its cost, which is at most so many bytes for each of its own
#: (an empty list and its comma are three). Its nesting is what the package allows, 200 levels.
TINY_BYTES, MOST_FOR_A_BYTE = 1 << 10, 250
#: The largest JSON in which a wrong character is looked for.
_MAX_SEARCHED_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"


class JsonTooCostly(ValueError):
    """JSON that would take too much memory, or nests too deeply."""

    def __init__(self, cost: JsonCost, most_bytes: int) -> None:
        self.field = cost.field
        self.is_too_deep = cost.depth > MAX_LEVELS
        if self.is_too_deep:
            reason = f"lists and objects nest deeper than {MAX_LEVELS} levels"
        else:
            reason = f"its values would take more than {most_bytes} bytes of memory"
        super().__init__(reason)


def cost_of(data: bytes | bytearray, most_bytes: int) -> int:
    """The most bytes of memory that reading JSON takes. Raises JsonTooCostly."""
    if len(data) <= TINY_BYTES:
        return MOST_FOR_A_BYTE * len(data)
    cost = JsonCost.of(data, most_bytes, MAX_LEVELS)
    if cost.num_bytes > most_bytes or cost.depth > MAX_LEVELS:
        raise JsonTooCostly(cost, most_bytes)
    return cost.num_bytes


def read_body(data: bytes | bytearray) -> Any:
    """The JSON of a body, whose cost was looked at. Raises ApiError, with the field where half a surrogate
    pair stands: Python could read it, and no answer could repeat it."""
    if data.startswith(_BOM):
        data = data[len(_BOM) :]
    try:
        # Infinity and NaN are read as well, so that an error can name the field that has them.
        return from_json(data, cache_strings="keys")
    except ValueError as error:
        reason = str(error)
    if "hex escape" in reason and len(data) <= _MAX_SEARCHED_BYTES:
        place = _place_of_half_a_pair(data)
        if place is not None:
            message = "has half a surrogate pair, which is no character"
            raise ApiError(
                400, f"{place or 'The body'}: {message}", code="invalid_value", param=place or None
            )
    if "hex escape" in reason:
        reason += " (half a surrogate pair is no character)"
    if "unicode code point" in reason:
        raise ApiError(400, _not_utf8(data), code="invalid_json")
    raise ApiError(400, f"The body is not JSON that can be read: {reason}.", code="invalid_json")


def _not_utf8(data: bytes | bytearray) -> str:
    place = ""
    if len(data) <= _MAX_SEARCHED_BYTES:
        try:
            data.decode()
        except UnicodeDecodeError as error:
            place = f" (byte {error.start})"
    return f"The body is not text in UTF-8{place}; send JSON in UTF-8."


def _place_of_half_a_pair(data: bytes | bytearray) -> str | None:
    """The dotted path of a text, or of the name of a member, with half a surrogate pair. None: there is
    none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return next((".".join(path) for path, text in _texts(value, ()) if not _is_whole(text)), None)


def _texts(value: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    match value:
        case str():
            yield path, value
        case dict():
            for name, inner in value.items():
                yield (*path, name), name
                yield from _texts(inner, (*path, name))
        case list():
            for index, inner in enumerate(value):
                yield from _texts(inner, (*path, str(index)))


def _is_whole(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)
