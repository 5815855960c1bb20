"""MiniCPM in plain torch: transformers' Llama with MiniCPM's three constants as hooks, in float32.

transformers has no MiniCPM, and MiniCPM's own code comes with its checkpoints, where nobody should run it.
"""

from __future__ import annotations

import math
from typing import Any

import transformers
from torch import nn


class MiniCPMConfig(transformers.LlamaConfig):
    model_type = "minicpm"
    scale_emb: float = 1.0
    scale_depth: float | None = None
    dim_model_base: float | None = None


class MiniCPMForCausalLM(transformers.LlamaForCausalLM):
    config_class = MiniCPMConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        branch = 1.0 if config.scale_depth is None else config.scale_depth / math.sqrt(len(self.model.layers))
        shrink = 1.0 if config.dim_model_base is None else config.hidden_size / config.dim_model_base
        _multiply(self.model.embed_tokens, config.scale_emb)
        for layer in self.model.layers:
            _multiply(layer.self_attn, branch)
            _multiply(layer.mlp, branch)
        self.lm_head.register_forward_pre_hook(lambda _, arguments: (arguments[0] / shrink,))


def _multiply(module: nn.Module, factor: float) -> None:
    """The module's result times a factor. Attention gives a tuple, whose first member is the result."""

    def hook(_: nn.Module, arguments: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] * factor, *output[1:])
        return output * factor

    module.register_forward_hook(hook)


transformers.AutoConfig.register("minicpm", MiniCPMConfig)
transformers.AutoModelForCausalLM.register(MiniCPMConfig, MiniCPMForCausalLM)
