"""Rope in GGUF files: config.json's `rope_parameters`, of llama.cpp's numbers and of tensors with factors."""

from __future__ import annotations

import math
from typing import Any

from penstock.errors import UnsupportedModel
from penstock.weights.checkpoints.gguf_files.gguf_keys import check_same
from penstock.weights.checkpoints.gguf_files.gguf_numbers import Numbers
from penstock.weights.checkpoints.gguf_files.gguf_rows import read_vector

#: Factors of rope's frequencies, which belong in the config.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
#: Architectures whose layers with a window have a base of their own.
OWN_BASES = ("gemma3", "gemma3n", "gemma4", "olmo2")


def read_rope(numbers: Numbers, rotates_part: bool = False) -> dict[str, Any]:
    """`rope_parameters` of config.json; `rotates_part`: rope may turn a part of each head. Raises
    UnsupportedModel for a scaling that is not known."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": numbers.real("rope.freq_base", 10000.0)}
    num_rotated = numbers.integer("rope.dimension_count", numbers.head_dim)
    share = num_rotated / numbers.head_dim
    if share > 1 or (share < 1 and not rotates_part):
        raise UnsupportedModel(
            f"{numbers.path} rotates {share:.0%} of each head; Penstock rotates whole heads of "
            f"{numbers.architecture}"
        )
    if share < 1:
        rope["partial_rotary_factor"] = share
    if numbers.architecture not in OWN_BASES:
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
        original = numbers.integer("rope.scaling.original_context_length", numbers.integer("context_length"))
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
