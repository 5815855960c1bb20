"""Nemotron-H (arXiv 2504.03624): each layer is Mamba-2, attention, or an mlp, with one norm before it."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from penstock.kernels import BatchLayout, LayerKV, Routing
from penstock.model.architecture import CONV
from penstock.model.config_values import count, flag, number, refuse, require
from penstock.model.families.deepseek_mixture import groups_of
from penstock.model.families.hybrid.layers import with_recurrence
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.families.mixture_frame import MixtureFamily, MixtureSpec, chosen_of
from penstock.model.layers import activation_function
from penstock.model.mixture.mixture import Mixture, MixtureNames
from penstock.model.recurrent.mamba2 import Mamba2
from penstock.spec import ModelSpec
from penstock.weights.formats.weight_format import INT8
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec

#: Kinds of layers, as config.json names them in a pattern and in lists.
MAMBA, ATTENTION, MLP, MIXTURE = "M", "*", "-", "E"
_KINDS = {
    "mamba": MAMBA, "linear_attention": MAMBA, "attention": ATTENTION, "full_attention": ATTENTION,
    "mlp": MLP, "moe": MIXTURE,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NemotronHSpec(MixtureSpec):
    """The kind of each layer, one letter each."""

    kinds: str


class NemotronH(MixtureFamily):
    """Attention has no rope: Mamba-2 knows the order of tokens. In place of some mlps there are experts,
    which have no gate, like the mlps."""

    architectures = ("NemotronHForCausalLM",)
    optional_prefix = "backbone."
    final_norm_part = "backbone.norm_f"
    #: Layers that guess further tokens.
    unused_tensors = (r"^mtp\.",)
    spec: NemotronHSpec

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        require(config, "sliding_window", None)
        require(config, "mamba_hidden_act", "silu")
        kinds = _kinds(config)
        has_bias = flag(config, "attention_bias", False)
        base = cls._spec(
            config | {"num_hidden_layers": len(kinds)},
            norm_eps=number(config, "layer_norm_epsilon", 1e-5),
            has_qkv_bias=has_bias,
            has_o_bias=has_bias,
            has_mlp_bias=flag(config, "mlp_bias", False),
            has_gate=False,
            activation=activation_function(config.get("mlp_hidden_act") or "relu2"),
            rope=None,
        )
        values = {field.name: getattr(base, field.name) for field in fields(base)}
        layers = {index for index, kind in enumerate(kinds) if kind == MAMBA}
        others = {index for index, kind in enumerate(kinds) if kind in (MLP, MIXTURE)}
        mixture = _mixture(config, base, frozenset(at for at, kind in enumerate(kinds) if kind == MIXTURE))
        if mixture.layers:
            values["num_experts_per_token"] = mixture.routing.num_chosen
        spec = NemotronHSpec(**values, kinds=kinds, mixture=mixture)
        return with_recurrence(spec, _mamba(config), layers, others)

    @classmethod
    def embedding_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        shape = (spec.vocab_size, spec.hidden_size)
        return (TensorSpec("embedding", shape, ("backbone.embeddings.weight",), INT8),)

    @classmethod
    def layer_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, NemotronHSpec) and spec.recurrent is not None
        prefix, kind = f"backbone.layers.{index}.", spec.kinds[index]
        norm = spec.norm.tensors("input_norm", (spec.hidden_size,), f"{prefix}norm")
        if kind == MAMBA:
            return (*norm, *spec.recurrent.tensors(spec, prefix))
        if kind == ATTENTION:
            return (*norm, *cls.attention_tensors(spec, index, f"{prefix}mixer."))
        return (*norm, *cls.mlp_tensors(spec, index, f"{prefix}mixer."))

    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        x = self._norm("input_norm", weights, hidden)
        if CONV in weights or "qkv" in weights:
            return hidden + self.attention(index, weights, x, kv, batch)
        return hidden + self.mlp(index, weights, x)


def _kinds(config: dict[str, Any]) -> str:
    """The kind of each layer. Raises InvalidConfig and UnsupportedModel."""
    pattern = config.get("hybrid_override_pattern")
    names = config.get("layers_block_type") or config.get("layer_types")
    if names is not None and isinstance(names, list) and all(name in _KINDS for name in names):
        pattern = "".join(_KINDS[name] for name in names)
    if not isinstance(pattern, str) or not re.fullmatch(r"[M*E-]+", pattern):
        refuse("layers_block_type", names or pattern, f"a list with kinds of layers: {', '.join(_KINDS)}")
    return pattern


def _mixture(config: dict[str, Any], spec: LlamaSpec, layers: frozenset[int]) -> Mixture:
    """The experts of these layers, which a router chooses as DeepSeek V3's does. Raises UnsupportedModel."""
    if not layers:
        return Mixture(Routing(1, 1), spec.hidden_size, 1, layers)
    require(config, "mlp_bias", False, None)
    num_experts = count(config, "n_routed_experts", "num_local_experts", default=8)
    num_groups, num_chosen_groups = groups_of(config, num_experts)
    routing = Routing(
        num_experts,
        chosen_of({"num_experts_per_tok": 2} | config, num_experts),
        "sigmoid",
        is_renormalized=flag(config, "norm_topk_prob", True),
        scaling=number(config, "routed_scaling_factor", 1.0),
        has_correction=True,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
    )
    names = MixtureNames(
        "mixer.gate",
        "mixer.experts.",
        shared="mixer.shared_experts.",
        shared_modules=("up_proj", "down_proj"),
        correction="mixer.gate.e_score_correction_bias",
    )
    return Mixture(
        routing,
        spec.hidden_size,
        count(config, "moe_intermediate_size"),
        layers,
        spec.activation,
        has_gate=False,
        shared_size=count(config, "moe_shared_expert_intermediate_size"),
        narrow_size=count(config, "moe_latent_size") if config.get("moe_latent_size") is not None else 0,
        names=names,
        prefix="backbone.layers.{}.",
    )


def _mamba(config: dict[str, Any]) -> Mamba2:
    heads, groups = count(config, "mamba_num_heads", default=128), count(config, "n_groups", default=8)
    if heads % groups:
        refuse("n_groups", groups, f"a divisor of mamba_num_heads, {heads}")
    has_bias = flag(config, "use_bias", False)
    return Mamba2(
        heads,
        count(config, "mamba_head_dim", default=64),
        groups,
        count(config, "ssm_state_size", default=128),
        count(config, "conv_kernel", default=4),
        has_conv_bias=flag(config, "use_conv_bias", True),
        has_in_bias=has_bias,
        has_out_bias=has_bias,
        step_limits=(number(config, "time_step_min", 0.001), float("inf")),
        part="mixer.",
    )
