"""The sources of settings: a flag wins over a variable, a variable over a key of the --config file, a key
over the default. Only this file reads Penstock's settings from the environment.

A flag belongs to the commands that honour it; a variable or key may be set for all commands. A PENSTOCK_*
variable that is no setting is an error, because it is most likely a misspelling, and so is an unknown key.
The variables of the client library, and those that Kubernetes sets for a service called "penstock", are left
alone."""

from __future__ import annotations

import argparse
import dataclasses
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock_server.settings.entries import GROUPS
from penstock_server.settings.nodes_settings import lws_values
from penstock_server.settings.settings import Settings
from penstock_server.settings.values import (
    parse_bool,
    parse_bytes,
    parse_bytes_or_share,
    parse_int,
    parse_keep_alive,
    parse_list,
    parse_seconds,
)

PREFIX = "PENSTOCK_"

_NOT_OURS = re.compile(r"PENSTOCK_(BASE_URL|SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP)(_\w+)?)")

#: Function that reads a setting's text -> the TOML types that the setting may have, in words. Settings with
#: other functions are strings.
_TOML_TYPES: dict[Callable[[str], Any], dict[type, str]] = {
    parse_bool: {bool: "true or false"},
    parse_int: {int: "a whole number"},
    parse_bytes: {int: "a number of bytes", str: 'a size such as "2GiB"'},
    parse_bytes_or_share: {int: "a number of bytes", str: 'a size such as "2GiB" or "20%"'},
    parse_seconds: {int: "a number of seconds", float: ""},
    parse_keep_alive: {str: 'a duration such as "5m"', int: "a number of seconds", float: ""},
    parse_list: {list: "a list of strings", str: "a string"},
}


def add_flags(parser: argparse.ArgumentParser, command: str) -> None:
    """Adds the flags of the settings that the command honours. A flag that is not given stays unset."""
    for name, group in GROUPS.items():
        section = parser.add_argument_group(group.heading)  # an empty one is not shown
        for field in dataclasses.fields(Settings):
            info = field.metadata
            if info["group"] == name and (command in info["commands"] or command in info["tags"]):
                _add_flag(section, field, command)


def _add_flag(section: argparse._ArgumentGroup, field: dataclasses.Field[Any], command: str) -> None:
    info = field.metadata
    options: dict[str, Any] = {"help": flag_help(field).replace("%", "%%"), "default": argparse.SUPPRESS}
    if field.name == "model":
        nargs = "*" if command == "serve" else "?"
        section.add_argument("model", nargs=nargs, metavar=info["metavar"], **options)
        if command != "batch":
            return
        options["help"] = "the same as MODEL"
    flags = ["--" + field.name.replace("_", "-"), *info["aliases"]]
    if info["parse"] is parse_bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["type"] = _argument_type(info["parse"])
        options |= {"choices": info["choices"], "metavar": info["metavar"]}
        if info["parse"] is parse_list:
            options["action"] = "extend"
    section.add_argument(*flags, dest=field.name, **options)


def flag_help(field: dataclasses.Field[Any]) -> str:
    """A setting's help, with the default if the help itself does not tell it."""
    text = str(field.metadata["help"])
    has_plain_default = field.default not in (None, (), False, "", 0) and not isinstance(field.default, Path)
    return f"{text} (default: {_shown(field)})" if has_plain_default else text


def _shown(field: dataclasses.Field[Any]) -> str:
    default: Any = field.default
    if field.metadata["parse"] is parse_bytes:
        return f"{default // 2**20}MiB"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _argument_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse` for argparse, with its own error message: argparse would say "invalid parse_bytes value"."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings in PENSTOCK_* variables. Raises ConfigError for a wrong name or value."""
    fields = {PREFIX + field.name.upper(): field for field in dataclasses.fields(Settings)}
    values = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX) or _is_not_ours(name, text):
            continue
        if name not in fields:
            raise ConfigError(f"{name} is no setting of Penstock; `penstock serve --help` lists all settings")
        values[fields[name].name] = _read_text(name, text, fields[name])
    return values


def _read_text(name: str, text: str, field: dataclasses.Field[Any]) -> Any:
    choices = field.metadata["choices"]
    if choices and text not in choices:
        raise ConfigError(f"{name} is {text!r}; choose one of {', '.join(choices)}")
    try:
        return field.metadata["parse"](text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def _is_not_ours(name: str, text: str) -> bool:
    return bool(_NOT_OURS.fullmatch(name)) or (
        name == "PENSTOCK_PORT" and text.startswith(("tcp://", "udp://"))
    )


def read_file(path: Path) -> dict[str, Any]:
    """The settings in a TOML file. Raises ConfigError for an unreadable file, a wrong key or a wrong
    value."""
    try:
        with path.open("rb") as file:
            entries = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    fields = {field.name: field for field in dataclasses.fields(Settings) if field.name != "config"}
    values: dict[str, Any] = {}
    for key, value in entries.items():
        name = key.replace("-", "_")
        if name not in fields:
            raise ConfigError(
                f"{path}: {key} is no setting of Penstock; `penstock serve --help` lists all settings"
            )
        if name in values:
            raise ConfigError(f"{path}: {key} is there twice, with dashes and with underscores")
        values[name] = _read_toml(f"{path}: {key}", value, fields[name])
    return values


def _read_toml(name: str, value: Any, field: dataclasses.Field[Any]) -> Any:
    types = _TOML_TYPES.get(field.metadata["parse"], {str: "a string"})
    is_list_of_strings = isinstance(value, list) and all(isinstance(each, str) for each in value)
    if type(value) not in types or (isinstance(value, list) and not is_list_of_strings):
        raise ConfigError(f"{name} is {value!r}; it must be {' or '.join(filter(None, types.values()))}")
    if isinstance(value, list):
        return tuple(value)
    return _read_text(name, str(value), field)


def _with_models(flags: dict[str, Any]) -> dict[str, Any]:
    """Flags in which several MODELs are `models`, and one is `model`: `serve` takes several. Raises
    ConfigError."""
    given = flags.get("model")
    if not isinstance(given, tuple):
        return flags
    rest = {name: value for name, value in flags.items() if name != "model"}
    if len(given) > 1 and "models" in flags:
        raise ConfigError("--models is another way to write several MODELs: leave one of the two out")
    # A flag wins over the other setting's variable and line in a file, too.
    if len(given) > 1:
        return rest | {"models": given, "model": ""}
    return {"models": ()} | rest | {"model": given[0]} if given else rest


def make_settings(
    arguments: Mapping[str, Any], environ: Mapping[str, str], needs_model: bool = True
) -> Settings:
    """The settings of all sources. Raises ConfigError. `arguments` may hold more than settings."""
    names = {field.name for field in dataclasses.fields(Settings)}
    flags = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in arguments.items()
        if name in names
    }
    values = read_environment(environ) | _with_models(flags)
    if (path := values.get("config")) is not None:
        values = read_file(path) | values
    if arguments.get("command") in ("serve", "worker"):
        values = lws_values(environ) | values
    settings = Settings(**values)
    if needs_model and not (settings.model or settings.models):
        raise ConfigError(
            "no model given: name a folder, a hub repository, 'demo' or 'demo-moe' (plan and bench also take "
            "--shape)"
        )
    return settings
