"""gpt-oss 20b and 120b (arXiv 2508.10925): attention with sinks, a window in every second layer, and a
mixture whose experts have biases and a clamped gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.kernels import ClampedGate, GatedFunction, Routing
from penstock.model.architecture import layer_kinds, linear_tensors, sliding_windows
from penstock.model.config_values import flag, num_experts_of, num_layers_of, number, require
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.families.mixture_frame import MixtureFamily, all_layers, chosen_of, with_mixture
from penstock.model.layers import AttentionForm
from penstock.model.mixture.mixture import Mixture, MixtureNames
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.merged_experts import (
    separate_biases,
    separate_experts,
    separate_mxfp4_experts,
)
from penstock.weights.tensors import TensorSpec

#: The modules of an expert. The rows of the first are gate and up by turns.
_MODULES = ("gate_up_proj", "down_proj")
#: What transformers takes where a config has no rope parameters.
_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096, "rope_theta": 150000.0,
}  # fmt: skip


@dataclass(frozen=True)
class ClampedMixture(Mixture):
    """Experts compute down((up + 1) * gate * sigmoid(sharpness * gate)), with gate at most `limit`, and up
    from -limit to limit."""

    sharpness: float = 1.702
    limit: float = 7.0

    def experts(self, layer: int) -> tuple[tuple[TensorSpec, ...], ...]:
        prefix, hidden, width = (
            self.prefix.format(layer) + self.names.expert,
            self.hidden_size,
            self.expert_size,
        )

        def tensors(number: int) -> tuple[TensorSpec, ...]:
            gate_up, down = (f"{prefix}{number}.{module}" for module in _MODULES)
            return (
                *linear_tensors("gate_up", (2 * width, hidden), (gate_up,)),
                *linear_tensors("down", (hidden, width), (down,)),
            )

        return tuple(tensors(number) for number in range(self.routing.num_experts))

    def separate(self, checkpoint: Checkpoint) -> None:
        for layer in self.layers:
            expert = self.prefix.format(layer) + self.names.expert
            for module in _MODULES:
                separate_experts(
                    checkpoint, expert + module, expert, (f"{module}.weight",), is_transposed=True
                )
                separate_mxfp4_experts(checkpoint, expert + module, expert, f"{module}.weight")
                separate_biases(checkpoint, f"{expert}{module}_bias", expert, f"{module}.bias")

    @property
    def function(self) -> GatedFunction:
        return ClampedGate(self.sharpness, self.limit)


class GptOss(MixtureFamily):
    """Scores are a softmax over a token's experts, which is the softmax over all experts, renormalized."""

    architectures = ("GptOssForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        require(config, "hidden_act", "silu")
        if not config.get("rope_parameters") and not config.get("rope_scaling"):
            config = config | {"rope_parameters": _ROPE}
        has_bias = flag(config, "attention_bias", True)
        spec = cls._spec(
            config,
            has_qkv_bias=has_bias,
            has_o_bias=has_bias,
            attention=AttentionForm(has_sinks=True),
            sliding_windows=cls._windows(config),
        )
        num_experts = num_experts_of(config, "num_local_experts", "num_experts")
        routing = Routing(num_experts, chosen_of(config, num_experts), is_renormalized=True)
        mixture = ClampedMixture(
            routing,
            spec.hidden_size,
            spec.intermediate_size,
            all_layers(spec),
            has_router_bias=True,
            names=MixtureNames(router="mlp.router"),
            sharpness=number(config, "swiglu_alpha", 1.702),
            limit=number(config, "swiglu_limit", 7.0),
        )
        return with_mixture(spec, mixture)

    @classmethod
    def _windows(cls, config: dict[str, Any]) -> tuple[int, ...]:
        """Every second layer has a window, from the first on, unless the config names the layers' kinds."""
        num_layers = num_layers_of(config, "num_hidden_layers")
        kinds = layer_kinds(config, num_layers, period=2)
        return sliding_windows({"sliding_window": 128} | config | {"layer_types": kinds}, num_layers)
