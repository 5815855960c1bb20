"""Settings: everything a user may decide about a server, each thing once. Reads the environment;
nothing else in Penstock does.

A setting `max_num_seqs` is the flag --max-num-seqs and the variable PENSTOCK_MAX_NUM_SEQS. A flag
wins over the variable, the variable over the default. A flag stands on the commands that honour it;
a variable may be set for all of them. A PENSTOCK_* variable that is no setting is an error, because it
is a typing mistake; only those of the client library, and those that Kubernetes sets for a service
called "penstock", are left alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from penstock.config import Activations, DeviceChoice, EngineConfig, KernelChoice, KVDtype
from penstock.errors import ConfigError
from penstock_server.tools.parsers import ParserChoice

PREFIX = "PENSTOCK_"
CACHE_DIR = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"

_NOT_OURS = re.compile(r"PENSTOCK_(BASE_URL|SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP)(_\w+)?)")


def parse_bytes(text: str) -> int:
    """Bytes from "2GiB", "512M" (binary, as Docker's and Java's), "1.5GB" (decimal) or "4096"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(i?b)?|b)?", text.strip().lower())
    if not match:
        raise ValueError(f"{text!r} is no size; write for example 2GiB, 512MiB or 4096")
    number, letter, suffix = match.groups()
    base = 1000 if suffix == "b" else 1024
    return int(float(number) * base ** (" kmgt".index(letter) if letter else 0))


def parse_bytes_or_share(text: str) -> int | float:
    """Bytes as above, or a float between 0 and 1 from "20%"."""
    number = text.strip().removesuffix("%")
    if number == text.strip():
        return parse_bytes(text)
    try:
        share = float(number) / 100
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise ValueError(f"{text!r} is no share; write for example 20%")
    return share


def parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def parse_list(text: str) -> tuple[str, ...]:
    """Words between commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is no whole number") from None


def parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number of seconds") from None
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{text!r} is no number of seconds")
    return seconds


@dataclass(frozen=True)
class Group:
    """Settings under one heading of --help, and the commands that honour them: no other has their flags."""

    heading: str
    commands: tuple[str, ...]


_GENERATING = ("serve", "generate", "chat")
_COMPUTING = (*_GENERATING, "bench")
_EVALUATING = (*_COMPUTING, "eval")
_READING = (*_EVALUATING, "convert", "report")

#: In the order of --help.
GROUPS = {
    "model": Group("model", (*_READING, "plan")),
    "engine": Group("engine: memory and arithmetic", (*_EVALUATING, "plan")),
    "server": Group("server", ("serve",)),
}


def _setting(
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
) -> Any:
    """A field of Settings. `commands` have the flag, instead of those of the group. `parse` reads the text
    of a flag or variable (ValueError: not valid)."""
    metadata = {
        "group": group,
        "commands": commands or GROUPS[group].commands,
        "help": help,
        "parse": parse,
        "choices": choices,
        "metavar": None if choices else metavar,  # choices are shown as {a,b}
        "aliases": aliases,
    }
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


@dataclass(frozen=True)
class Settings:
    """What the command line and the environment said, checked one by one. EngineConfig checks what
    belongs to the engine when `engine_config` makes one."""

    model: str = _setting(
        "model",
        "a folder, a .gguf file, a repository on the Hugging Face hub, or 'demo'",
        "",
        metavar="MODEL",
    )
    revision: str | None = _setting("model", "branch, tag or commit on the hub", metavar="NAME")
    offline: bool = _setting(
        "model", "never ask the hub; use what was downloaded before", False, parse=parse_bool
    )

    ignore_unexpected_tensors: bool = _setting(
        "model",
        "load a checkpoint that holds tensors which the model does not know",
        EngineConfig.ignore_unexpected_tensors,
        commands=_READING,
        parse=parse_bool,
    )
    convert_to: Path | None = _setting(
        "model",
        "convert the model to this folder first, unless it is there already, and use that: INT8, laid out "
        "to be streamed",
        commands=(*_GENERATING, "eval"),
        parse=Path,
        metavar="FOLDER",
    )
    cache_dir: Path = _setting(
        "model",
        "where measured rates of this machine are kept",
        CACHE_DIR,
        commands=("serve", "generate", "chat", "plan", "hardware", "bench"),
        parse=Path,
        metavar="FOLDER",
    )

    max_model_len: int | None = _setting(
        "engine",
        "longest sequence in tokens, prompt and answer together; default: the model's own length, "
        "if its keys and values fit",
        EngineConfig.max_model_len,
        parse=parse_int,
    )
    max_num_seqs: int = _setting(
        "engine", "most sequences in a step", EngineConfig.max_num_seqs, parse=parse_int
    )
    max_num_batched_tokens: int = _setting(
        "engine",
        "most tokens in a step; longer prompts advance in chunks",
        EngineConfig.max_num_batched_tokens,
        parse=parse_int,
    )
    step_time_target: float | None = _setting(
        "engine",
        "seconds that a step should take at most: long prompts advance by smaller chunks, and answers flow "
        "beside them; default: none, for throughput",
        EngineConfig.step_time_target_s,
        commands=_GENERATING,
        parse=parse_seconds,
        metavar="SECONDS",
    )
    enable_prefix_caching: bool = _setting(
        "engine",
        "keep keys and values of what was computed, while there is room, for prompts that begin alike",
        EngineConfig.enable_prefix_caching,
        commands=_GENERATING,
        parse=parse_bool,
    )
    device: DeviceChoice = _setting(
        "engine",
        "what computes: the first GPU, the processor, or a GPU if there is one that can",
        EngineConfig.device,
        choices=get_args(DeviceChoice),
    )
    host_memory: int | None = _setting(
        "engine",
        "what the engine may take of the host's memory, such as 6GiB; default: what is free, less a tenth; "
        "layers beyond it are read from disk in each step",
        EngineConfig.host_memory_bytes,
        parse=parse_bytes,
        metavar="SIZE",
    )
    device_memory: int | None = _setting(
        "engine",
        "what it may take of the GPU's memory; default: what is free",
        EngineConfig.device_memory_bytes,
        parse=parse_bytes,
        metavar="SIZE",
    )
    strict_plan: bool = _setting(
        "engine",
        "refuse to start where something can't be as it was planned, instead of warning",
        EngineConfig.strict_plan,
        parse=parse_bool,
    )
    kv_tokens: int | None = _setting(
        "engine",
        "tokens whose keys and values have room; default: by the model and the free memory",
        EngineConfig.num_kv_tokens,
        parse=parse_int,
    )
    kv_cache_memory: int | float | None = _setting(
        "engine",
        "the same as memory, such as 2GiB, or as a share of what the engine may take, such as 20%",
        EngineConfig.kv_cache_bytes,
        parse=parse_bytes_or_share,
        metavar="SIZE",
    )
    kv_dtype: KVDtype = _setting(
        "engine", "storage of keys and values", EngineConfig.kv_dtype, choices=get_args(KVDtype)
    )
    block_size: int = _setting(
        "engine",
        "tokens per block of keys and values, a multiple of 16",
        EngineConfig.block_size,
        parse=parse_int,
    )
    resident_layers: int | None = _setting(
        "engine",
        "layers that stay in memory; the others are read from disk in each step; default: all",
        EngineConfig.num_resident_layers,
        parse=parse_int,
    )
    activations: Activations = _setting(
        "engine",
        "precision of activations in INT8 products: int16 is exact to 16 bits, int8 is faster for "
        "large batches",
        EngineConfig.activations,
        choices=get_args(Activations),
    )
    group_size: int | None = _setting(
        "engine",
        "inputs that share a scale of the weights (32, 64 or 128) where a model is quantized; default: all "
        "of an output channel's",
        EngineConfig.group_size,
        commands=(*_READING, "plan"),
        parse=parse_int,
    )
    threads: int | None = _setting(
        "engine",
        "threads for arithmetic; default: the physical cores",
        EngineConfig.num_threads,
        commands=_EVALUATING,
        parse=parse_int,
    )
    kernels: KernelChoice = _setting(
        "engine", "which kernels compute", EngineConfig.kernels, choices=get_args(KernelChoice)
    )

    host: str = _setting("server", "address to listen on; 0.0.0.0 is all", "127.0.0.1", metavar="ADDRESS")
    port: int = _setting("server", "port to listen on; 0 takes a free one", 8000, parse=parse_int)
    served_model_name: tuple[str, ...] = _setting(
        "server",
        "what clients call the model; given several times, answers carry the first; default: MODEL",
        (),
        parse=parse_list,
        metavar="NAME",
        aliases=("--model-name",),
    )
    api_key: tuple[str, ...] = _setting(
        "server",
        "key that requests must bring as 'Authorization: Bearer KEY'; may be given several times "
        "(in the variable: between commas); prefer the variable, others see flags in `ps`",
        (),
        parse=parse_list,
        metavar="KEY",
        secret=True,
    )
    max_queued_seqs: int = _setting(
        "server",
        "most sequences that wait beside the max_num_seqs of a step; a request beyond them gets a 503",
        EngineConfig.max_queued_seqs,
        parse=parse_int,
    )
    max_request_size: int = _setting(
        "server", "largest request body", 16 * 2**20, parse=parse_bytes, metavar="SIZE"
    )
    sse_keep_alive: float = _setting(
        "server",
        "seconds of silence in a stream before a comment keeps the connection alive; 0 is never",
        10.0,
        parse=parse_seconds,
        metavar="SECONDS",
    )
    tool_call_parser: ParserChoice = _setting(
        "server",
        "the format of the model's tool calls: the one that its chat template speaks of, a certain "
        "one, or none, which leaves calls in the text",
        "auto",
        choices=get_args(ParserChoice),
    )
    ui: bool = _setting("server", "serve a web page at /", True, parse=parse_bool)
    log_level: str = _setting(
        "server",
        "least severe messages to log",
        "info",
        choices=("debug", "info", "warning", "error"),
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be between 0 and 65535")

    @property
    def model_names(self) -> tuple[str, ...]:
        """What clients may call the model; the first is its name in answers. A model that was given
        as a path is called by the folder's name: clients have no business with paths."""
        is_path = self.model.startswith(("/", "."))
        own_name = Path(self.model).resolve().name if is_path else self.model
        return self.served_model_name or (own_name,)

    def engine_config(self) -> EngineConfig:
        """Raises ConfigError for values that the engine refuses."""
        return EngineConfig(
            activations=self.activations,
            group_size=self.group_size,
            kv_dtype=self.kv_dtype,
            device=self.device,
            strict_plan=self.strict_plan,
            host_memory_bytes=self.host_memory,
            device_memory_bytes=self.device_memory,
            kv_cache_bytes=self.kv_cache_memory if isinstance(self.kv_cache_memory, int) else None,
            kv_cache_share=self.kv_cache_memory if isinstance(self.kv_cache_memory, float) else None,
            num_kv_tokens=self.kv_tokens,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_queued_seqs=self.max_queued_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            step_time_target_s=self.step_time_target,
            enable_prefix_caching=self.enable_prefix_caching,
            num_resident_layers=self.resident_layers,
            num_threads=self.threads,
            kernels=self.kernels,
            ignore_unexpected_tensors=self.ignore_unexpected_tensors,
        )


def add_flags(parser: argparse.ArgumentParser, command: str) -> None:
    """Adds the settings that the command honours. What is not on the command line stays unset."""
    for name, group in GROUPS.items():
        section = parser.add_argument_group(group.heading)  # an empty one is not shown
        for field in dataclasses.fields(Settings):
            if field.metadata["group"] == name and command in field.metadata["commands"]:
                _add_flag(section, field)


def _add_flag(section: argparse._ArgumentGroup, field: dataclasses.Field[Any]) -> None:
    info = field.metadata
    options: dict[str, Any] = {"help": _help(field), "default": argparse.SUPPRESS}
    if field.name == "model":
        section.add_argument("model", nargs="?", metavar=info["metavar"], **options)
        return
    flags = ["--" + field.name.replace("_", "-"), *info["aliases"]]
    if info["parse"] is parse_bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["type"] = _argument_type(info["parse"])
        options |= {"choices": info["choices"], "metavar": info["metavar"]}
        if info["parse"] is parse_list:
            options["action"] = "extend"
    section.add_argument(*flags, dest=field.name, **options)


def _help(field: dataclasses.Field[Any]) -> str:
    text = str(field.metadata["help"])
    if field.default not in (None, (), False, "", 0):
        text += f" (default: {_shown(field)})"
    return text.replace("%", "%%")


def _shown(field: dataclasses.Field[Any]) -> str:
    default: Any = field.default
    if field.metadata["parse"] is parse_bytes:
        return f"{default // 2**20}MiB"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _argument_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse` with its message intact: argparse would say "invalid parse_bytes value"."""

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
            raise ConfigError(f"{name} is no setting of Penstock; `penstock serve --help` has all")
        values[fields[name].name] = _read_variable(name, text, fields[name])
    return values


def _read_variable(name: str, text: str, field: dataclasses.Field[Any]) -> Any:
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


def make_settings(
    arguments: Mapping[str, Any], environ: Mapping[str, str], needs_model: bool = True
) -> Settings:
    """Flags over variables over defaults. Raises ConfigError; unknown arguments are not ours."""
    names = {field.name for field in dataclasses.fields(Settings)}
    flags = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in arguments.items()
        if name in names
    }
    settings = Settings(**(read_environment(environ) | flags))
    if needs_model and not settings.model:
        raise ConfigError("no model given: name a folder, a hub repository or 'demo'")
    return settings
