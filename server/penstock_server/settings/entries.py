"""The functions that make an entry of settings.py: its group, its commands, and how its text is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from penstock.config import EngineConfig
from penstock_server.settings.values import parse_bool, parse_int

#: Type of a field of EngineConfig -> the function that reads its text. Fields of other types are strings.
_PARSERS: dict[Any, Callable[[str], Any]] = {bool: parse_bool, int: parse_int}


Tag = Literal["worker", "nodes", "one model"]


@dataclass(frozen=True)
class Group:
    """Settings under one heading of --help, and the commands that honour them. Other commands don't have
    their flags."""

    heading: str
    commands: tuple[str, ...]


GENERATING = ("serve", "batch", "generate", "fill", "chat")
COMPUTING = (*GENERATING, "bench")
EVALUATING = (*COMPUTING, "eval")
MEASURING = (*EVALUATING, "plan", "hardware")
READING = (*EVALUATING, "convert", "report", "pull")

#: The groups in the order of --help.
GROUPS = {
    "model": Group("model", (*READING, "plan")),
    "engine": Group("engine: memory and arithmetic", (*EVALUATING, "plan")),
    "server": Group("server", ("serve",)),
    "nodes": Group("several machines, one model", ("serve", "worker")),
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
    tags: Sequence[Tag] = (),
) -> Any:
    """A field of Settings.

    commands: the commands that have the flag; None: those of the group.
    parse: reads the text of a flag or variable; raises ValueError for an invalid text.
    engine_field: the field of EngineConfig that gets the value, or a function from the value to that field;
        None: the setting is not the engine's.
    tags: "worker": also a flag of `worker`, for its own machine. "nodes": means something only where several
        machines share a model. "one model": says something of one model, and is refused for several.
    """
    metadata = {
        "group": group,
        "commands": commands or GROUPS[group].commands,
        "help": help,
        "parse": parse,
        "choices": choices,
        "metavar": None if choices else metavar,  # choices are shown as {a,b}
        "aliases": aliases,
        "engine_field": engine_field,
        "tags": tags,
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
    tags: Sequence[Tag] = (),
) -> Any:
    """A field of Settings for a field of EngineConfig, with that field's default and type.

    The choices are those of a Literal. Without `parse`, a bool or int field is read as such. tell_field: for
    a setting whose value decides which field of EngineConfig gets it, the function from value to field."""
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
        tags=tags,
    )
