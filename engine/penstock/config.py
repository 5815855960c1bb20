"""EngineConfig: each setting of the engine once, with its unit and default, validated once."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

from penstock.errors import ConfigError
from penstock.goes_with import Feature, check_together
from penstock.kernel_tuning import KernelTuning

logger = logging.getLogger(__name__)

Activations = Literal["int16", "int8"]
KVDtype = Literal["float16", "float32", "int8"]
KernelChoice = Literal["auto", "native", "torch", "reference"]
#: Up to 128 inputs, a group's exact sum times its scale is exact in float64, however it is computed.
GROUP_SIZES = (32, 64, 128)
#: Those that kernels compute. Nobody chooses 16, but some files have them: types of GGUF, NVFP4.
COMPUTED_GROUP_SIZES = (16, *GROUP_SIZES)
#: What 8-bit activations cost a real model: its distance from its own weights in float32, measured as
#: docs/measured/fidelity.md says.
INT8_ACTIVATIONS_COST = "KL 4.4e-2 from its own weights where int16 has 2e-6, perplexity 3% higher"
WeightBits = Literal["int8", "int4", "int3", "int2", "planes"]
#: Inputs that share a scale in codes of few bits, where no number is given.
CODE_GROUP_SIZES: dict[str, int] = {"int4": 64, "int3": 64, "int2": 32}
#: The numbers that may be given for 3 and 2 bits.
LOW_GROUP_SIZES = (32, 64)
ModelImpl = Literal["auto", "penstock", "transformers"]
SpeculationMode = Literal["auto", "off"]
Runner = Literal["auto", "generate", "pooling"]
PoolingChoice = Literal["auto", "cls", "last", "mean"]
MTPMode = Literal["auto", "on", "off"]
DraftDevice = Literal["auto", "cpu"]
ShareMode = Literal["auto", "off"]


def card_number(device: str) -> int | None:
    """The number of the GPU that a device names: 0 for "cuda" and "cuda:0", 1 for "cuda:1". None: "cpu" or
    "auto", which name none. Raises ConfigError for any other text."""
    if device in ("auto", "cpu"):
        return None
    found = re.fullmatch(r"cuda(?::([0-9]{1,3}))?", device, re.ASCII) if isinstance(device, str) else None
    if found is None:
        raise ConfigError(
            f"device is {device!r}; choose auto, cpu, cuda, or a GPU by its number: cuda:0, cuda:1"
        )
    return int(found[1] or 0)


#: ZeroMQ counts messages in 32 bits, and the end of a replay is one more.
_MAX_BATCHES = 2**31 - 2


@dataclass(frozen=True)
class KVEventsConfig:
    """Events of the prefix cache for routers, over ZeroMQ. Names and defaults are vLLM's."""

    #: Where the PUB socket is. It is bound if there is a "*" or "::" in its address, and for ipc:// and
    #: inproc://; else it connects.
    endpoint: str = "tcp://*:5557"
    #: Where a ROUTER socket sends batches again that a subscriber has missed. None: nowhere.
    replay_endpoint: str | None = None
    #: Batches that are kept for that. A step is a batch.
    buffer_steps: int = 10_000
    #: Batches that may wait for one subscriber, and those that may wait to be sent at all.
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= _MAX_BATCHES:
                raise ConfigError(
                    f"kv_events: {name} is {value!r}; it must be a whole number from 1 to {_MAX_BATCHES}"
                )
        for name in ("endpoint", "replay_endpoint", "topic"):
            value = getattr(self, name)
            is_left_out = value is None and name == "replay_endpoint"
            if not is_left_out and (not isinstance(value, str) or (not value and name != "topic")):
                raise ConfigError(f"kv_events: {name} is {value!r}; write a text such as tcp://*:5557")


@dataclass(frozen=True)
class EngineConfig:
    """What a user may decide about an engine. "auto" and None are resolved when it starts."""

    #: Precision of activations in INT8 products. "int16" splits each row of activations into two INT8 rows
    #: (W8A16). "int8" is one row per token (W8A8): faster for large batches, and less exact
    #: (INT8_ACTIVATIONS_COST).
    activations: Activations = "int16"
    #: Number of inputs that share a scale, for checkpoints that are quantized while they are loaded: 32, 64
    #: or 128; 0: all inputs of an output channel. None: the groups of the files where these have some (GGUF,
    #: FP8), otherwise one scale per output channel for INT8, and groups of 64 for INT4 and INT3, 32 for
    #: INT2.
    group_size: int | None = None
    #: What unquantized checkpoints become while they are loaded: INT8; or 4, 3 or 2 bits in the layers'
    #: matrices; or INT8 there, whose upper and lower 4 bits lie apart, which can be made of INT8 checkpoints,
    #: too.
    weights: WeightBits = "int8"
    #: The dtype in which K and V are stored: "int8" with a scale for each head of each token.
    kv_dtype: KVDtype = "float16"
    #: What computes: a GPU by its number ("cuda:1" is the second one, "cuda" the first), the processor
    #: ("cpu"), or "auto": the first GPU if there is one.
    device: str = "auto"
    #: A card leaves a share of each product to the processor, where the model doesn't fit into the card's
    #: memory and this should be faster ("auto"), or computes all products itself ("off"). No answer depends
    #: on it.
    share_products: ShareMode = "auto"
    #: Bytes that the engine may take on the host: weights, staging, K and V, activations. The memory that
    #: Python and torch need themselves is not counted. None: nine tenths of the memory that is free.
    host_memory_bytes: int | None = None
    #: Bytes that the engine may take on the GPU, the CUDA context included. None: all that is free.
    device_memory_bytes: int | None = None
    #: Bytes for K and V. None: enough for `max_num_seqs` sequences of 2048 tokens (or of the context, if
    #: shorter) and for one of full context, but at most an eighth of the budget if not all layers fit.
    kv_cache_bytes: int | None = None
    #: The size of the KV cache in tokens.
    num_kv_tokens: int | None = None
    #: The size of the KV cache as a share, between 0 and 1, of the budget of the device that computes.
    kv_cache_share: float | None = None
    #: Bytes for recurrent states, in models that have some. None: an eighth of the budget of the device that
    #: computes, or less if this is more than `max_num_seqs` sequences need. What drafts take is in addition
    #: to it (StateSlots).
    state_bytes: int | None = None
    #: Tokens per KV block.
    block_size: int = 16
    #: Longest sequence in tokens, prompt and answer together. None: the context that the model was made for,
    #: or fewer if the KV cache holds fewer.
    max_model_len: int | None = None
    #: Most sequences in a step.
    max_num_seqs: int = 64
    #: Most sequences that wait for a place in a step, beside those that run; AsyncEngine refuses more.
    max_queued_seqs: int = 1024
    #: Most tokens in a step. A long prompt advances by chunks, each as large as the room left in a step.
    max_num_batched_tokens: int = 512
    #: Seconds that a step should take at most. With a target, long prompts advance by smaller chunks, and
    #: answers flow beside them. A chunk that fits into the time in which layers are read is taken anyway.
    #: None or 0: no target.
    step_time_target_s: float | None = None
    #: Keep computed keys and values, while there is room, for later prompts that begin with the same tokens.
    enable_prefix_caching: bool = True
    #: A folder for keys and values that outlive the engine's memory, and the engine. None: nothing is kept.
    kv_disk: str | None = None
    #: The most bytes of keys and values there, of all models together. None: 16 GiB.
    kv_disk_bytes: int | None = None
    #: Bytes of the host's memory for blocks of keys and values of a GPU, which come back from there sooner
    #: than from disk. None: none.
    kv_host_bytes: int | None = None
    #: A folder for a temporary file with the keys and values that have no room in memory, so that a sequence
    #: may be longer than the KV cache. None: the folder of kv_disk, if max_model_len asks for it.
    kv_spill: str | None = None
    #: The same on a GPU: bytes of the host's memory in place of a file. None: none.
    kv_spill_bytes: int | None = None
    #: Tell routers which blocks the prefix cache holds. None: nobody is told.
    kv_events: KVEventsConfig | None = None
    #: Layers that stay in memory; the others are read in each sweep. None: as many as fit.
    num_resident_layers: int | None = None
    #: Threads for arithmetic. None: the physical cores this process may use.
    num_threads: int | None = None
    #: Which kernels: "native" (compiled C; CUDA on a GPU), "torch" (torch's integer operators),
    #: "reference" (plain torch, slow), "auto" (native if it was compiled, else torch).
    kernels: KernelChoice = "auto"
    #: Parameters of the native kernels for the processor. None: those that were measured on this machine, or
    #: without measurements the defaults.
    kernel_tuning: KernelTuning | None = None
    #: Whose code computes the layers: a family of Penstock's own ("penstock"), transformers' modules with our
    #: products and attention in them ("transformers"), or "auto": the own family if there is one.
    model_impl: ModelImpl = "auto"
    #: What a model is for: text ("generate"), or vectors and scores ("pooling"). "auto": pooling for folders
    #: of sentence-transformers, for encoders and for models with a layer for scores, else generate.
    runner: Runner = "auto"
    #: How a pooling model makes one vector of a text's hidden states: the first token's, the last token's, or
    #: their mean. "auto": as the folder says; without a word there, the mean for encoders, else the last.
    pooling: PoolingChoice = "auto"
    #: The tokens that say "no" and "yes", of a model that generates and that scores pairs of texts with them
    #: (Qwen3-Reranker). (): the folder says so, or the model is none.
    score_tokens: tuple[str, ...] = ()
    #: Compute guesses of the next tokens in the same step where they should pay ("auto"), or never ("off").
    #: Guesses come from prompt and answer, from what the model found likely before, and from draft_model. No
    #: answer depends on them.
    speculation: SpeculationMode = "auto"
    #: A small model (a folder, a .gguf file or a hub repository) that guesses, too. It stays in memory,
    #: within the budget, and has the same vocabulary. Or an EAGLE-3 head that was trained for the model: its
    #: config.json tells.
    draft_model: str | None = None
    #: Where draft_model is computed: where the model is, if it stays in memory there ("auto"), or on the
    #: processor ("cpu"). A head of multi-token prediction is computed where the model is.
    draft_device: DraftDevice = "auto"
    #: Refuse a draft_model that is no EAGLE-3 head.
    draft_with_eagle3: bool = False
    #: A head of multi-token prediction that came with the model guesses, too: where it can and there is no
    #: draft model ("auto"), "on" (refused where it can't), or "off". It takes memory within the budget.
    mtp: MTPMode = "auto"
    #: The upper planes of the model's own weights guess (weights "planes"), where they all stay in memory. A
    #: draft_model beside them is left out, with a warning.
    draft_with_planes: bool = False
    #: Most guesses of one sequence in a step.
    max_guesses: int = 32
    #: A text is looked up where it has stood before: where at least so many tokens at its end are the same.
    #: Places are compared by so many tokens at most.
    prompt_lookup_min: int = 1
    prompt_lookup_max: int = 32
    #: Adapters (LoRA, folders as PEFT writes them) that are loaded at the start: (name, folder).
    adapters: tuple[tuple[str, str], ...] = ()
    #: Host memory that an automatic budget leaves to requests beside the other spare memory, where more is
    #: wanted than this has room for.
    request_bytes: int | None = None
    #: Bytes for adapters. None: as many as `adapters` take.
    adapter_bytes: int | None = None
    #: Refuse to start if something can't be as it was planned (memory that can't be pinned, a disk without
    #: direct reads, a budget larger than the free memory). False: warn, and start.
    strict_plan: bool = False
    #: Load a checkpoint although it holds tensors that the model does not know.
    ignore_unexpected_tensors: bool = False
    #: Load a GGUF file although its tokenizer splits words by rules that are not known: by the usual rules,
    #: with which some texts get other tokens than those that the model knows. False: refuse the file.
    guess_tokenizer: bool = False
    #: Read weights that exist only as pickles. A reader of our own finds the tensors; nothing of a pickle is
    #: ever run. False: refuse such weights.
    allow_pickle: bool = False

    @property
    def rows_per_token(self) -> int:
        """Rows of INT8 that a token's activations become in a product."""
        return 2 if self.activations == "int16" else 1

    @property
    def features(self) -> frozenset[Feature]:
        """What this config asks for, as far as it can't be had beside everything else."""
        asked = {
            Feature.NO_SPECULATION: self.speculation == "off",
            Feature.DRAFT_MODEL: self.draft_model is not None and not self.draft_with_eagle3,
            Feature.EAGLE3: self.draft_with_eagle3,
            Feature.MTP: self.mtp == "on",
            Feature.PLANES: self.draft_with_planes,
            Feature.NO_PREFIX_CACHING: not self.enable_prefix_caching,
            Feature.KV_DISK: self.kv_disk is not None,
            Feature.KV_HOST: self.kv_host_bytes is not None,
            Feature.KV_SPILL: self.kv_spill is not None,
            Feature.KV_SPILL_MEMORY: self.kv_spill_bytes is not None,
            Feature.KV_EVENTS: self.kv_events is not None,
            Feature.KV_INT8: self.kv_dtype == "int8",
            Feature.LORA: bool(self.adapters or self.adapter_bytes),
            Feature.GENERATE: self.runner == "generate",
            Feature.POOLING: self.pooling != "auto" or bool(self.score_tokens),
            Feature.THROUGH_TRANSFORMERS: self.model_impl == "transformers",
            Feature.TORCH_KERNELS: self.kernels in ("torch", "reference"),
            Feature.TUNING: self.kernel_tuning is not None,
            Feature.DEVICE_MEMORY: self.device_memory_bytes is not None,
        }
        return frozenset(feature for feature, is_asked in asked.items() if is_asked)

    @property
    def spill_folder(self) -> str | None:
        """Where keys and values lie that have no room in memory; None: they have to have room. Upper planes
        that guess need all of a sequence in memory."""
        is_asked = self.max_model_len is not None and not self.draft_with_planes
        return self.kv_spill or (self.kv_disk if is_asked else None)

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers()
        check_together(self.features)
        if self.draft_with_planes and self.draft_model is not None:
            logger.warning(
                "one drafter guesses: upper planes do, and the draft model %s is left out. A later release "
                "refuses the two together",
                self.draft_model,
            )
            object.__setattr__(self, "draft_model", None)
        if self.draft_with_eagle3 and self.draft_model is None:
            raise ConfigError("draft_with_eagle3 says of draft_model that it is an EAGLE-3 head: name it")
        self._check_keys_and_values()

    def _check_choices(self) -> None:
        for name, choices in (
            ("activations", Activations),
            ("weights", WeightBits),
            ("kv_dtype", KVDtype),
            ("kernels", KernelChoice),
            ("model_impl", ModelImpl),
            ("speculation", SpeculationMode),
            ("runner", Runner),
            ("pooling", PoolingChoice),
            ("draft_device", DraftDevice),
            ("mtp", MTPMode),
            ("share_products", ShareMode),
        ):
            if getattr(self, name) not in get_args(choices):
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}; choose one of {', '.join(get_args(choices))}"
                )
        card_number(self.device)
        if len(self.score_tokens) not in (0, 2):
            raise ConfigError(
                f"score_tokens has {len(self.score_tokens)} texts; it takes the token that says no and the "
                "one that says yes"
            )
        if self.group_size not in (None, 0, *GROUP_SIZES):
            raise ConfigError(f"group_size is {self.group_size}; choose one of {(0, *GROUP_SIZES)}, or none")
        sizes = GROUP_SIZES if self.weights == "int4" else LOW_GROUP_SIZES
        if self.weights in CODE_GROUP_SIZES and self.group_size not in (None, *sizes):
            raise ConfigError(
                f"group_size is {self.group_size}, and weights of {self.weights[3:]} bits need groups of "
                f"inputs: choose one of {sizes}, or none"
            )

    def _check_numbers(self) -> None:
        for name, least in (
            ("host_memory_bytes", 1),
            ("device_memory_bytes", 1),
            ("kv_cache_bytes", 1),
            ("kv_disk_bytes", 1),
            ("kv_host_bytes", 1),
            ("kv_spill_bytes", 1),
            ("num_kv_tokens", 1),
            ("state_bytes", 1),
            ("max_model_len", 2),
            ("max_num_seqs", 1),
            ("max_queued_seqs", 0),
            ("max_num_batched_tokens", 1),
            ("num_resident_layers", 0),
            ("num_threads", 1),
            ("max_guesses", 1),
            ("prompt_lookup_min", 1),
            ("request_bytes", 1),
            ("adapter_bytes", 0),
            ("prompt_lookup_max", self.prompt_lookup_min),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}")
        if self.step_time_target_s is not None and not 0 <= self.step_time_target_s < math.inf:
            raise ConfigError(
                f"step_time_target_s is {self.step_time_target_s}; it must be a number of seconds, or 0"
            )

    def _check_keys_and_values(self) -> None:
        sizes = (self.kv_cache_bytes, self.num_kv_tokens, self.kv_cache_share)
        if sum(size is not None for size in sizes) > 1:
            raise ConfigError(
                "kv_cache_bytes, num_kv_tokens and kv_cache_share say the same thing; give one of them"
            )
        if self.kv_cache_share is not None and not 0 < self.kv_cache_share < 1:
            raise ConfigError(f"kv_cache_share is {self.kv_cache_share}; it must be between 0 and 1")
        if self.kv_disk_bytes is not None and self.kv_disk is None:
            raise ConfigError("kv_disk_bytes says how much a folder may hold: name the folder (kv_disk)")
        # The native attention kernel works on 16 keys at a time.
        if self.block_size <= 0 or self.block_size % 16:
            raise ConfigError(f"block_size is {self.block_size}; it must be a multiple of 16")


@dataclass(frozen=True)
class ResolvedConfig(EngineConfig):
    """An engine's config in which "auto" and None are decided. Budgets and sizes may still be None: the
    memory plan has decided those."""

    num_threads: int = 1
    max_model_len: int = 2

    @classmethod
    def of(cls, config: EngineConfig, max_model_len: int) -> ResolvedConfig:
        """Kernels, device and threads of `config` are decided already."""
        assert config.num_threads is not None and "auto" not in (config.kernels, config.device)
        return cls(**{**vars(config), "max_model_len": max_model_len})
