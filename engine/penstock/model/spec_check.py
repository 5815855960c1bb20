"""check_spec(): numbers of a model that no model can have, refused before anything is allocated for them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.errors import UnsupportedModel
from penstock.model.config_values import MAX_LAYERS, refuse
from penstock.model.rope import check_frequencies
from penstock.spec import ModelSpec, RopeSpec

#: Far beyond any model: the largest have 2^18 tokens, 2^15 numbers of a hidden state, 2^7 heads and 2^24
#: positions. A number near MAX_COUNT would have tables of terabytes.
MAX_VOCAB = MAX_HIDDEN = 1 << 24
MAX_HEADS = MAX_HEAD_DIM = 1 << 16
MAX_POSITIONS = 1 << 31
#: Keys of config.json that size lists of Python or modules, in our own families and in transformers' modules.
_SIZES = {
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_encoder_layers", "num_decoder_layers",
     "encoder_layers", "decoder_layers"): MAX_LAYERS,
    ("vocab_size", "hidden_size", "n_embd", "d_model", "intermediate_size", "ffn_dim", "d_ff",
     "moe_intermediate_size"): MAX_VOCAB,
    ("num_attention_heads", "n_head", "num_heads", "num_key_value_heads", "head_dim"): MAX_HEADS,
    ("num_experts", "n_routed_experts", "num_local_experts"): MAX_LAYERS,
}  # fmt: skip
#: Fields that may be infinite: limits that don't bind.
_LIMITS = ("step_limits",)


def check_sizes(config: Mapping[str, Any]) -> None:
    """Raises InvalidConfig for a config.json whose sizes are beyond any model's. What has to be above 0, the
    families know."""
    for names, most in _SIZES.items():
        for name in names:
            value = config.get(name)
            if isinstance(value, int | float) and not -most <= value <= most:
                refuse(name, value, f"a whole number from 1 to {most}")


def check_spec(spec: ModelSpec, config: Mapping[str, Any], has_own_norms: bool = False) -> None:
    """Raises InvalidConfig if numbers make no sense or contradict each other, and UnsupportedModel.
    has_own_norms: the layers are modules of transformers, which read the epsilons of their norms."""
    for name, value in _floats(spec, ""):
        is_limit = any(limit in name for limit in _LIMITS)
        if math.isnan(value) or (math.isinf(value) and not is_limit):
            refuse(name, value, "a number")
    if not has_own_norms and spec.norm_eps <= 0:
        refuse("the epsilon of norms", spec.norm_eps, "a number above 0")
    sizes = (
        ("hidden_size", spec.hidden_size, MAX_HIDDEN),
        ("vocab_size", spec.vocab_size, MAX_VOCAB),
        ("intermediate_size", spec.intermediate_size, MAX_HIDDEN),
        ("the number of heads", spec.num_heads, MAX_HEADS),
        ("head_dim", spec.head_dim, MAX_HEAD_DIM),
        ("max_position_embeddings", spec.max_position_embeddings, MAX_POSITIONS),
    )
    for name, size, most in sizes:
        if size > most:
            refuse(name, size, f"at most {most}")
    if spec.head_dim < 1:
        refuse("the number of heads", spec.num_heads, f"at most the hidden size, {spec.hidden_size}")
    for num_kv_heads in {spec.kv_shape(index)[0] for index in range(spec.num_layers)}:
        if spec.num_heads % num_kv_heads:
            expected = f"a divisor of the number of heads, {spec.num_heads}"
            refuse("the number of heads of keys and values", num_kv_heads, expected)
    for rope in spec.ropes:
        _check_rope(rope, spec)
    _check_ends(config.get("eos_token_id"))


def _check_ends(ends: Any) -> None:
    """Raises InvalidConfig for end tokens that are no tokens. One beyond the vocabulary is allowed: it ends
    no answer, and published models have some (Chinese GPT-2s keep GPT-2's 50256)."""
    for token_id in ends if isinstance(ends, list) else [ends]:
        is_id = type(token_id) is int and 0 <= token_id < MAX_VOCAB
        if token_id is not None and not is_id:
            refuse("eos_token_id", token_id, "a token id")


def _check_rope(rope: RopeSpec, spec: ModelSpec) -> None:
    """Raises InvalidConfig and, for a layer whose rope depends on a sequence's length beside layers with
    another rope, UnsupportedModel."""
    if rope.rotary_dim % 2 or not 2 <= rope.rotary_dim <= spec.head_dim:
        expected = f"even, from 2 to a head's {spec.head_dim}"
        refuse("the dimensions that rope rotates", rope.rotary_dim, expected)
    if not 0 < rope.theta < math.inf:
        refuse("rope_theta", rope.theta, "a number above 0")
    check_frequencies(rope)
    if rope.short_length and rope != spec.rope:
        raise UnsupportedModel(
            f"some layers have {rope.scaling} rope, others another rope; frequencies that depend on a "
            "sequence's length are computed only where all layers with rope share them"
        )


def _floats(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """All numbers with a point in a spec and in what it is made of, with their names."""
    if isinstance(value, float):
        yield name, value
    elif isinstance(value, complex):
        yield name, math.nan
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _floats(getattr(value, field.name), field.name)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _floats(each, str(key))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _floats(each, name)
