"""GPT-NeoX and Pythia (arXiv 2204.06745) have rope on part of each head, and attention and mlp in parallel.
GPT-NeoX-Japanese (ABEJA, 2022) has them one after the other, and hardly any biases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.model.config_values import count, flag, require
from penstock.model.families.gpt.gpt import GPT
from penstock.model.families.gpt.gpt_architecture import GPTSpec, Keys, Names, partial_rope
from penstock.model.layers import GROUPED
from penstock.weights.tensors import TensorSpec


class GPTNeoX(GPT):
    """q, k and v are fused per head."""

    architectures = ("GPTNeoXForCausalLM",)
    optional_prefix = "gpt_neox."
    unused_tensors = (r"\.attention\.(bias|masked_bias)$",)
    names = Names(
        embedding="gpt_neox.embed_in",
        layers="gpt_neox.layers",
        input_norm="input_layernorm",
        qkv=("attention.query_key_value",),
        o="attention.dense",
        mlp_norm="post_attention_layernorm",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        final_norm="gpt_neox.final_layer_norm",
        head="embed_out",
    )
    keys = Keys()
    default_activation = "gelu"
    is_tied_by_default = False

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> GPTSpec:
        require(config, "attention_bias", True)
        return cls._spec(
            config,
            rope=partial_rope({"partial_rotary_factor": config.get("rotary_pct")} | config, 0.25),
            attention=GROUPED,
            is_parallel=flag(config, "use_parallel_residual", True),
        )


class GPTNeoXJapanese(GPTNeoX):
    """The only bias is that of the last layer's attention."""

    architectures = ("GPTNeoXJapaneseForCausalLM",)
    optional_prefix = "gpt_neox_japanese."
    names = GPTNeoX.names._replace(
        embedding="gpt_neox_japanese.embed_in",
        layers="gpt_neox_japanese.layers",
        final_norm="gpt_neox_japanese.final_layer_norm",
    )
    is_tied_by_default = True

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> GPTSpec:
        base = cls._spec(
            config,
            rope=partial_rope({"partial_rotary_factor": config.get("rotary_pct")} | config, 1.0),
            attention=GROUPED,
            has_qkv_bias=False,
            has_o_bias=False,
            has_mlp_bias=False,
        )
        multiple = count(config, "intermediate_multiple_size", default=4)
        return replace(base, intermediate_size=multiple * base.hidden_size)

    @classmethod
    def attention_tensors(cls, spec: GPTSpec, prefix: str) -> tuple[TensorSpec, ...]:
        tensors = super().attention_tensors(spec, prefix)
        if prefix != f"{cls.names.layers}.{spec.num_layers - 1}.":
            return tensors
        return *tensors, TensorSpec("o.bias", (spec.hidden_size,), (f"{prefix}attention.dense_bias",))
