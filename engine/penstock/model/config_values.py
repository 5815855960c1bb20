"""Values of a config.json, with the types that they must have. An error names the wrong value and what would
be right."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from penstock.errors import InvalidConfig, UnsupportedModel

#: No number of a real model comes near: a larger one is a slip.
MAX_COUNT = 1 << 40
#: No real model has so many layers, or so many experts in a layer, and a list of more would fill the memory.
MAX_LAYERS = MAX_EXPERTS = 10_000


def require(config: dict[str, Any], name: str, *allowed: object) -> None:
    """Raises UnsupportedModel if `name` has a value that the family does not compute. Without a value, the
    first of `allowed` counts."""
    value = config.get(name, allowed[0])
    if value not in allowed:
        raise UnsupportedModel(
            f"config.json has {name} = {value!r}; for {config.get('model_type')} Penstock computes only "
            f"{' or '.join(repr(choice) for choice in allowed)}"
        )


def count(config: dict[str, Any], *names: str, default: int | None = None, most: int = MAX_COUNT) -> int:
    """The first of `names` that config.json has: a whole number from 1 to `most`. Raises InvalidConfig for
    any other value, and UnsupportedModel if no name has a value and there is no default."""
    name, value = _find(config, names, default)
    is_whole = _is_number(value) and math.isfinite(value) and value == int(value)
    if not is_whole or not 1 <= value <= most:
        refuse(name, value, f"a whole number from 1 to {most}")
    return int(value)


def num_layers_of(config: dict[str, Any], *names: str) -> int:
    """The number of layers, as count() reads it."""
    return count(config, *names, most=MAX_LAYERS)


def num_experts_of(config: dict[str, Any], *names: str, default: int | None = None) -> int:
    """The number of experts of a layer, as count() reads it."""
    return count(config, *names, default=default, most=MAX_EXPERTS)


def number(config: dict[str, Any], name: str, default: float | None = None) -> float:
    """A number from 0 on. Raises as count() does."""
    _, value = _find(config, (name,), default)
    if not _is_number(value) or not math.isfinite(value) or value < 0:
        refuse(name, value, "a number from 0 on")
    return float(value)


def flag(config: dict[str, Any], name: str, default: bool) -> bool:
    """True or false; null is false, as in transformers. Raises InvalidConfig for any other value."""
    value = config.get(name, default)
    if value not in (True, False, None):  # a string such as "false" would count as true
        refuse(name, value, "true or false")
    return bool(value)


def refuse(name: str, value: object, expected: str) -> NoReturn:
    """Raises InvalidConfig."""
    raise InvalidConfig(
        f"config.json has {name} = {value!r:.80}, which must be {expected}; correct it, or download "
        "config.json again"
    )


def _find(config: dict[str, Any], names: tuple[str, ...], default: float | None) -> tuple[str, Any]:
    """The first name with a value, and the value; null counts as no value."""
    for name in names:
        if config.get(name) is not None:
            return name, config[name]
    if default is None:
        raise UnsupportedModel(f"config.json has no {names[0]}; is this a {config.get('model_type')} model?")
    return names[0], default


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
