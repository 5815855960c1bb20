"""--kv-events-config: the JSON object with which users of vLLM ask for events of the prefix cache."""

from __future__ import annotations

import json
from dataclasses import fields

from penstock.config import KVEventsConfig
from penstock.errors import ConfigError

_NAMES = tuple(field.name for field in fields(KVEventsConfig))
_PUBLISHERS = ("zmq", "null")


def parse_kv_events(text: str) -> KVEventsConfig | None:
    """From JSON; None if it asks for no events. Raises ValueError, which says what to do."""
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise ValueError(f'{text!r} is no JSON object; write for example {{"enable_kv_cache_events": true}}')
    is_enabled = entries.pop("enable_kv_cache_events", False)
    if not isinstance(is_enabled, bool):
        raise ValueError(f"enable_kv_cache_events is {is_enabled!r}; write true or false")
    publisher = entries.pop("publisher", None) or "zmq"
    if publisher not in _PUBLISHERS:
        raise ValueError(f"publisher is {publisher!r}; it can be {' or '.join(_PUBLISHERS)}")
    if unknown := entries.keys() - set(_NAMES):
        raise ValueError(f"{min(unknown)} is no key that Penstock knows; these are {', '.join(_NAMES)}")
    try:
        config = KVEventsConfig(**entries)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return config if is_enabled and publisher == "zmq" else None
