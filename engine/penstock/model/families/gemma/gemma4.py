"""The text part of Gemma 4. Full layers have wider heads, of which rope turns a quarter, and may have fewer
heads of keys, which are their values, too. A layer may have experts beside its mlp."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.kernels import BatchLayout, LayerKV, Routed, Routing
from penstock.model.architecture import layer_kinds, sliding_windows
from penstock.model.config_values import count, flag, num_experts_of, num_layers_of, number, refuse
from penstock.model.families.gemma.later_gemma import LaterGemma, LaterGemmaSpec, kv_sources
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.families.mixture_frame import chosen_of
from penstock.model.mixture.mixture import Mixture, MixtureNames, blend
from penstock.model.norms import RMS, Norm
from penstock.model.rope import FULL, WINDOW, read_layer_ropes
from penstock.spec import DECODER, ModelSpec
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import Stack, TensorSpec

NAMES = MixtureNames(
    "router.proj",
    "experts.",
    merged_gate_up="experts.gate_up_proj",
    merged_down="experts.down_proj",
)
#: The rope of each kind of layers where config.json has none.
USUAL_ROPES = {
    WINDOW: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
ROUTER_NORM = Norm(has_weight=False)


@dataclass(frozen=True, kw_only=True)
class Gemma4Spec(LaterGemmaSpec):
    """All layers have experts, or none has."""

    mixture: Mixture | None = None


class Gemma4(LaterGemma):
    """The sizes with one-token inputs for each layer (E2B, E4B), with experts (26B-A4B), and those with
    neither."""

    architectures = ("Gemma4ForCausalLM",)
    #: Whether layers may have inputs, and the window where config.json has none.
    may_have_inputs: ClassVar[bool] = True
    usual_window: ClassVar[int] = 512
    spec: Gemma4Spec

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        num_layers = num_layers_of(config, "num_hidden_layers")
        config = {"sliding_window": cls.usual_window, "num_key_value_heads": 4} | config
        kinds = layer_kinds(config, num_layers, period=6)[:-1] + (FULL,)
        shapes = tuple(_kv_shape(config, index, kind) for index, kind in enumerate(kinds))
        ropes = _ropes(config, kinds, shapes)
        num_shared = int(number(config, "num_kv_shared_layers", 0))
        sources, size = kv_sources(kinds, num_shared), count(config, "intermediate_size")
        is_wide = flag(config, "use_double_wide_mlp", False)
        has_inputs = cls.may_have_inputs and config.get("hidden_size_per_layer_input") != 0
        values_of_keys = flag(config, "attention_k_eq_v", False)
        differences = cls._later(
            config,
            head_dim=max(head_dim for _, head_dim in shapes),
            kv_shapes=shapes,
            rope=ropes[-1],
            layer_ropes=ropes,
            sliding_windows=sliding_windows(config | {"layer_types": list(kinds)}, num_layers),
            layers_without_kv=frozenset(index for index, each in enumerate(sources) if each != index),
            logits_softcap=number(config, "final_logit_softcapping", 0.0),
            embedding_factor=math.sqrt(count(config, "hidden_size")),
        )
        spec = cls._spec(config, **differences)
        mixture = _mixture(config, spec) if flag(config, "enable_moe_block", False) else None
        values = vars(spec) | {"num_experts_per_token": mixture.routing.num_chosen if mixture else 0}
        return Gemma4Spec(
            **values,
            mixture=mixture,
            kv_sources=sources,
            mlp_sizes=tuple(
                2 * size if is_wide and each != index else size for index, each in enumerate(sources)
            ),
            values_of_keys=frozenset(i for i, kind in enumerate(kinds) if kind == FULL and values_of_keys),
            input_size=count(config, "hidden_size_per_layer_input", default=256) if has_inputs else 0,
            input_vocab=count(config, "vocab_size_per_layer_input", default=262144),
        )

    @classmethod
    def layer_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, Gemma4Spec)
        prefix, hidden = f"model.layers.{index}.", (spec.hidden_size,)
        experts = () if spec.mixture is None else (
            *RMS.tensors("mlp_only_norm", hidden, f"{prefix}post_feedforward_layernorm_1"),
            *RMS.tensors("experts_in_norm", hidden, f"{prefix}pre_feedforward_layernorm_2"),
            *RMS.tensors("experts_out_norm", hidden, f"{prefix}post_feedforward_layernorm_2"),
            TensorSpec("router.scale", hidden, (f"{prefix}router.scale",)),
            TensorSpec(
                "router.factors", (spec.mixture.routing.num_experts,), (f"{prefix}router.per_expert_scale",)
            ),
            *spec.mixture.layer_tensors(index),
        )  # fmt: skip
        scale = TensorSpec("layer.scale", (1,), (f"{prefix}layer_scalar",))
        return *super().layer_tensors(spec, index), *experts, scale

    @classmethod
    def stacks(cls, spec: ModelSpec) -> tuple[Stack, ...]:
        assert isinstance(spec, Gemma4Spec)
        if spec.mixture is None:
            return super().stacks(spec)
        dense = tuple(cls.layer_tensors(spec, index) for index in range(spec.num_layers))
        return (Stack(DECODER, dense, spec.mixture.all_experts(spec.num_layers)),)

    @classmethod
    def separate(cls, checkpoint: Checkpoint, spec: ModelSpec) -> Checkpoint:
        assert isinstance(spec, Gemma4Spec)
        if spec.mixture is not None:
            spec.mixture.separate(checkpoint)
        return checkpoint

    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        state, inputs, later = self.parted(hidden)
        x = self.attention(index, weights, self._norm("input_norm", weights, state), kv, batch)
        state = state + self._norm("attention_out_norm", weights, x)
        x = self.mlp(index, weights, self._norm("post_norm", weights, state))
        if self.spec.mixture is not None:
            x = self._norm("mlp_only_norm", weights, x) + self._experts(weights, state, self.spec.mixture)
        state = state + self._norm("mlp_out_norm", weights, x)
        if self.spec.input_size:
            state = state + self.take_input(weights, state, inputs)
        return torch.cat((state * weights.vector("layer.scale"), later), dim=1)

    def _experts(self, weights: LayerWeights, state: Tensor, mixture: Mixture) -> Tensor:
        """What the experts make of the hidden state before the mlp's norm."""
        kernels, eps = self.kernels, self.spec.norm_eps
        factors = weights.vector("router.scale") * self.spec.hidden_size**-0.5
        x = ROUTER_NORM.apply(kernels, weights, "router_norm", state, eps) * factors
        experts, scores = kernels.route(x, weights.router, mixture.routing)
        routed = Routed(experts, scores * weights.vector("router.factors")[experts])
        x = self._norm("experts_in_norm", weights, state)
        return self._norm("experts_out_norm", weights, blend(kernels, weights, x, routed, mixture.compute))


class Gemma4Unified(Gemma4):
    """The text part of the model that reads images without an encoder (12B)."""

    architectures = ("Gemma4UnifiedForCausalLM",)
    may_have_inputs = False
    usual_window = 1024


def _kv_shape(config: dict[str, Any], index: int, kind: str) -> tuple[int, int]:
    """The KV heads of a layer, and the width of its heads. Newer configs name them for each layer that
    differs. In older ones full layers have a width of their own, and where keys are their values, a number of
    heads of their own."""
    usual = count(config, "num_key_value_heads"), count(config, "head_dim", default=256)
    each = config.get("per_layer_config")
    if each is not None:
        if not isinstance(each, dict):
            refuse("per_layer_config", each, "an object with a layer's number as key")
        own = each.get(str(index)) or each.get(index) or {}
        return (
            count(own, "num_key_value_heads", default=usual[0]),
            count(own, "head_dim", default=usual[1]),
        )
    if kind != FULL:
        return usual
    number = "num_global_key_value_heads" if config.get("attention_k_eq_v") else "num_key_value_heads"
    return count(config, number, default=usual[0]), count(config, "global_head_dim", default=512)


def _ropes(config: dict[str, Any], kinds: tuple[str, ...], shapes: tuple[tuple[int, int], ...]) -> Any:
    """The rope of each layer."""
    given = config.get("rope_parameters") or USUAL_ROPES
    thetas = {FULL: 1e6, WINDOW: 1e4}
    return tuple(
        read_layer_ropes(config | {"rope_parameters": given}, head_dim, (kind,), thetas)[0]
        for kind, (_, head_dim) in zip(kinds, shapes, strict=True)
    )


def _mixture(config: dict[str, Any], spec: LlamaSpec) -> Mixture:
    num_experts = num_experts_of(config, "num_experts")
    chosen = chosen_of(config, num_experts, "top_k_experts")
    return Mixture(
        Routing(num_experts, chosen, is_renormalized=True),
        spec.hidden_size,
        count(config, "moe_intermediate_size"),
        frozenset(range(spec.num_layers)),
        activation=spec.activation,
        names=NAMES,
    )
