"""Mixtures whose routers have a softmax: Qwen2-MoE and Qwen3-MoE (arXiv 2407.10671, 2505.09388), Mixtral
(arXiv 2401.04088), OLMoE (arXiv 2409.02060), Phi-3.5-MoE (arXiv 2404.14219)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from penstock.kernels import Routing
from penstock.model.architecture import sliding_windows
from penstock.model.config_values import count, flag, num_experts_of, num_layers_of, number, require
from penstock.model.families.llama import Qwen3
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.families.mixture_frame import (
    MixtureFamily,
    MixtureSpec,
    all_layers,
    chosen_of,
    sparse_layers,
    with_mixture,
)
from penstock.model.layers import AttentionForm
from penstock.model.mixture.mixture import Mixture, MixtureNames, mixed
from penstock.model.mixture.sparse_mixer import sparse_mixer
from penstock.model.norms import HeadNorms, Norm
from penstock.model.rope import read_rope
from penstock.spec import ModelSpec, RopeSpec
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec

#: The names of Mixtral's modules.
MIXTRAL_NAMES = MixtureNames(
    "block_sparse_moe.gate",
    "block_sparse_moe.experts.",
    gate="w1",
    up="w3",
    down="w2",
    correction="block_sparse_moe.e_score_correction_bias",
    in_memory=(
        ("mlp.gate.weight", "block_sparse_moe.gate.weight"),
        ("mlp.router.weight", "block_sparse_moe.gate.weight"),
        ("mlp.e_score_correction_bias", "block_sparse_moe.e_score_correction_bias"),
    ),
)


class Qwen3Moe(MixtureFamily, Qwen3):
    """Qwen3 with experts, and without a shared one."""

    architectures = ("Qwen3MoeForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        spec = super().read_spec(config)
        return with_mixture(spec, cls._mixture(config, spec))

    @classmethod
    def _mixture(cls, config: dict[str, Any], spec: LlamaSpec) -> Mixture:
        num_experts = num_experts_of(config, "num_experts", "num_local_experts")
        is_renormalized = flag(config, "norm_topk_prob", False)
        routing = Routing(num_experts, chosen_of(config, num_experts), is_renormalized=is_renormalized)
        size, layers = count(config, "moe_intermediate_size"), sparse_layers(config, spec.num_layers)
        return Mixture(routing, spec.hidden_size, size, layers)

    @classmethod
    def _windows(cls, config: dict[str, Any]) -> tuple[int, ...]:
        """Windows are in all layers or in none, unless config.json names each layer's kind."""
        if not config.get("use_sliding_window"):
            return ()
        return sliding_windows(config, num_layers_of(config, "num_hidden_layers"))


class Qwen2Moe(Qwen3Moe):
    """Qwen2 with experts, and with a shared one that has a gate."""

    architectures = ("Qwen2MoeForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        if config.get("use_sliding_window") and config.get("layer_types") is None:
            require(config, "use_sliding_window", False)  # transformers and vLLM disagree on the layers
        has_bias = flag(config, "qkv_bias", True)
        spec = cls._spec(config, has_qkv_bias=has_bias, sliding_windows=cls._windows(config))
        shared = count(config, "shared_expert_intermediate_size")
        mixture = replace(cls._mixture(config, spec), shared_size=shared, has_shared_gate=True)
        return with_mixture(spec, mixture)


class Mixtral(MixtureFamily):
    """Mistral with experts in every layer."""

    architectures = ("MixtralForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        num_experts = num_experts_of(config, "num_local_experts", "num_experts")
        routing = Routing(num_experts, chosen_of(config, num_experts), is_renormalized=True)
        windows = sliding_windows(config, num_layers_of(config, "num_hidden_layers"))
        spec = cls._spec({"rope_theta": 1e6} | config, sliding_windows=windows)
        size, layers = spec.intermediate_size, all_layers(spec)
        return with_mixture(spec, Mixture(routing, spec.hidden_size, size, layers, names=MIXTRAL_NAMES))


class OLMoE(MixtureFamily):
    """Norms go over the whole rows of q and k."""

    architectures = ("OlmoeForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        require(config, "clip_qkv", None)
        has_bias = flag(config, "attention_bias", False)
        norms = AttentionForm(norms=HeadNorms(is_whole=True))
        spec = cls._spec(config, has_qkv_bias=has_bias, has_o_bias=has_bias, attention=norms)
        num_experts = num_experts_of(config, "num_experts", "num_local_experts")
        is_renormalized = flag(config, "norm_topk_prob", False)
        routing = Routing(num_experts, chosen_of(config, num_experts), is_renormalized=is_renormalized)
        return with_mixture(
            spec, Mixture(routing, spec.hidden_size, spec.intermediate_size, all_layers(spec))
        )


@dataclass(frozen=True, kw_only=True)
class PhiMoeSpec(MixtureSpec):
    """Phi-3.5-MoE's own values."""

    has_head_bias: bool
    #: How far from the best logit SparseMixer looks.
    tolerance: float


class PhiMoe(MixtureFamily):
    """Phi-3.5-MoE: layer norms and biases in Llama's frame, and SparseMixer's router."""

    architectures = ("PhimoeForCausalLM", "PhiMoEForCausalLM")
    spec: PhiMoeSpec

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        config = {"rope_theta": 1e6} | config
        has_bias = flag(config, "attention_bias", False)
        head_dim = count(config, "hidden_size") // count(config, "num_attention_heads")
        spec = cls._spec(
            config,
            has_qkv_bias=has_bias,
            has_o_bias=has_bias,
            norm=Norm(is_centred=True, has_bias=True),
            rope=_with_scale(read_rope(config, head_dim)),
            sliding_windows=sliding_windows(config, num_layers_of(config, "num_hidden_layers")),
        )
        num_experts = num_experts_of(config, "num_local_experts", "num_experts")
        routing = Routing(num_experts, chosen_of(config, num_experts))
        size, layers = spec.intermediate_size, all_layers(spec)
        mixture = Mixture(routing, spec.hidden_size, size, layers, names=MIXTRAL_NAMES)
        found = vars(with_mixture(spec, mixture))
        tolerance = 2 * number(config, "router_jitter_noise", 0.01)
        return PhiMoeSpec(**found, has_head_bias=flag(config, "lm_head_bias", False), tolerance=tolerance)

    @classmethod
    def head_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, PhiMoeSpec)
        bias = TensorSpec("head.bias", (spec.vocab_size,), ("lm_head.bias",))
        return (*super().head_tensors(spec), *((bias,) if spec.has_head_bias else ()))

    def mlp(self, index: int, weights: LayerWeights, x: Tensor) -> Tensor:
        mixture, tolerance = self.spec.mixture, self.spec.tolerance
        routed = sparse_mixer(self.kernels, weights, x, mixture.routing.num_chosen, tolerance)
        return mixed(self, weights, x, mixture, routed)


def _with_scale(rope: RopeSpec) -> RopeSpec:
    """Phi-3.5-MoE's LongRoPE names the factor of cos and sin, once for short and once for long sequences.
    Raises UnsupportedModel if the two differ."""
    if rope.scaling != "longrope":
        return rope
    scale = {name: rope.parameters.get(name) for name in ("short_mscale", "long_mscale")}
    require(scale | {"model_type": "phimoe"}, "long_mscale", scale["short_mscale"])
    return replace(rope, parameters=rope.parameters | {"attention_factor": scale["long_mscale"]})
