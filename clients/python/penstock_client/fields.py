"""Fields of JSON objects. A field may be absent; a field of a wrong type is a ProtocolError. Pure."""

from __future__ import annotations

from typing import Any, TypeVar

from penstock_client.errors import ProtocolError
from penstock_client.exchange import JSONObject

T = TypeVar("T")
D = TypeVar("D")


def get(data: JSONObject, name: str, kind: type[T], default: D) -> T | D:
    """The value of the field `name`; `default` if absent or null. Raises ProtocolError."""
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise ProtocolError(f"{name!r} should be {kind.__name__}, not {value!r:.100}")
    return value


def require(data: JSONObject, name: str, kind: type[T]) -> T:
    """The value of the field `name`. Raises ProtocolError, also for an absent or null field."""
    value = get(data, name, kind, None)
    if value is None:
        raise ProtocolError(f"{name!r} is missing in {data!r:.200}")
    return value


def number(data: JSONObject, name: str) -> float | None:
    """The number in the field `name`, also a whole number; None if absent."""
    value = data.get(name)
    return float(value) if isinstance(value, int) else get(data, name, float, None)


def objects(data: JSONObject, name: str) -> list[JSONObject]:
    """The list of objects in the field `name`; empty if absent."""
    return _list_of(data, name, dict) or []


def integers(data: JSONObject, name: str) -> tuple[int, ...] | None:
    """The list of integers in the field `name`, such as token ids; None if absent."""
    values = _list_of(data, name, int)
    return None if values is None else tuple(values)


def strings(data: JSONObject, name: str) -> tuple[str, ...] | None:
    """The list of strings in the field `name`; None if absent."""
    values = _list_of(data, name, str)
    return None if values is None else tuple(values)


def _list_of(data: JSONObject, name: str, kind: type[T]) -> list[T] | None:
    values: list[Any] | None = get(data, name, list, None)
    for value in values or ():
        if not isinstance(value, kind):
            raise ProtocolError(f"{name!r} should hold {kind.__name__}, not {value!r:.100}")
    return values
