"""Settings: everything a user may decide about a server, each thing once.

A setting `max_num_seqs` is the flag --max-num-seqs, the variable PENSTOCK_MAX_NUM_SEQS and the key
max-num-seqs of a file; setting_sources.py reads them, and setting_values.py the texts in them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from penstock.config import Activations, DeviceChoice, EngineConfig, KernelChoice, KVDtype
from penstock.errors import ConfigError
from penstock_server.settings.values import (
    parse_bool,
    parse_bytes,
    parse_bytes_or_share,
    parse_int,
    parse_list,
    parse_prefix,
    parse_seconds,
)

CACHE_DIR = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


SchedulingPolicy = Literal["fcfs", "priority"]
ParserChoice = Literal["auto", "hermes", "llama3", "mistral", "none"]


@dataclass(frozen=True)
class Group:
    """Settings under one heading of --help, and the commands that honour them: no other has their flags."""

    heading: str
    commands: tuple[str, ...]


_GENERATING = ("serve", "batch", "generate", "chat")
_COMPUTING = (*_GENERATING, "bench")
_EVALUATING = (*_COMPUTING, "eval")
_MEASURING = (*_EVALUATING, "plan", "hardware")
_READING = (*_EVALUATING, "convert", "report")

#: In the order of --help.
GROUPS = {
    "model": Group("model", (*_READING, "plan")),
    "engine": Group("engine: memory and arithmetic", (*_EVALUATING, "plan")),
    "server": Group("server", ("serve",)),
    "security": Group("security", ("serve",)),
    "limits": Group("limits", ("serve",)),
    "logging": Group("logs and traces", ("serve", "batch")),
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
    """What the command line, the environment and a file said, checked one by one. EngineConfig checks
    what belongs to the engine when `engine_config` makes one."""

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

    config: Path | None = _setting(
        "model",
        "a TOML file of settings, named as these flags without the dashes in front; variables and flags win",
        commands=(*_READING, "plan", "hardware"),
        parse=Path,
        metavar="FILE",
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
        "folder of what is kept from run to run, but for models of the hub: measured rates of this machine, "
        "kernels compiled for its GPU, the random models of bench --shape; default: ~/.cache/penstock",
        CACHE_DIR,
        commands=("serve", "batch", "generate", "chat", "plan", "hardware", "bench"),
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
        commands=_MEASURING,
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
        commands=_MEASURING,
        parse=parse_int,
    )
    kernels: KernelChoice = _setting(
        "engine",
        "which kernels compute",
        EngineConfig.kernels,
        commands=_MEASURING,
        choices=get_args(KernelChoice),
    )

    host: str = _setting("server", "address to listen on; 0.0.0.0 is all", "127.0.0.1", metavar="ADDRESS")
    port: int = _setting("server", "port to listen on; 0 takes a free one", 8000, parse=parse_int)
    root_path: str = _setting(
        "server",
        "path that a proxy has in front of ours, such as /llm; requests may bring it or not",
        "",
        parse=parse_prefix,
        metavar="PATH",
    )
    served_model_name: tuple[str, ...] = _setting(
        "server",
        "what clients call the model; given several times, answers carry the first; default: MODEL",
        (),
        commands=("serve", "batch"),
        parse=parse_list,
        metavar="NAME",
        aliases=("--model-name",),
    )
    api_key: tuple[str, ...] = _setting(
        "security",
        "key that requests must bring as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'; may be given "
        "several times (in the variable: between commas); prefer the variable, others see flags in `ps`",
        (),
        parse=parse_list,
        metavar="KEY",
        secret=True,
    )
    api_key_file: Path | None = _setting(
        "security",
        "file with such keys, one per line; lines that begin with # are skipped",
        parse=Path,
        metavar="FILE",
    )
    open_metrics: bool = _setting("security", "/metrics needs no key", False, parse=parse_bool)
    allowed_origin: tuple[str, ...] = _setting(
        "security",
        "web page's origin, such as https://example.org, whose scripts may use the server (CORS); * is all; "
        "may be given several times",
        (),
        parse=parse_list,
        metavar="ORIGIN",
    )
    ssl_certfile: Path | None = _setting(
        "security", "certificate (PEM, with its chain): serve https", parse=Path, metavar="FILE"
    )
    ssl_keyfile: Path | None = _setting(
        "security", "its private key, unless the certificate's file holds it", parse=Path, metavar="FILE"
    )
    max_queued_seqs: int = _setting(
        "limits",
        "most sequences that wait beside the max_num_seqs of a step; a request beyond them gets a 503",
        EngineConfig.max_queued_seqs,
        parse=parse_int,
    )
    max_request_size: int = _setting(
        "limits", "largest request body", 16 * 2**20, parse=parse_bytes, metavar="SIZE"
    )
    rate_limit_requests: int = _setting(
        "limits",
        "requests per minute that a client (an API key, or an address without keys) may post; 0 is no limit",
        0,
        parse=parse_int,
    )
    rate_limit_tokens: int = _setting(
        "limits",
        "tokens of prompts and answers per minute that it may have; 0 is no limit",
        0,
        parse=parse_int,
    )
    queue_timeout: float = _setting(
        "limits",
        "seconds from its arrival after which a request that no step has begun gets a 503; 0 is no limit",
        0.0,
        parse=parse_seconds,
        metavar="SECONDS",
    )
    request_timeout: float = _setting(
        "limits",
        "seconds from its arrival after which a request that is not answered gets a 504, or an error in "
        "its stream; 0 is no limit",
        0.0,
        parse=parse_seconds,
        metavar="SECONDS",
    )
    request_body_timeout: float = _setting(
        "limits",
        "seconds in which a request's head must have come, and then its body; 0 is no limit",
        60.0,
        parse=parse_seconds,
        metavar="SECONDS",
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
    enable_force_include_usage: bool = _setting(
        "server",
        "every stream tells the usage with each chunk and at its end, whatever its stream_options say",
        False,
        parse=parse_bool,
    )
    return_tokens_as_token_ids: bool = _setting(
        "server",
        "log-probabilities name tokens by their ids, as token_id:7, unless a request says otherwise",
        False,
        commands=("serve", "batch"),
        parse=parse_bool,
    )
    ui: bool = _setting("server", "serve a web page at /", True, parse=parse_bool)
    scheduling_policy: SchedulingPolicy = _setting(
        "server",
        "who comes next: by arrival and clients' shares (fcfs), or before that by the requests' own "
        "priority, where clients can be trusted with it",
        "fcfs",
        commands=("serve", "batch"),
        choices=get_args(SchedulingPolicy),
    )
    shutdown_timeout: float = _setting(
        "server",
        "seconds that running requests have to finish after SIGTERM or Ctrl-C, while new ones get a 503",
        30.0,
        parse=parse_seconds,
        metavar="SECONDS",
    )
    log_level: str = _setting(
        "logging",
        "least severe messages to log",
        "info",
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = _setting(
        "logging",
        "lines for people, or an object per line for programs",
        "text",
        choices=("text", "json"),
    )
    otlp_traces_endpoint: str | None = _setting(
        "logging",
        "OpenTelemetry collector that gets a span per request (OTLP over HTTP), such as "
        "http://localhost:4318/v1/traces; needs the extra penstock[otel]",
        commands=("serve",),
        metavar="URL",
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be between 0 and 65535")
        for name in ("rate_limit_requests", "rate_limit_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError("--ssl-keyfile is the key of a certificate: name that with --ssl-certfile")

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
