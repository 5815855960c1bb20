"""Apertus (arXiv 2509.14233) has Llama's layer, with norms on the heads of q and k and a plain mlp whose
activation learns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.model.config_values import require
from penstock.model.families.llama import HEAD_NORMS, Llama
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec


class Apertus(Llama):
    """The mlp is down(xielu(up x))."""

    architectures = ("ApertusForCausalLM",)
    norm_parts = Llama.norm_parts | {
        "input_norm": "attention_layernorm",
        "post_norm": "feedforward_layernorm",
    }
    #: Numbers that checkpoints carry and that are the same in all models.
    unused_tensors = (r"\.mlp\.act_fn\.(beta|eps)$",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        require(config, "hidden_act", "xielu")
        if not config.get("rope_parameters") and not config.get("rope_scaling"):
            scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            config = config | {"rope_scaling": scaling | {"original_max_position_embeddings": 8192}}
        base = super().read_spec({"rope_theta": 12e6} | config | {"hidden_act": "silu"})
        return replace(base, has_gate=False, attention=HEAD_NORMS)

    @classmethod
    def mlp_tensors(cls, spec: LlamaSpec, index: int, prefix: str) -> tuple[TensorSpec, ...]:
        names = ("alpha_p", "alpha_n")
        alphas = tuple(TensorSpec(name, (1,), (f"{prefix}act_fn.{name}",)) for name in names)
        return *alphas, *super().mlp_tensors(spec, index, prefix)

    def mlp(self, index: int, weights: LayerWeights, x: Tensor) -> Tensor:
        up = self.project(weights, "up", x)
        return self.project(weights, "down", xielu(up, weights.vector("alpha_p"), weights.vector("alpha_n")))


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    """xIELU (arXiv 2411.13010): a parabola above 0, an exponential below. `alpha_p` and `alpha_n` are
    float32 [1]. Computed in float64: the last bits of torch's functions depend on where in a tensor a number
    lies, and rounding to float32 removes them."""
    beta, wide = 0.5, x.double()
    rise, fall = (torch.nn.functional.softplus(alpha.double()) for alpha in (alpha_p, alpha_n))
    # As in the original, the exponential begins at -1e-6.
    below = (wide.clamp_max(-1e-6).expm1() - wide) * (beta + fall)
    return (torch.where(wide > 0, rise * wide.square(), below) + beta * wide).float()
