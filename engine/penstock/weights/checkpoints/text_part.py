"""The text part of a multimodal model. Its config.json has the text model's numbers in `text_config`, and the
text model's tensors have longer names, beside tensors of the part that sees."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from penstock.weights.checkpoints.checkpoint import Checkpoint

#: Multimodal architectures whose text part, given text alone, is a text model of its own; and the type of
#: this model where `text_config` does not tell.
_MULTIMODAL = {
    "AyaVisionForConditionalGeneration": "cohere2",
    "Cohere2VisionForConditionalGeneration": "cohere2",
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Gemma3nForConditionalGeneration": "gemma3n_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified_text",
    "Llama4ForConditionalGeneration": "llama4_text",
    "LlavaForConditionalGeneration": "llama",
    "LlavaNextForConditionalGeneration": "llama",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
}
#: The architectures of text models, by type.
_TEXT_MODELS = {
    "cohere2": "Cohere2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
}
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
#: Keys of the whole that hold for its text part, too.
_SHARED = ("bos_token_id", "eos_token_id", "quantization_config", "tie_word_embeddings")
#: Beginnings of names in such checkpoints, and what the text model alone has in their place.
_RENAMED = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
#: Tensors of the parts that see and hear.
_VISION = re.compile(
    r"^(model\.)?((vision_tower|vision_model|vision_embedder|visual|multi_modal_projector|audio_tower"
    r"|embed_vision|embed_audio)\.|image_newline$)"
)


def is_multimodal(config: dict[str, Any]) -> bool:
    """Whether this is the config.json of a multimodal model with a text part that is computed."""
    return isinstance(config.get("text_config"), dict) and _text_type(config) in _TEXT_MODELS


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The text part's config; the config itself if this is no multimodal model that is known."""
    if not is_multimodal(config):
        return config
    kind = _text_type(config)
    shared = {name: config[name] for name in _SHARED if config.get(name) is not None}
    text: dict[str, Any] = _DEFAULTS.get(kind, {}) | config["text_config"]
    return text | shared | {"architectures": [_TEXT_MODELS[kind]], "model_type": kind}


def text_tensors(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the text part's tensors, under the names that the text model alone gives them.
    Tensors with unknown names stay."""
    kept = [entry for name, entry in checkpoint.entries.items() if not _VISION.match(name)]
    renamed = [replace(entry, name=text_name(entry.name)) for entry in kept]
    return Checkpoint(
        checkpoint.folder,
        checkpoint.config,
        {entry.name: entry for entry in renamed},
        checkpoint.idle,
        checkpoint.requantized,
        checkpoint.pickles,
    )


def _text_type(config: dict[str, Any]) -> str:
    """The type of the text model; "" if the architecture is not known to be multimodal."""
    names = config.get("architectures")
    known = [name for name in names if name in _MULTIMODAL] if isinstance(names, list) else []
    return str(config["text_config"].get("model_type") or _MULTIMODAL[known[0]]) if known else ""


def text_name(name: str) -> str:
    """The name that the text model alone gives a tensor or module of a multimodal model."""
    for beginning, instead in _RENAMED:
        if name.startswith(beginning):
            return instead + name.removeprefix(beginning)
    return name


def whole_names(name: str) -> list[str]:
    """text_name() backwards: the names that a module of a text model may have in the files of a multimodal
    one, the text model's own first."""
    return [name, *(old + name.removeprefix(new) for old, new in _RENAMED if name.startswith(new))]
