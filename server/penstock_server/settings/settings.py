"""Settings: everything that a user may decide about a server. Each setting stands here once.

A setting `max_num_seqs` is the flag --max-num-seqs, the variable PENSTOCK_MAX_NUM_SEQS and the key
max-num-seqs of a settings file. sources.py reads these sources, values.py the texts in them. A setting of the
engine's is an entry here and a field of EngineConfig.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from penstock.config import (
    INT8_ACTIVATIONS_COST,
    Activations,
    DraftDevice,
    EngineConfig,
    KernelChoice,
    KVDtype,
    KVEventsConfig,
    ModelImpl,
    MTPMode,
    PoolingChoice,
    Runner,
    ShareMode,
    SpeculationMode,
    WeightBits,
)
from penstock.errors import ConfigError
from penstock.kernel_tuning import KernelTuning
from penstock_server.settings.chat_rules import (
    PARSER_CHOICES,
    REASONING_CHOICES,
    ChatRules,
    ParserChoice,
    ReasoningChoice,
)
from penstock_server.settings.entries import GENERATING, MEASURING, READING, engine_setting, setting
from penstock_server.settings.kv_events import parse_kv_events
from penstock_server.settings.nodes_settings import NodesSettings
from penstock_server.settings.speculative_config import SpeculativeConfig
from penstock_server.settings.values import (
    parse_bool,
    parse_bytes,
    parse_bytes_or_share,
    parse_device,
    parse_int,
    parse_keep_alive,
    parse_list,
    parse_pair,
    parse_prefix,
    parse_seconds,
    parse_tuning,
)

CACHE_DIR = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


#: Half of the demo model's layers. The others are streamed, as those of a model are that memory can't hold.
DEMO_RESIDENT_LAYERS = 3

SchedulingPolicy = Literal["fcfs", "priority"]


@dataclass(frozen=True)
class Settings(NodesSettings):
    """The values of the command line, the environment and the settings file, each checked by itself. The
    engine's settings are checked when engine_config() makes an EngineConfig."""

    model: str = setting(
        "model",
        "a folder, a .gguf file, a repository on the Hugging Face hub, 'demo' or 'demo-moe'",
        "",
        metavar="MODEL",
        tags=("worker",),
    )
    models: tuple[str, ...] = setting(
        "model",
        "several models in one server, in place of MODEL: each as MODEL may be; the same as more than one "
        "MODEL, or as a folder whose folders and .gguf files are models; requests choose by `model`",
        (),
        commands=("serve",),
        parse=parse_list,
        metavar="MODEL",
    )
    pin: tuple[str, ...] = setting(
        "model",
        "of several models, one that stays loaded whatever the others need, by its name for clients; may be "
        "given several times",
        (),
        commands=("serve",),
        parse=parse_list,
        metavar="NAME",
    )
    keep_alive: float | None = setting(
        "model",
        "how long a model stays loaded after its last request: 5m, 1h30m, a number of seconds, 0, or -1 for "
        "ever; Ollama's field keep_alive of a request wins; default: until another model needs the memory",
        commands=("serve",),
        parse=parse_keep_alive,
        metavar="DURATION",
    )
    revision: str | None = setting(
        "model", "branch, tag or commit on the hub", metavar="NAME", tags=("one model",)
    )
    offline: bool = setting(
        "model",
        "never ask the hub; use files that were downloaded before",
        False,
        parse=parse_bool,
        tags=("worker",),
    )

    config: Path | None = setting(
        "model",
        "a TOML file of settings, named as these flags without the dashes in front; variables and flags win",
        commands=(*READING, "plan", "hardware"),
        parse=Path,
        metavar="FILE",
        tags=("worker",),
    )
    ignore_unexpected_tensors: bool = engine_setting(
        "ignore_unexpected_tensors",
        "load a checkpoint that holds tensors which the model does not know",
        commands=READING,
        group="model",
    )
    allow_pickle: bool = engine_setting(
        "allow_pickle",
        "read weights that exist only as pickles (.bin, .pt, .pth, .ckpt); a reader of Penstock's own finds "
        "the tensors, and nothing of a pickle is ever run",
        commands=READING,
        group="model",
        tags=("worker",),
    )
    guess_tokenizer: bool = engine_setting(
        "guess_tokenizer",
        "load a GGUF file whose tokenizer splits words by rules that are not known: by the usual rules, with "
        "which some texts get other tokens than those that the model knows",
        commands=READING,
        group="model",
    )
    convert_to: Path | None = setting(
        "model",
        "convert the model to this folder first (quantized, laid out to be streamed), unless that is done, "
        "and use the folder",
        commands=(*GENERATING, "eval"),
        parse=Path,
        metavar="FOLDER",
        tags=("one model",),
    )
    cache_dir: Path = setting(
        "model",
        "folder of files that are kept from run to run: measured rates of this machine, kernels compiled for "
        "its GPU, the random models of bench --shape, copies that pull --convert has made (models of the hub "
        "lie elsewhere); default: ~/.cache/penstock",
        CACHE_DIR,
        commands=(*MEASURING, "doctor", "pull", "list", "rm"),
        parse=Path,
        metavar="FOLDER",
        tags=("worker",),
    )

    max_model_len: int | None = engine_setting(
        "max_model_len",
        "longest sequence in tokens, prompt and answer together; default: the model's own length, "
        "if keys and values for it fit",
    )
    max_num_seqs: int = engine_setting("max_num_seqs", "most sequences in a step")
    max_num_batched_tokens: int = engine_setting(
        "max_num_batched_tokens", "most tokens in a step; longer prompts advance in chunks"
    )
    step_time_target: float | None = engine_setting(
        "step_time_target_s",
        "seconds that a step should take at most: long prompts advance by smaller chunks, and answers flow "
        "beside them; default: none, for throughput",
        commands=GENERATING,
        parse=parse_seconds,
        metavar="SECONDS",
    )
    enable_prefix_caching: bool = engine_setting(
        "enable_prefix_caching",
        "keep computed keys and values while there is room, for prompts that begin alike",
        commands=GENERATING,
    )
    device: str = engine_setting(
        "device",
        "what computes: cpu is the processor, cuda or cuda:0 the first GPU, cuda:1 the second one; auto is "
        "the first GPU if it is usable",
        commands=(*MEASURING, "doctor"),
        parse=parse_device,
        metavar="DEVICE",
        tags=("worker",),
    )
    share_products: ShareMode = engine_setting(
        "share_products",
        "auto: where a model does not fit into a GPU's memory, the processor computes a share of each "
        "product, or experts that lie in RAM, while the link brings the others, if this should be faster; "
        "off: the GPU computes all. Answers are the same, to the last bit",
    )
    host_memory: int | None = engine_setting(
        "host_memory_bytes",
        "host memory that the engine may take, such as 6GiB; layers that do not fit are read from disk in "
        "each step; default: the free memory, less a tenth",
        parse=parse_bytes,
        metavar="SIZE",
        tags=("worker",),
    )
    device_memory: int | None = engine_setting(
        "device_memory_bytes",
        "GPU memory that the engine may take; default: the free memory",
        parse=parse_bytes,
        metavar="SIZE",
        tags=("worker",),
    )
    strict_plan: bool = engine_setting(
        "strict_plan", "refuse to start, instead of warning, if the memory plan can't be kept"
    )
    kv_tokens: int | None = engine_setting(
        "num_kv_tokens",
        "tokens whose keys and values have room; default: by the model and the free memory",
    )
    kv_cache_memory: int | float | None = engine_setting(
        "kv_cache_bytes",
        "memory for keys and values, in place of --kv-tokens: a size such as 2GiB, or a share of the memory "
        "that the engine may take, such as 20%",
        parse=parse_bytes_or_share,
        metavar="SIZE",
        tell_field=lambda value: "kv_cache_share" if isinstance(value, float) else "kv_cache_bytes",
    )
    kv_disk: str | None = engine_setting(
        "kv_disk",
        "a folder on a fast local disk for computed keys and values: prompts that begin alike are found "
        "again after eviction, preemption and restart, where reading takes less time than computing; only "
        "its owner can read it, since prompts can be recovered from it",
        commands=GENERATING,
        metavar="FOLDER",
    )
    kv_disk_size: int | None = engine_setting(
        "kv_disk_bytes",
        "the most that --kv-disk holds, of all models together, such as 50GiB; what was used least recently "
        "gives way; default: 16GiB",
        commands=GENERATING,
        parse=parse_bytes,
        metavar="SIZE",
    )
    kv_host_memory: int | None = engine_setting(
        "kv_host_bytes",
        "memory of the host for computed keys and values that have no room in a GPU's, such as 8GiB, a part "
        "of --host-memory: they come back from there in place of being computed; with --kv-disk they go on "
        "to the disk from there",
        parse=parse_bytes,
        metavar="SIZE",
    )
    kv_events_config: KVEventsConfig | None = engine_setting(
        "kv_events",
        "events of the prefix cache for routers, as vLLM's JSON object, such as "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "topic": ""}; also replay_endpoint, '
        "buffer_steps, hwm and max_queue_size; events have the tokens of prompts; needs the extra "
        "penstock-llm[events]",
        commands=("serve",),
        parse=parse_kv_events,
        metavar="JSON",
        tags=("one model",),
    )
    kv_spill: str | None = engine_setting(
        "kv_spill",
        "a folder on a fast local disk for a temporary file with keys and values that have no room in "
        "memory, so that sequences may be longer than the KV cache; each step reads what its sequences need; "
        "default: the folder of --kv-disk, if --max-model-len is given",
        metavar="FOLDER",
    )
    kv_spill_memory: int | None = engine_setting(
        "kv_spill_bytes",
        "the same on a GPU: memory of the host, such as 8GiB, a part of --host-memory, with keys and values "
        "that have no room in the GPU's; what a step's sequences need is copied to the GPU layer by layer, "
        "one layer ahead, but for those to which the processor attends",
        parse=parse_bytes,
        metavar="SIZE",
    )
    state_memory: int | None = engine_setting(
        "state_bytes",
        "memory for recurrent states, in models that have some (Qwen3-Next, LFM2, Granite 4), such as "
        "500MiB; default: an eighth of the memory that the engine may take, or less if this is enough. "
        "Guesses take up to a sixteenth of it more, or what 16 of them need",
        parse=parse_bytes,
        metavar="SIZE",
    )
    kv_dtype: KVDtype = engine_setting(
        "kv_dtype", "storage of keys and values; int8 has a scale for each head of each token"
    )
    block_size: int = engine_setting("block_size", "tokens per block of keys and values, a multiple of 16")
    resident_layers: int | None = engine_setting(
        "num_resident_layers",
        "layers that stay in memory, the others are read in each step; default: as many as fit, and half of "
        "the demo model's, so that it shows how layers are streamed",
        tags=("worker",),
    )
    activations: Activations = engine_setting(
        "activations",
        "precision of activations in INT8 products: int16 is exact to 16 bits; int8, with one scale for each "
        f"token, is faster for large batches and far less exact (SmolLM2-135M: {INT8_ACTIVATIONS_COST})",
        commands=MEASURING,
    )
    weights: WeightBits = engine_setting(
        "weights",
        "when a model is quantized: int8; or int4, which keeps the layers' matrices in 4 bits: half the "
        "bytes, and less exact; or int3 or int2: fewer bytes, and far less exact; or planes: int8 whose "
        "upper and lower 4 bits lie apart",
        commands=(*READING, "plan"),
    )
    group_size: int | None = engine_setting(
        "group_size",
        "when a model is quantized: inputs that share a scale (32, 64 or 128; 0: all inputs of an output "
        "channel); default: the groups of the files where these have some (GGUF, FP8), otherwise all inputs "
        "of an output channel for int8, 64 for int4 and int3, 32 for int2",
        commands=(*READING, "plan"),
    )
    model_impl: ModelImpl = engine_setting(
        "model_impl",
        "whose code computes the layers: penstock's own families, transformers' modules with penstock's "
        "products and attention in them, or auto: the own family if there is one",
        commands=(*READING, "plan"),
    )
    runner: Runner = engine_setting(
        "runner",
        "what the model is for: generate is text, pooling is vectors (/v1/embeddings) or scores "
        "(/v1/rerank); auto: pooling for folders of sentence-transformers, encoders and models with a layer "
        "for scores",
        commands=("serve", "batch", "plan", "convert"),
    )
    pooling: PoolingChoice = engine_setting(
        "pooling",
        "which hidden states become a text's vector: the first token's (cls), the last token's, or their "
        "mean; auto: as the model's folder says, else the mean for encoders and the last for decoders",
        commands=("serve", "batch", "plan"),
    )
    score_tokens: tuple[str, ...] = engine_setting(
        "score_tokens",
        "the two tokens by which a decoder says no and yes to a pair of texts, such as no,yes for "
        "Qwen3-Reranker; for a folder that does not say so",
        commands=("serve", "batch", "plan"),
        parse=parse_pair,
        metavar="NO,YES",
        tags=("one model",),
    )
    speculation: SpeculationMode = engine_setting(
        "speculation",
        "speculative decoding with drafts from prompt and answer, from what the model found likely before, "
        "and from --draft-model; auto drafts where it should pay; no answer depends on drafts",
    )
    draft_model: str | None = engine_setting(
        "draft_model",
        "a small model of the same vocabulary (a folder, a .gguf file or a hub repository), or an EAGLE-3 "
        "or DFlash head that was trained for the model, that stays in memory and guesses the next tokens",
        metavar="MODEL",
        tags=("one model",),
    )
    draft_device: DraftDevice = engine_setting(
        "draft_device",
        "where --draft-model is computed: auto is the GPU of a model on a GPU, if it stays in memory there, "
        "else the processor",
    )
    mtp: MTPMode = engine_setting(
        "mtp",
        "a head of multi-token prediction that came with the model guesses the next tokens: auto where the "
        "files have one that can, on, or off, which leaves its memory to the model",
    )
    speculative_config: SpeculativeConfig | None = setting(
        "engine",
        'the same as a JSON object of vLLM\'s, such as {"method": "draft_model", "model": "FOLDER", '
        '"num_speculative_tokens": 8}: method draft_model, eagle3 (a head in a folder of its own, as '
        '"model"), mtp (the head that came with the model), '
        'planes (the upper planes of its own weights, with --weights planes; a small "model" before them, '
        "which earlier releases had, is left out with a warning), or ngram "
        "or suffix, which need no model; "
        "num_speculative_tokens is the most guesses of a sequence in a step (default: 32); prompt_lookup_min "
        "and prompt_lookup_max are tokens that have to be the same, and that are compared",
        parse=SpeculativeConfig.parse,
        metavar="JSON",
        tags=("one model",),
    )
    threads: int | None = engine_setting(
        "num_threads",
        "threads for arithmetic; default: the physical cores",
        commands=MEASURING,
        tags=("worker",),
    )
    kernels: KernelChoice = engine_setting(
        "kernels", "which kernels compute", commands=MEASURING, tags=("worker",)
    )
    kernel_tuning: KernelTuning | None = engine_setting(
        "kernel_tuning",
        "parameters of the compiled kernels for the processor, such as few_rows=8,prefetch_bytes=1024, or "
        "default; results do not depend on them; default: as measured on this machine",
        commands=MEASURING,
        parse=parse_tuning,
        metavar="TEXT",
        tags=("worker",),
    )

    host: str = setting(
        "server", "address to listen on; 0.0.0.0 means all addresses", "127.0.0.1", metavar="ADDRESS"
    )
    port: int = setting("server", "port to listen on; 0 takes a free one", 8000, parse=parse_int)
    root_path: str = setting(
        "server",
        "path that a proxy has in front of the server's paths, such as /llm; requests may have it or not",
        "",
        parse=parse_prefix,
        metavar="PATH",
    )
    served_model_name: tuple[str, ...] = setting(
        "server",
        "name of the model for clients; may be given several times, answers have the first name; default: "
        "MODEL",
        (),
        commands=("serve", "batch"),
        parse=parse_list,
        metavar="NAME",
        aliases=("--model-name",),
        tags=("one model",),
    )
    soft_prompt: tuple[str, ...] = setting(
        "server",
        "a soft prompt that requests may name (the field soft_prompt of /v1/completions): a file of "
        "safetensors or of torch.save with one tensor [tokens, hidden size], or a checkpoint of "
        "CPM-2-Finetune; may be given several times",
        (),
        commands=("serve", "batch"),
        parse=parse_list,
        metavar="NAME=FILE",
        tags=("one model",),
    )
    lora: tuple[str, ...] = setting(
        "server",
        "an adapter (LoRA, a folder as PEFT saves it) that requests choose by its name in the field model; "
        "may be given several times",
        (),
        commands=("serve", "batch", "plan"),
        parse=parse_list,
        metavar="NAME=FOLDER",
        tags=("one model",),
    )
    lora_memory: int | None = engine_setting(
        "adapter_bytes",
        "host memory for adapters; default: what the adapters of --lora take",
        group="server",
        parse=parse_bytes,
        commands=("serve", "batch", "plan"),
        metavar="SIZE",
        tags=("one model",),
    )
    allow_runtime_lora_updating: bool = setting(
        "server",
        "clients may load and unload adapters from folders of this machine (/v1/load_lora_adapter, "
        "/v1/unload_lora_adapter), within --lora-memory",
        False,
        parse=parse_bool,
        tags=("one model",),
    )
    api_key: tuple[str, ...] = setting(
        "security",
        "key that requests must bring as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'; may be given "
        "several times (in the variable: between commas); prefer the variable, since other users see flags "
        "in `ps`",
        (),
        parse=parse_list,
        metavar="KEY",
        secret=True,
    )
    api_key_file: Path | None = setting(
        "security",
        "file with API keys, one per line; lines that begin with # are skipped",
        parse=Path,
        metavar="FILE",
    )
    open_metrics: bool = setting("security", "/metrics needs no key", False, parse=parse_bool)
    allowed_origin: tuple[str, ...] = setting(
        "security",
        "origin of web pages whose scripts may use the server (CORS), such as https://example.org; * is "
        "every origin; may be given several times",
        (),
        parse=parse_list,
        metavar="ORIGIN",
    )
    allowed_host: tuple[str, ...] = setting(
        "security",
        "name by which clients may ask for the server (the header Host), besides localhost, addresses, "
        "--host and the names in --allowed-origin: such as llm.example.org, or .example.org for all names "
        "below it; * is every name; may be given several times",
        (),
        parse=parse_list,
        metavar="NAME",
    )
    ssl_certfile: Path | None = setting(
        "security", "certificate (PEM, with its chain); the server speaks https", parse=Path, metavar="FILE"
    )
    ssl_keyfile: Path | None = setting(
        "security", "private key of the certificate, if --ssl-certfile lacks it", parse=Path, metavar="FILE"
    )
    max_queued_seqs: int = engine_setting(
        "max_queued_seqs",
        "most sequences that wait while --max-num-seqs others run; further requests get a 503",
        group="limits",
    )
    max_request_size: int = setting(
        "limits", "largest request body", 16 * 2**20, parse=parse_bytes, metavar="SIZE"
    )
    request_memory: int | None = setting(
        "limits",
        "memory for the bodies of all requests that are on their way or being answered, as they come and as "
        "they are read; further ones get a 503; default: 1/32 of the machine's, and at least four "
        "times --max-request-size",
        parse=parse_bytes,
        metavar="SIZE",
        engine_field="request_bytes",
    )
    rate_limit_requests: int = setting(
        "limits",
        "requests per minute that a client may post; a client is an API key, or an address if there are no "
        "keys; 0 is no limit",
        0,
        parse=parse_int,
    )
    rate_limit_tokens: int = setting(
        "limits",
        "tokens of prompts and answers per minute that a client may have; 0 is no limit",
        0,
        parse=parse_int,
    )
    queue_timeout: float = setting(
        "limits",
        "a request that no step has begun so many seconds after it arrived gets a 503; 0 is no limit",
        0.0,
        parse=parse_seconds,
        metavar="SECONDS",
    )
    request_timeout: float = setting(
        "limits",
        "a request that is not answered so many seconds after it arrived gets a 504, or an error in its "
        "stream; 0 is no limit",
        0.0,
        parse=parse_seconds,
        metavar="SECONDS",
    )
    request_body_timeout: float = setting(
        "limits",
        "seconds within which the head of a request must come, and then its body; 0 is no limit",
        60.0,
        parse=parse_seconds,
        metavar="SECONDS",
    )
    sse_keep_alive: float = setting(
        "server",
        "seconds of silence in a stream after which a comment keeps the connection alive; 0 is no comments",
        10.0,
        parse=parse_seconds,
        metavar="SECONDS",
    )
    tool_call_parser: ParserChoice = setting(
        "server",
        "format of the model's tool calls; auto: the format that the chat template uses; none: calls stay in "
        "the text",
        "auto",
        choices=PARSER_CHOICES,
    )
    reasoning_parser: ReasoningChoice = setting(
        "server",
        "markers of the model's thinking, which becomes reasoning_content; auto: the markers that the chat "
        "template has; a named format also takes the beginning of an answer without an opener for thinking; "
        "none: thinking stays in the text",
        "auto",
        choices=REASONING_CHOICES,
        commands=("serve", "batch"),
    )
    lenient: bool = setting(
        "server",
        "take requests that would be refused: leave unknown fields out, put notes in the place of images, "
        "sounds and files, and end answers where the context ends; a line in the log and a header "
        "(X-Penstock-Ignored) say so",
        False,
        commands=("serve", "batch"),
        parse=parse_bool,
    )
    refuse_unsupported_tools: bool = setting(
        "server",
        "refuse a request of /v1/responses or /v1/messages that declares tools which this server can't offer "
        "to a model (web_search, custom, ...), instead of leaving these tools out",
        False,
        commands=("serve", "batch"),
        parse=parse_bool,
    )
    allow_special_tokens_in_content: bool = setting(
        "server",
        "the name of a control token in a message, such as <|im_end|>, is this token; otherwise it is text, "
        "and no message can end its turn",
        False,
        commands=("serve", "batch"),
        parse=parse_bool,
    )
    enable_force_include_usage: bool = setting(
        "server",
        "every stream has the usage in each chunk and at its end, whatever its stream_options say",
        False,
        parse=parse_bool,
    )
    return_tokens_as_token_ids: bool = setting(
        "server",
        "log-probabilities name tokens by their ids, as token_id:7, unless a request says otherwise",
        False,
        commands=("serve", "batch"),
        parse=parse_bool,
    )
    ui: bool = setting("server", "serve a web page at /", True, parse=parse_bool)
    scheduling_policy: SchedulingPolicy = setting(
        "server",
        "which request comes next; fcfs: by arrival and by clients' shares; priority: first by the requests' "
        "own priority, for clients that can be trusted with it",
        "fcfs",
        commands=("serve", "batch"),
        choices=get_args(SchedulingPolicy),
    )
    shutdown_timeout: float = setting(
        "server",
        "seconds that running requests have to finish after SIGTERM or Ctrl-C, while new ones get a 503",
        30.0,
        parse=parse_seconds,
        metavar="SECONDS",
    )
    log_level: str = setting(
        "logging",
        "least severe messages to log",
        "info",
        choices=("debug", "info", "warning", "error"),
        tags=("worker",),
    )
    log_format: str = setting(
        "logging",
        "text: lines for people; json: an object per line, for programs",
        "text",
        choices=("text", "json"),
        tags=("worker",),
    )
    otlp_traces_endpoint: str | None = setting(
        "logging",
        "OpenTelemetry collector that gets a span per request (OTLP over HTTP), such as "
        "http://localhost:4318/v1/traces; needs the extra penstock-llm[otel]",
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
            raise ConfigError("--ssl-keyfile needs its certificate: add --ssl-certfile FILE")
        if self.allow_runtime_lora_updating and not self.lora_memory:
            raise ConfigError("--allow-runtime-lora-updating needs room for adapters: add --lora-memory SIZE")

    @property
    def chat_rules(self) -> ChatRules:
        return ChatRules(self.tool_call_parser, self.reasoning_parser, self.allow_special_tokens_in_content)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model's names for clients; answers have the first one. A model given as a path has the folder's
        name: clients need not know paths of the server."""
        is_path = self.model.startswith(("/", "."))
        own_name = Path(self.model).resolve().name if is_path else self.model
        return self.served_model_name or (own_name,)

    @property
    def soft_prompts(self) -> dict[str, Path]:
        """The files of soft prompts by their names. Raises ConfigError for what is no NAME=FILE."""
        return _named("--soft-prompt", "FILE", self.soft_prompt)

    @property
    def adapters(self) -> dict[str, Path]:
        """The folders of adapters by their names. Raises ConfigError for what is no NAME=FOLDER, and for a
        name of the model."""
        found = _named("--lora", "FOLDER", self.lora)
        if taken := found.keys() & {self.model, *self.model_names}:
            raise ConfigError(f"--lora {min(taken)}: this is a name of the model; take another one")
        return found

    def engine_config(self) -> EngineConfig:
        """The engine's settings. Raises ConfigError for values that the engine refuses."""
        values = {}
        for field in dataclasses.fields(self):
            if (name := field.metadata["engine_field"]) is not None:
                value = getattr(self, field.name)
                values[name(value) if callable(name) else name] = value
        if self._shows_streaming:
            values["num_resident_layers"] = DEMO_RESIDENT_LAYERS
        values["adapters"] = tuple((name, str(folder)) for name, folder in self.adapters.items())
        return EngineConfig(**values | self._speculative_values())

    @property
    def _shows_streaming(self) -> bool:
        """Whether the demo model is served, and nobody says how much of it stays in memory."""
        told = (self.resident_layers, self.host_memory, self.device_memory)
        return self.model == "demo" and all(each is None for each in told)

    def _speculative_values(self) -> dict[str, Any]:
        if self.speculative_config is None:
            return {}
        if self.speculation == "off":
            raise ConfigError("--speculation off has no guesses: leave --speculative-config out")
        if self.draft_model is not None:
            raise ConfigError('--draft-model is the "model" of --speculative-config: leave one of them out')
        if self.mtp == "off" and self.speculative_config.is_mtp:
            raise ConfigError("--mtp off has no head that guesses: leave one of the two out")
        return self.speculative_config.engine_values()


def _named(flag: str, what: str, texts: Sequence[str]) -> dict[str, Path]:
    """Paths by their names. Raises ConfigError for a text that is no NAME=PATH, and for a second one of a
    name."""
    found: dict[str, Path] = {}
    for text in texts:
        name, _, path = text.partition("=")
        if not name or not path or name in found:
            raise ConfigError(f"{flag} {text}: write NAME={what}, with another name for each {what.lower()}")
        found[name] = Path(path)
    return found
