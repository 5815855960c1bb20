"""XGLM (arXiv 2112.10668) and BioGPT (arXiv 2210.10341): layers as OPT has them, and an embedding that is
multiplied by the square root of the hidden size."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.model.config_values import flag, require
from penstock.model.families.gpt.gpt import GPT
from penstock.model.families.gpt.gpt_architecture import GPTSpec, Keys
from penstock.model.families.gpt.opt import OPT_LAYER
from penstock.weights.layer_weights import LayerWeights

#: The first position's number.
FIRST = 2


class XGLM(GPT):
    """Positions are sines and cosines of 2, 3, ..."""

    architectures = ("XGLMForCausalLM",)
    optional_prefix = "model."
    unused_tensors = (r"^(model\.)?embed_positions\.weights$",)
    names = OPT_LAYER._replace(
        embedding="model.embed_tokens", layers="model.layers", final_norm="model.layer_norm"
    )
    keys = Keys(
        ("d_model",), ("attention_heads",), ("num_layers",), "ffn_dim", activation="activation_function"
    )
    default_activation = "gelu"

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> GPTSpec:
        require(config, "add_cross_attention", False)
        # transformers has no sines at the position with this number.
        require(config, "pad_token_id", 1, 0, None)
        return _scaled(cls._spec(config, norm_eps=1e-5), config)

    def place(self, weights: LayerWeights, vectors: Tensor, positions: Tensor) -> Tensor:
        num_sines = self.spec.hidden_size // 2
        exponents = torch.arange(num_sines, dtype=torch.float64) / max(1, num_sines - 1)
        return with_sines(vectors, positions + FIRST, exponents)


class BioGPT(GPT):
    """Learned positions begin at 2."""

    architectures = ("BioGptForCausalLM",)
    optional_prefix = "biogpt."
    position_offset = FIRST
    names = OPT_LAYER._replace(
        embedding="biogpt.embed_tokens",
        positions="biogpt.embed_positions",
        layers="biogpt.layers",
        final_norm="biogpt.layer_norm",
        head="output_projection",
    )
    keys = Keys()
    default_activation = "gelu"

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> GPTSpec:
        # The layer_norm_eps of its config.json is not what its code computes with.
        return _scaled(cls._spec(config, norm_eps=1e-5), config)


def with_sines(vectors: Tensor, positions: Tensor, exponents: Tensor) -> Tensor:
    """Sines, then cosines, of position / 10000^exponent are added to vectors [num_tokens, hidden_size].
    Everything is float64 until the end: torch's vector sine and scalar sine agree when they are rounded to
    float32."""
    angles = positions.double()[:, None] * (-math.log(10000.0) * exponents).exp()
    table = torch.cat((angles.sin(), angles.cos()), dim=1).float()
    vectors[:, : table.shape[1]] += table
    return vectors


def _scaled(spec: GPTSpec, config: dict[str, Any]) -> GPTSpec:
    """The same with the factor of the embedding."""
    factor = math.sqrt(spec.hidden_size) if flag(config, "scale_embedding", True) else 1.0
    return replace(spec, embedding_factor=factor)
