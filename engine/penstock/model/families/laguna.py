"""Laguna: windows, heads and ropes that differ between layers, a gate after attention, and a mixture."""

from __future__ import annotations

from typing import Any

from penstock.kernels import Routing
from penstock.model.architecture import layer_kinds, sliding_windows
from penstock.model.config_values import count, flag, num_experts_of, num_layers_of, number, refuse, require
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.families.mixture_frame import MixtureFamily, chosen_of, typed_layers, with_mixture
from penstock.model.layers import AttentionForm, OutputGate
from penstock.model.mixture.mixture import Mixture, MixtureNames
from penstock.model.norms import HeadNorms
from penstock.model.rope import FULL, WINDOW, read_rope, rotary_dim
from penstock.spec import RopeSpec

#: The rope of each kind of layer where config.json has none.
_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    WINDOW: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}


class Laguna(MixtureFamily):
    """Norms on the heads of q and k. The router has a sigmoid and a correction."""

    architectures = ("LagunaForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        require(config, "moe_apply_router_weight_on_input", False, None)
        require(config, "moe_router_logit_softcapping", 0, None)
        require(config, "gating", True, "per-head", "per-element")
        config = {"head_dim": 128, "sliding_window": 512} | config
        num_layers, has_bias = (
            num_layers_of(config, "num_hidden_layers"),
            flag(config, "attention_bias", False),
        )
        kinds = layer_kinds(config, num_layers)
        ropes = {kind: _rope(config, kind) for kind in {FULL, *kinds}}
        gate = OutputGate("g_proj", "softplus", is_per_head=config.get("gating") != "per-element")
        heads = _head_counts(config, num_layers)
        base = cls._spec(
            config | {"num_attention_heads": max(heads)},
            rope=ropes[FULL],
            layer_ropes=tuple(ropes[kind] for kind in kinds),
            has_qkv_bias=has_bias,
            has_o_bias=has_bias,
            attention=AttentionForm(norms=HeadNorms(), out_gate=gate),
            sliding_windows=sliding_windows(config | {"layer_types": kinds}, num_layers),
            head_counts=heads if len({*heads}) > 1 else (),
        )
        return with_mixture(base, _mixture(config, base))


def _rope(config: dict[str, Any], kind: str) -> RopeSpec:
    own = (config.get("rope_parameters") or _ROPES).get(kind) or _ROPES[kind]
    config = config | {"rope_parameters": own, "rope_scaling": None, "partial_rotary_factor": None}
    return read_rope(config, rotary_dim(config, count(config, "head_dim")))


def _head_counts(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """The query heads of each layer."""
    name = "num_attention_heads_per_layer"
    given = config.get(name)
    if given is None:
        return (count(config, "num_attention_heads"),) * num_layers
    if not isinstance(given, list) or len(given) != num_layers:
        refuse(name, given, f"a list with the query heads of each of {num_layers} layers")
    heads, kv_heads = tuple(count({name: each}, name) for each in given), count(config, "num_key_value_heads")
    if any(each % kv_heads for each in heads):
        refuse(name, given, f"multiples of num_key_value_heads, {kv_heads}")
    return heads


def _mixture(config: dict[str, Any], spec: LlamaSpec) -> Mixture:
    num_experts = num_experts_of(config, "num_experts", "num_local_experts")
    routing = Routing(
        num_experts,
        chosen_of(config, num_experts),
        "sigmoid",
        is_renormalized=True,
        scaling=number(config, "moe_routed_scaling_factor", 1.0),
        has_correction=True,
    )
    return Mixture(
        routing,
        spec.hidden_size,
        count(config, "moe_intermediate_size"),
        typed_layers(config, spec.num_layers, 1),
        shared_size=count(config, "shared_expert_intermediate_size"),
        names=MixtureNames(correction="mlp.experts.e_score_correction_bias"),
    )
