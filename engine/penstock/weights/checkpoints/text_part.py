"""The text part of a multimodal model. Its config.json has the text model's numbers under a key of their own
(`text_config`), and the text model's tensors have longer names, beside tensors of the parts that see and
hear."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.multimodal import (
    OTHER_PART,
    PART_KEYS,
    PART_OF,
    RENAMED,
    SAME_AS,
    TEXT_KEYS,
    TEXT_MODELS,
    WHOLES,
)
from penstock.weights.checkpoints.tensor_entry import TensorEntry

_GEMMA4 = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
    "vocab_size": 262144,
}  # fmt: skip
#: Numbers of a text model that its `text_config` may leave out, since they are its class's own. (Text models
#: alone name them all.)
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6, "sliding_window": 4096,
    },
    "gemma3n_text": {
        "hidden_size": 2048, "num_hidden_layers": 35, "num_attention_heads": 8, "vocab_size": 262400,
        "max_position_embeddings": 32768,
    },
    "gemma4_text": _GEMMA4 | {"max_position_embeddings": 131072},
    "gemma4_unified_text": _GEMMA4 | {"max_position_embeddings": 262144},
    "glm4": {"partial_rotary_factor": 1.0},
    "llama": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "vocab_size": 32000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    },
    "mistral": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6, "sliding_window": 4096,
    },
    "qwen3_5_moe_text": {
        "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2,
        "vocab_size": 248320, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    },
    "qwen3_5_text": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": 248320, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
    },
}  # fmt: skip
#: What a text part has whatever its config says.
_ALWAYS: dict[str, dict[str, Any]] = {"glm_ocr_text": {"attention_bias": False}}
#: Keys of the whole that hold for its text part, too.
_SHARED = ("bos_token_id", "eos_token_id", "quantization_config", "tie_word_embeddings")
#: Parameters of rope that have no say where a token's position is the same on all axes.
_AXES = ("mrope_section", "mrope_interleaved", "xdrope_section")


def is_multimodal(config: dict[str, Any]) -> bool:
    """Whether this is the config.json of a multimodal model with a text part that is computed."""
    return _text_type(config) in TEXT_MODELS


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The text part's config; the config itself if this is no multimodal model that is known."""
    if not is_multimodal(config):
        return config
    kind = _text_type(config)
    shared = {name: config[name] for name in _SHARED if config.get(name) is not None}
    text: dict[str, Any] = _DEFAULTS.get(kind, {}) | (_text_numbers(config) or {})
    always = _ALWAYS.get(str(text.get("model_type")), {})
    return _without_axes(text) | always | shared | {"architectures": [TEXT_MODELS[kind]], "model_type": kind}


def other_parts(config: dict[str, Any]) -> str:
    """What a multimodal model reads or makes beside text, by its config.json, as words for people; "" for a
    text model."""
    if not is_multimodal(config):
        return ""
    keys = {*config, *(config.get("thinker_config") or {})}
    found = dict.fromkeys(part for key, part in PART_KEYS.items() if key in keys)
    return ", ".join(found) or "what is no text"


def text_tensors(checkpoint: Checkpoint) -> tuple[Checkpoint, dict[str, int]]:
    """The checkpoint with the text part's tensors, under the names that the text model alone gives them; and
    the bytes of each module of the other parts. Tensors with unknown names stay."""
    kept, left_out = dict[str, TensorEntry](), dict[str, int]()
    for name, entry in checkpoint.entries.items():
        if (other := OTHER_PART.match(name)) is not None:
            left_out[other[1]] = left_out.get(other[1], 0) + entry.num_bytes
        else:
            kept[text_name(name)] = replace(entry, name=text_name(name))
    text = Checkpoint(
        checkpoint.folder,
        checkpoint.config,
        kept,
        checkpoint.idle,
        checkpoint.requantized,
        checkpoint.pickles,
    )
    return text, left_out


def told(left_out: dict[str, int]) -> str:
    """The modules of other parts in words for people."""
    modules = (f"{name} ({PART_OF[name]}, {size / 1e9:.2g} GB)" for name, size in left_out.items())
    return ", ".join(modules)


def _text_type(config: dict[str, Any]) -> str:
    """The type of the text model; "" if the architecture is not known to be multimodal."""
    names = config.get("architectures")
    known = [name for name in names if name in WHOLES] if isinstance(names, list) else []
    if not known or (text := _text_numbers(config)) is None:
        return ""
    kind = str(text.get("model_type") or WHOLES[known[0]])
    return SAME_AS.get(kind, kind)


def _text_numbers(config: dict[str, Any]) -> dict[str, Any] | None:
    """The text model's numbers in the whole's config; None if there are none."""
    for keys in TEXT_KEYS:
        found: Any = config
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        if isinstance(found, dict):
            return found
    if not isinstance(config.get("vision_config"), dict) or "hidden_size" not in config:
        return None
    others = (*PART_KEYS, "architectures", "model_type")
    return {name: value for name, value in config.items() if name not in others}


def _without_axes(text: dict[str, Any]) -> dict[str, Any]:
    """The config of a model whose rope has several axes as that of one with the same position on each."""
    changed = dict[str, Any]()
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(found := text.get(name), dict) and not {*_AXES}.isdisjoint(found):
            own = {key: value for key, value in found.items() if key not in _AXES}
            kinds = {key: "default" for key in ("type", "rope_type") if own.get(key) == "mrope"}
            changed[name] = own | kinds
    return text | changed


def text_name(name: str) -> str:
    """The name that the text model alone gives a tensor or module of a multimodal model."""
    for beginning, instead in RENAMED:
        if name.startswith(beginning):
            return instead + name.removeprefix(beginning)
    return name


def whole_names(name: str) -> list[str]:
    """text_name() backwards: the names that a module of a text model may have in the files of a multimodal
    one, the text model's own first."""
    return [name, *(old + name.removeprefix(new) for old, new in RENAMED if name.startswith(new))]
