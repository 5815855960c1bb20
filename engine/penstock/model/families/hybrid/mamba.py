"""Bamba, Granite 4 and Falcon-H1: Mamba-2 in place of attention in most layers, or beside it in each."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from penstock.kernels import BatchLayout, LayerKV, Routing
from penstock.model.config_values import count, flag, number, refuse, require
from penstock.model.families.dense.llama_relatives import Granite
from penstock.model.families.hybrid.layers import kinds_of, layers_of, with_recurrence
from penstock.model.families.hybrid.mamba_config import read_mamba
from penstock.model.families.llama import Llama
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.families.mixture_frame import MixtureFamily, all_layers, chosen_of, with_mixture
from penstock.model.layers import attend
from penstock.model.mixture.mixture import Mixture, MixtureNames
from penstock.model.rope import read_rope
from penstock.weights.layer_weights import LayerWeights


class Bamba(Llama):
    """Llama with Mamba-2 in most layers, and with rope on half of each head in the others."""

    architectures = ("BambaForCausalLM",)
    norm_parts = Llama.norm_parts | {"post_norm": "pre_ff_layernorm"}
    mlp_part = "feed_forward."
    final_norm_part = "model.final_layernorm"

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        has_bias = flag(config, "attention_bias", False)
        head_dim = count(config, "hidden_size") // count(config, "num_attention_heads")
        spec = cls._spec(
            config,
            has_qkv_bias=has_bias,
            has_o_bias=has_bias,
            has_mlp_bias=flag(config, "mlp_bias", False),
            rope=read_rope(config, count(config, "head_dim", default=head_dim) // 2),
        )
        given = config.get("attn_layer_indices") is not None
        attention = layers_of(config, "attn_layer_indices", spec.num_layers) if given else frozenset()
        return with_recurrence(spec, read_mamba(config), set(range(spec.num_layers)) - attention)


class GraniteHybrid(MixtureFamily, Granite):
    """Granite 4: Granite with Mamba-2 in most layers, mostly without rope. Small models have no experts, and
    all models have a shared mlp."""

    architectures = ("GraniteMoeHybridForCausalLM",)
    mlp_part, gate_up_parts, down_part = "shared_mlp.", ("input_linear",), "output_linear"

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        shared = count(config, "shared_intermediate_size", default=1024)
        has_bias = flag(config, "attention_bias", False)
        spec = super().read_spec(config | {"intermediate_size": shared})
        spec = replace(spec, has_qkv_bias=has_bias, has_o_bias=has_bias, has_mlp_bias=False)
        if config.get("position_embedding_type") != "rope":
            spec = replace(spec, rope=None)
        kinds = kinds_of(config, ("layer_types", "layers_block_type"), spec.num_layers)
        layers = set(range(spec.num_layers)) if kinds is None else _mamba_layers(kinds)
        spec = with_recurrence(spec, read_mamba(config), layers) if layers else spec
        return cls._with_experts(config, spec, shared)

    @classmethod
    def _with_experts(cls, config: dict[str, Any], spec: LlamaSpec, shared: int) -> LlamaSpec:
        if not number(config, "num_local_experts", 8):
            none = Mixture(Routing(1, 1), spec.hidden_size, 1, frozenset())
            return with_mixture(spec, none, num_experts_per_token=0)
        num_experts = count(config, "num_local_experts", default=8)
        routing = Routing(num_experts, chosen_of(config, num_experts), is_renormalized=True)
        names = MixtureNames(
            "block_sparse_moe.router.layer",
            "block_sparse_moe.experts.",
            shared="shared_mlp.",
            shared_modules=("input_linear", "output_linear"),
            merged_gate_up="block_sparse_moe.input_linear.weight",
            merged_down="block_sparse_moe.output_linear.weight",
        )
        size, layers = count(config, "intermediate_size"), all_layers(spec)
        return with_mixture(
            spec, Mixture(routing, spec.hidden_size, size, layers, shared_size=shared, names=names)
        )


def _mamba_layers(kinds: tuple[str, ...]) -> set[int]:
    for kind in kinds:
        named = {"layer_types": kind, "model_type": "granitemoehybrid"}
        require(named, "layer_types", "mamba", "attention", "linear_attention", "full_attention")
    return {index for index, kind in enumerate(kinds) if kind in ("mamba", "linear_attention")}


@dataclass(frozen=True, kw_only=True)
class FalconH1Spec(LlamaSpec):
    """Falcon-H1's factors: of what goes into attention and what comes out of it, of what comes out of
    Mamba-2, of the mlp's gate and of its output."""

    attention_in: float
    attention_out: float
    mamba_out: float
    mlp_gate: float
    mlp_out: float


class FalconH1(Llama):
    """Attention and Mamba-2 beside each other in each layer, with factors."""

    architectures = ("FalconH1ForCausalLM",)
    norm_parts = Bamba.norm_parts
    mlp_part = "feed_forward."
    final_norm_part = "model.final_layernorm"
    spec: FalconH1Spec

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        has_bias = flag(config, "attention_bias", False)
        base = cls._spec(
            config,
            has_qkv_bias=has_bias,
            has_o_bias=has_bias,
            has_mlp_bias=flag(config, "mlp_bias", False),
            embedding_factor=number(config, "embedding_multiplier", 1.0),
            head_factor=number(config, "lm_head_multiplier", 1.0),
        )
        base = replace(base, attention_scale=base.head_dim**-0.5 * number(config, "key_multiplier", 1.0))
        gate, out = _factors(config, "mlp_multipliers", 2)
        spec = FalconH1Spec(
            **{field.name: getattr(base, field.name) for field in fields(base)},
            attention_in=number(config, "attention_in_multiplier", 1.0),
            attention_out=number(config, "attention_out_multiplier", 1.0),
            mamba_out=number(config, "ssm_out_multiplier", 1.0),
            mlp_gate=gate,
            mlp_out=out,
        )
        norm = "before" if flag(config, "mamba_norm_before_gate", True) else "behind"
        into = number(config, "ssm_in_multiplier", 1.0)
        form = read_mamba(
            config,
            has_out_bias=flag(config, "projectors_bias", False),
            norm=norm if flag(config, "mamba_rms_norm", False) else None,
            in_factors=(into, *_factors(config, "ssm_multipliers", 5)),
        )
        return with_recurrence(spec, form, range(spec.num_layers), is_beside=True)

    def attention(
        self, index: int, weights: LayerWeights, x: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        spec = self.spec
        mixed = self.recurrence(weights, x, kv, batch) * spec.mamba_out
        attended = attend(self, index, weights, x * spec.attention_in, kv, batch, spec.attention)
        return mixed + attended * spec.attention_out

    def mlp(self, index: int, weights: LayerWeights, x: Tensor) -> Tensor:
        gate_up = self.project(weights, "gate_up", x)
        gate_up[:, : self.spec.intermediate_size] *= self.spec.mlp_gate
        y = self.kernels.gated_activation(gate_up, self.spec.activation)
        return self.project(weights, "down", y) * self.spec.mlp_out


def _factors(config: dict[str, Any], name: str, length: int) -> tuple[float, ...]:
    """A list of so many numbers; ones where config.json has no list. Raises InvalidConfig."""
    given = config.get(name)
    if given is None:
        return (1.0,) * length
    if not isinstance(given, list | tuple) or len(given) != length:
        refuse(name, given, f"a list of {length} numbers")
    return tuple(float(each) for each in given)
