"""Model types that are another model under other names: the keys of config.json and the tensors of their
files become those of the other model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.errors import WrongTensor
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.tensor_entry import TensorEntry


@dataclass(frozen=True)
class Alias:
    """What a model type is."""

    model_type: str
    architecture: str
    #: Numbers that its class has where config.json says nothing.
    defaults: dict[str, Any] = field(default_factory=dict, hash=False)
    #: Keys of config.json, and the other model's.
    keys: dict[str, str] = field(default_factory=dict, hash=False)
    #: Parts of tensors' names, as expressions, and what the other model has in their place.
    names: tuple[tuple[str, str], ...] = ()


_SARVAM_NAMES = (
    (r"^model\.word_embeddings\.", "model.embed_tokens."),
    (r"\.attention\.", ".self_attn."),
    (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
    (r"\.self_attn\.query_layernorm\.", ".self_attn.q_norm."),
    (r"\.self_attn\.key_layernorm\.", ".self_attn.k_norm."),
    (r"\.mlp\.gate\.expert_bias", ".mlp.gate.e_score_correction_bias"),
)
_SARVAM = {
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "n_shared_experts": 1, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
_SARVAM_KEYS = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "use_qkv_bias": "attention_bias",
}
#: By model_type.
ALIASES = {
    # Ling 3: its own names for Sarvam's modules, Kimi's for some numbers.
    "bailing_hybrid": Alias(
        "bailing_hybrid",
        "BailingHybridForCausalLM",
        {"tie_word_embeddings": False, "rms_norm_eps": 1e-6},
        {
            "model_max_length": "max_position_embeddings",
            "moe_renormalize": "norm_topk_prob",
            "num_expert_group": "n_group",
            "num_experts_per_token": "num_experts_per_tok",
            "num_shared_experts": "n_shared_experts",
        },
        (*_SARVAM_NAMES, (r"\.final_layernorm\.", ".shared_head.norm.")),
    ),
    "exaone": Alias(
        "llama",
        "LlamaForCausalLM",
        {"rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
        {
            "num_layers": "num_hidden_layers",
            "layer_norm_epsilon": "rms_norm_eps",
            "activation_function": "hidden_act",
        },
        (
            (r"^transformer\.wte\.", "model.embed_tokens."),
            (r"^transformer\.h\.", "model.layers."),
            (r"^transformer\.ln_f\.", "model.norm."),
            (r"\.attn\.attention\.", ".self_attn."),
            (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
            (r"\.ln_1\.", ".input_layernorm."),
            (r"\.ln_2\.", ".post_attention_layernorm."),
            (r"\.mlp\.c_fc_0\.", ".mlp.gate_proj."),
            (r"\.mlp\.c_fc_1\.", ".mlp.up_proj."),
            (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
        ),
    ),
    "sarvam_mla": Alias("deepseek_v3", "DeepseekV3ForCausalLM", _SARVAM, _SARVAM_KEYS, _SARVAM_NAMES),
    "sarvam_moe": Alias(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        _SARVAM | {"use_qk_norm": True, "head_dim": 64, "partial_rotary_factor": 1.0, "rope_theta": 8e6},
        _SARVAM_KEYS,
        _SARVAM_NAMES,
    ),
}
#: q, k and v in one tensor, one after the other.
FUSED = ".query_key_value."


def alias_of(config: dict[str, Any]) -> Alias | None:
    return ALIASES.get(str(config.get("model_type")))


def aliased_config(config: dict[str, Any]) -> dict[str, Any]:
    """The other model's config.json; the config itself if its model type is no alias."""
    if (alias := alias_of(config)) is None:
        return config
    found = alias.defaults | {alias.keys.get(name, name): value for name, value in config.items()}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := found.get(name), dict):
            kinds = {key: "yarn" for key in ("type", "rope_type") if rope.get(key) == "deepseek_yarn"}
            found[name] = rope | kinds
    if alias.model_type == "deepseek_v3":
        found.pop("head_dim", None)  # that of its latents
    return found | {"model_type": alias.model_type, "architectures": [alias.architecture]}


def aliased_tensors(stored: Checkpoint, alias: Alias) -> Checkpoint:
    """The checkpoint with the other model's names. `stored` has the other model's config. Raises
    WrongTensor."""
    entries = dict[str, TensorEntry]()
    for entry in stored.entries.values():
        name = entry.name
        for pattern, instead in alias.names:
            name = re.sub(pattern, instead, name)
        for one in (
            _apart(replace(entry, name=name), stored.config)
            if FUSED in name
            else (replace(entry, name=name),)
        ):
            entries[one.name] = one
    return Checkpoint(
        stored.folder,
        stored.config,
        entries,
        stored.idle,
        stored.requantized,
        stored.pickles,
        stored.file_type,
    )


def _apart(fused: TensorEntry, config: dict[str, Any]) -> Iterator[TensorEntry]:
    """q, k and v of a tensor that holds their rows."""
    heads = [int(config["num_attention_heads"]), *[int(config["num_key_value_heads"])] * 2]
    first, of_head = 0, int(config["head_dim"])
    if fused.decode is not None or not fused.shape or fused.shape[0] != of_head * sum(heads):
        raise WrongTensor(
            f"tensor {fused.name} in {fused.file} is {fused.dtype} {list(fused.shape)}; q, k and v of "
            f"{heads} heads of {of_head} have {of_head * sum(heads)} rows together"
        )
    row_bytes = fused.num_bytes // fused.shape[0]
    for name, count in zip("qkv", heads, strict=True):
        rows = count * of_head
        yield replace(
            fused,
            name=fused.name.replace(FUSED, f".{name}_proj."),
            offset=fused.offset + first * row_bytes,
            shape=(rows, *fused.shape[1:]),
            num_bytes=rows * row_bytes,
        )
        first += rows
