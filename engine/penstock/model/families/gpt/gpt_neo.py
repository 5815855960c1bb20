"""GPT-Neo (Black et al., 2021): GPT-2 with windows in every second layer, and scores that are not scaled."""

from __future__ import annotations

from typing import Any

from penstock.model.config_values import count, num_layers_of, refuse
from penstock.model.families.gpt.gpt import GPT
from penstock.model.families.gpt.gpt_architecture import GPTSpec, Keys, Names


class GPTNeo(GPT):
    """q, k and v have no biases."""

    architectures = ("GPTNeoForCausalLM",)
    unused_tensors = (r"\.attn\.attention\.(bias|masked_bias)$",)
    position_offset = 0
    names = Names(
        qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        o="attn.attention.out_proj",
    )
    keys = Keys(
        heads=("num_heads",),
        layers=("num_layers",),
        eps="layer_norm_epsilon",
        activation="activation_function",
    )

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> GPTSpec:
        return cls._spec(config, has_qkv_bias=False, attention_scale=1.0, sliding_windows=_windows(config))


def _windows(config: dict[str, Any]) -> tuple[int, ...]:
    """The window of each layer. attention_types is a list of (kinds of layers, how often they are repeated).
    Raises InvalidConfig."""
    num_layers, window = num_layers_of(config, "num_layers"), count(config, "window_size", default=256)
    types = config.get("attention_types") or [[["global", "local"], 12]]
    kinds = [kind for names, times in types for kind in list(names) * times]
    if len(kinds) != num_layers or not set(kinds) <= {"global", "local"}:
        refuse("attention_types", types, f"the kinds, global or local, of {num_layers} layers")
    return tuple(window if kind == "local" else 0 for kind in kinds)
