"""How an entry of settings.py is written: its group, the commands that honour it, how its text is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from penstock.config import EngineConfig
from penstock_server.settings.values import parse_bool, parse_int

#: Of a field of EngineConfig's, by its type; others are words.
_PARSERS: dict[Any, Callable[[str], Any]] = {bool: parse_bool, int: parse_int}


@dataclass(frozen=True)
class Group:
    """Settings under one heading of --help, and the commands that honour them: no other has their flags."""

    heading: str
    commands: tuple[str, ...]


GENERATING = ("serve", "batch", "generate", "chat")
COMPUTING = (*GENERATING, "bench")
EVALUATING = (*COMPUTING, "eval")
MEASURING = (*EVALUATING, "plan", "hardware")
READING = (*EVALUATING, "convert", "report")

#: In the order of --help.
GROUPS = {
    "model": Group("model", (*READING, "plan")),
    "engine": Group("engine: memory and arithmetic", (*EVALUATING, "plan")),
    "server": Group("server", ("serve",)),
    "security": Group("security", ("serve",)),
    "limits": Group("limits", ("serve",)),
    "logging": Group("logs and traces", ("serve", "batch")),
}


def setting(
    group: str,
    help: str,
    default: Any = None,
    *,
    commands: Sequence[str] | None = None,
    parse: Callable[[str], Any] = str,
    choices: Sequence[str] | None = None,
    metavar: str = "N",
    aliases: Sequence[str] = (),
    secret: bool = False,
    engine_field: str | Callable[[Any], str] | None = None,
) -> Any:
    """A field of Settings. `commands` have the flag, instead of those of the group. `parse` reads the text
    of a flag or variable (ValueError: not valid). engine_field: the field of EngineConfig that gets the
    value, or a function that tells it by the value; None: the setting is not the engine's."""
    metadata = {
        "group": group,
        "commands": commands or GROUPS[group].commands,
        "help": help,
        "parse": parse,
        "choices": choices,
        "metavar": None if choices else metavar,  # choices are shown as {a,b}
        "aliases": aliases,
        "engine_field": engine_field,
    }
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


def engine_setting(
    engine_field: str,
    help: str,
    *,
    group: str = "engine",
    parse: Callable[[str], Any] | None = None,
    tell_field: Callable[[Any], str] | None = None,
    commands: Sequence[str] | None = None,
    metavar: str = "N",
) -> Any:
    """A field of Settings for a field of EngineConfig, whose default and type it has: choices are those of a
    Literal, and truth values and whole numbers are read as such unless `parse` says how. tell_field: where
    values of another kind go to another field, what tells that by the value."""
    kind = get_type_hints(EngineConfig)[engine_field]
    choices = get_args(kind) if get_origin(kind) is Literal else None
    plain = next((each for each in get_args(kind) if each is not NoneType), kind)
    return setting(
        group,
        help,
        getattr(EngineConfig, engine_field),
        commands=commands,
        parse=parse or _PARSERS.get(plain, str),
        choices=choices,
        metavar=metavar,
        engine_field=tell_field or engine_field,
    )
