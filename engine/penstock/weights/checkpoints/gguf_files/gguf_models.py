"""A model in a GGUF file as if it were a Hugging Face folder: llama.cpp's numbers become a config.json, and
the tensors get the names and the order of the model's own code.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import CorruptFile, UnsupportedModel
from penstock.text.gguf_vocabulary import end_tokens
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.gguf_files.block_types import BY_NAME, GROUP
from penstock.weights.checkpoints.gguf_files.gguf_header import read_header
from penstock.weights.checkpoints.gguf_files.gguf_keys import check_keys, check_same
from penstock.weights.checkpoints.gguf_files.gguf_latents import DEEPSEEK
from penstock.weights.checkpoints.gguf_files.gguf_mixtures import MIXTURES, MixtureFile
from penstock.weights.checkpoints.gguf_files.gguf_numbers import Numbers, window_layers
from penstock.weights.checkpoints.gguf_files.gguf_rows import GgufRows, RowOrder, read_vector, renamed
from penstock.weights.checkpoints.tensor_entry import TensorEntry

NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
TOKENS = "tokenizer.ggml.tokens"
#: Factors of rope's frequencies, which belong in the config.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
#: Names of mixtures of types that Penstock reads, by `general.file_type` (llama.h: llama_ftype).
FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K",
    19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL",
    26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0",
    37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4", 40: "Q1_0", 41: "Q2_0",
}  # fmt: skip
_LAYER_NAME = re.compile(r"(?:blk\.(\d+)\.)?(.*)\.(weight|bias)")


@dataclass(frozen=True)
class _Architecture:
    model: str
    #: What config.json has beyond _config().
    config: Callable[[Numbers], dict[str, Any]] = lambda numbers: {}
    names: dict[str, str] = field(default_factory=dict)
    exchanges_rows: bool = False
    norm_offset: float = 0.0
    mixture: MixtureFile | None = None


def open_checkpoint(path: Path) -> Checkpoint:
    """A GGUF file as an unquantized checkpoint, with 4-bit codes where the file has them. Raises
    CheckpointNotFound, CorruptFile, UnsupportedModel."""
    numbers = Numbers(path, *read_header(path))
    entries = {entry.name: entry for entry in _entries(numbers)}
    return Checkpoint(
        path, _config(numbers), entries, requantized=_requantized(numbers), file_type=_file_type(numbers)
    )


def _file_type(numbers: Numbers) -> str:
    """The name of the file's mixture of types. A file that does not tell it is named after the type that most
    elements have."""
    named = FILE_TYPES.get(numbers.metadata.get("general.file_type", -1))
    if named is not None:
        return named
    kinds: Counter[str] = Counter()
    for entry in numbers.tensors.values():
        kinds[entry.dtype] += math.prod(entry.shape)
    return kinds.most_common(1)[0][0]


def _requantized(numbers: Numbers) -> str:
    """Which types become INT8, and how."""
    stored = {entry.dtype for entry in numbers.tensors.values()}
    kinds = [kind for name, kind in BY_NAME.items() if name in stored]
    found = sorted(kind.name for kind in kinds if kind.form is None and kind.integers is None)
    return f"{', '.join(found)}, which become INT8 in groups of {GROUP} inputs" if found else ""


def read_config(path: Path) -> dict[str, Any]:
    """The config in the form of config.json. Raises as open_checkpoint() does."""
    return _config(Numbers(path, *read_header(path)))


def _entries(numbers: Numbers) -> Iterator[TensorEntry]:
    architecture = _architecture(numbers)
    mixture = architecture.mixture
    names = NAMES | architecture.names | (mixture.names if mixture else {})
    for stored in numbers.tensors.values():
        match = _LAYER_NAME.fullmatch(stored.name)
        if stored.name in ROPE_TENSORS:
            continue
        if mixture and match and mixture.knows(match[2]):
            yield from mixture.entries(numbers, stored, (match[1], match[2], match[3]))
            continue
        if stored.name.endswith(".scale"):  # without it answers would be wrong
            raise UnsupportedModel(
                f"{numbers.path} has {stored.name}, a scale beside the blocks as NVFP4 may have it, by "
                "which Penstock does not multiply. Use a file with other types, or the original repository"
            )
        if match is None or match[2] not in names:
            yield stored  # the store does not know the name either, and says so
            continue
        layer = f"model.layers.{match[1]}." if match[1] else ""
        offset = architecture.norm_offset if match[2].endswith("norm") else 0.0
        is_exchanged = architecture.exchanges_rows and match[2] in ("attn_q", "attn_k")
        order = _exchanged(numbers, stored) if is_exchanged else RowOrder()
        rows = GgufRows(stored, order, offset)
        yield renamed(f"{layer}{names[match[2]]}.{match[3]}", rows)


def _exchanged(numbers: Numbers, stored: TensorEntry) -> RowOrder:
    """The order of rows of q or k. Raises CorruptFile."""
    head_dim = numbers.head_dim
    if head_dim % 2 or not stored.shape or stored.shape[0] % head_dim:
        raise CorruptFile(
            f"{numbers.path}: tensor {stored.name} of shape {list(stored.shape)} has no whole heads of "
            f"{head_dim} rows; download the file again"
        )
    return RowOrder(head_dim)


def _architecture(numbers: Numbers) -> _Architecture:
    mixtures: dict[str, MixtureFile] = MIXTURES | {"deepseek2": DEEPSEEK}
    known = mixtures if numbers.get("expert_count") else {name: None for name in ARCHITECTURES}
    if numbers.architecture not in known:
        what = "a mixture of experts" if numbers.get("expert_count") else "a model"
        raise UnsupportedModel(
            f"{numbers.path} holds {what} of architecture {numbers.architecture!r}; of GGUF files Penstock "
            f"reads {', '.join(ARCHITECTURES)}, and mixtures of {', '.join(mixtures)}. Use the original "
            "repository if that is supported"
        )
    if mixture := known[numbers.architecture]:
        return _Architecture(mixture.model, exchanges_rows=mixture.exchanges_rows, mixture=mixture)
    return ARCHITECTURES[numbers.architecture]


def _config(numbers: Numbers) -> dict[str, Any]:
    architecture, head_dim = _architecture(numbers), numbers.head_dim
    mixture = architecture.mixture
    if not numbers.is_latent and numbers.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{numbers.path} has keys and values of different lengths")
    num_layers = numbers.integer("block_count")
    if num_layers > len(numbers.tensors):
        raise CorruptFile(f"{numbers.path} claims {num_layers} layers and has {len(numbers.tensors)} tensors")
    for name in ("token_embd.weight", f"blk.{num_layers - 1}.attn_norm.weight"):
        if not numbers.tensors.get(name) or not numbers.tensors[name].shape:
            raise CorruptFile(f"{numbers.path} has no {name}; download it again")
    num_rows, tokens = numbers.tensors["token_embd.weight"].shape[0], numbers.metadata.get(TOKENS)
    if isinstance(tokens, list) and len(tokens) > num_rows:
        raise CorruptFile(
            f"{numbers.path} has {len(tokens)} tokens and an embedding of {num_rows}; download it again"
        )
    rope = _rope(numbers)
    config: dict[str, Any] = {
        "architectures": [f"{architecture.model}ForCausalLM"],
        "model_type": numbers.architecture,
        "hidden_size": numbers.integer("embedding_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": numbers.num_heads,
        "num_key_value_heads": numbers.integer("attention.head_count_kv", numbers.num_heads),
        "head_dim": head_dim,
        "intermediate_size": mixture.width(numbers) if mixture else numbers.integer("feed_forward_length"),
        "vocab_size": num_rows,
        "max_position_embeddings": numbers.integer("context_length"),
        "rms_norm_eps": numbers.real("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in numbers.tensors,
        "rope_parameters": rope,
        "bos_token_id": numbers.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_tokens(numbers.metadata) or None,
        "pad_token_id": None,  # without this, transformers takes the number of the first model of this kind
    }
    config |= mixture.config(numbers, rope) if mixture else architecture.config(numbers)
    check_keys(numbers, rope["rope_type"])
    return config


def _rope(numbers: Numbers) -> dict[str, Any]:
    """`rope_parameters` of config.json. Raises UnsupportedModel for a scaling that is not known."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": numbers.real("rope.freq_base", 10000.0)}
    num_rotated = numbers.integer("rope.dimension_count", numbers.head_dim)
    share = num_rotated / numbers.head_dim
    if share > 1 or (share < 1 and numbers.architecture != "phi3"):
        raise UnsupportedModel(
            f"{numbers.path} rotates {share:.0%} of each head; Penstock rotates whole heads, and parts for "
            "phi3 only"
        )
    if share < 1:
        rope["partial_rotary_factor"] = share
    if numbers.architecture != "gemma3":
        why = "Penstock computes all layers with the base of rope.freq_base"
        check_same(numbers, "rope.freq_base_swa", rope["rope_theta"], why)
    kind = numbers.get("rope.scaling.type", "linear")
    factor = numbers.real("rope.scaling.factor", numbers.real("rope.scale_linear", 1.0))
    factor = 1.0 if kind == "none" or factor == 0 else factor
    stored = [numbers.tensors[name] for name in ROPE_TENSORS if name in numbers.tensors]
    if stored and factor != 1:
        raise UnsupportedModel(
            f"{numbers.path} has factors of rope's frequencies ({stored[0].name}) and a rope scaling of "
            f"{factor:g}; Penstock computes with one of the two"
        )
    if stored:
        return rope | _by_factors(numbers, [read_vector(entry, num_rotated // 2) for entry in stored])
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModel(
            f"{numbers.path} has rope scaling {kind!r} without factors; there are: linear, yarn, longrope"
        )
    if factor == 1:
        return rope
    rope |= {"rope_type": kind, "factor": factor}
    return rope | (_yarn(numbers, factor) if kind == "yarn" else {})


def _by_factors(numbers: Numbers, factors: list[list[float]]) -> dict[str, Any]:
    """LongRoPE, with factors for short and long texts; or one list for all lengths, as files have the
    finished factors of Llama 3.1's scaling."""
    attention = numbers.real("rope.scaling.attn_factor", 0.0)
    rope: dict[str, Any] = {"rope_type": "longrope", "long_factor": factors[0], "short_factor": factors[-1]}
    if len(factors) == 2:
        original = numbers.integer("rope.scaling.original_context_length", 0)
        rope |= {"original_max_position_embeddings": original}
        return rope | ({"attention_factor": attention} if attention else {})
    length = numbers.integer("context_length")
    return rope | {
        "original_max_position_embeddings": length, "attention_factor": attention or 1.0, "factor": 1.0
    }  # fmt: skip


def _yarn(numbers: Numbers, factor: float) -> dict[str, Any]:
    """YaRN's numbers. `yarn_attn_factor` is config.json's attention_factor; `attn_factor` multiplies what
    YaRN has anyway."""
    rope: dict[str, Any] = {}
    if original := numbers.integer("rope.scaling.original_context_length", 0):
        rope["original_max_position_embeddings"] = original
    for name in ("beta_fast", "beta_slow"):
        if number := numbers.real(f"rope.scaling.yarn_{name}", 0.0):
            rope[name] = number
    attention = numbers.real("rope.scaling.yarn_attn_factor", 0.0)
    share = numbers.real("rope.scaling.attn_factor", 1.0)
    if share != 1:
        if numbers.is_latent:
            raise UnsupportedModel(
                f"{numbers.path} has {share} for {numbers.architecture}.rope.scaling.attn_factor, where "
                "Penstock knows 1"
            )
        attention = share * (attention or 1 + 0.1 * math.log(max(factor, 1.0)))
    return rope | ({"attention_factor": attention} if attention else {})


def _llama_config(numbers: Numbers) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_output.bias" in numbers.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in numbers.tensors,
    }


def _phi3_config(numbers: Numbers) -> dict[str, Any]:
    original = numbers.integer("rope.scaling.original_context_length", 0)
    return {
        "sliding_window": numbers.integer("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": original or numbers.integer("context_length"),
    }


def _gemma2_config(numbers: Numbers) -> dict[str, Any]:
    # Only the 27B models, of Gemma 2 and of 3, have another scale than their heads'. llama.cpp tells them by
    # the number of layers, too.
    is_27b = numbers.integer("block_count") == (62 if numbers.architecture == "gemma3" else 46)
    width = numbers.integer("embedding_length") // numbers.num_heads if is_27b else numbers.head_dim
    usual = 4096 if numbers.architecture == "gemma2" else 0
    window = numbers.integer("attention.sliding_window", usual)
    return {
        "query_pre_attn_scalar": width,
        "attn_logit_softcapping": numbers.real("attn_logit_softcapping", 0.0) or None,
        "final_logit_softcapping": numbers.real("final_logit_softcapping", 0.0) or None,
        "sliding_window": window or numbers.integer("context_length"),  # which no layer has then
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": window_layers(numbers, 2, window),
    }


def _gemma3_config(numbers: Numbers) -> dict[str, Any]:
    rope = _rope(numbers)
    own = {"rope_type": "default", "rope_theta": numbers.real("rope.freq_base_swa", 10000.0)}
    window = numbers.integer("attention.sliding_window", 0)
    return _gemma2_config(numbers) | {
        "model_type": "gemma3_text",
        "rope_parameters": {"full_attention": rope, "sliding_attention": own},
        "layer_types": window_layers(numbers, 6, window),
    }


ARCHITECTURES = {
    "llama": _Architecture("Llama", _llama_config, exchanges_rows=True),
    "qwen2": _Architecture("Qwen2"),
    "qwen3": _Architecture("Qwen3", _llama_config),
    "phi3": _Architecture("Phi3", _phi3_config, {"ffn_up": "mlp.gate_up_proj"}),
    "gemma2": _Architecture("Gemma2", _gemma2_config, GEMMA_NAMES, norm_offset=1.0),
    "gemma3": _Architecture("Gemma3", _gemma3_config, GEMMA_NAMES, norm_offset=1.0),
}
