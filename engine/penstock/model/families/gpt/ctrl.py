"""CTRL (arXiv 1909.05858): GPT-2 with sines and cosines as positions, relu, and a bias of the head."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.model.config_values import require
from penstock.model.families.gpt.gpt import GPT
from penstock.model.families.gpt.gpt_architecture import GPT2_KEYS, GPTSpec, Names
from penstock.model.families.gpt.xglm import with_sines
from penstock.weights.layer_weights import LayerWeights


class CTRL(GPT):
    """The embedding is multiplied by the square root of the hidden size."""

    architectures = ("CTRLLMHeadModel",)
    names = Names(
        embedding="transformer.w",
        input_norm="layernorm1",
        qkv=tuple(f"multi_head_attention.W{part}" for part in "qkv"),
        o="multi_head_attention.dense",
        mlp_norm="layernorm2",
        up=("ffn.0",),
        down="ffn.2",
        final_norm="transformer.layernorm",
    )
    keys = GPT2_KEYS._replace(ffn="dff")
    default_activation = "relu"

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> GPTSpec:
        # transformers takes the config's value for the final norm, and this one for the others.
        require(config, "layer_norm_epsilon", 1e-6)
        base = cls._spec(config, norm_eps=1e-6, has_head_bias=True)
        return replace(base, embedding_factor=math.sqrt(base.hidden_size))

    def place(self, weights: LayerWeights, vectors: Tensor, positions: Tensor) -> Tensor:
        num_sines = self.spec.hidden_size // 2
        return with_sines(vectors, positions, torch.arange(num_sines, dtype=torch.float64) / num_sines)
