"""Phi-3 and Phi-4 (arXiv 2404.14219) have Llama's layer, with fused matrices and rope on part of each
head."""

from __future__ import annotations

from typing import Any

from penstock.model.architecture import sliding_windows
from penstock.model.config_values import count, num_layers_of, require
from penstock.model.families.llama import Llama
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.rope import read_rope, rotary_dim


class Phi3(Llama):
    """Checkpoints have one tensor for q, k, v and one for gate and up, already in our order."""

    architectures = ("Phi3ForCausalLM",)
    qkv_parts = ("qkv_proj",)
    gate_up_parts = ("gate_up_proj",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        # A config.json may leave this value out; 4096 is transformers' own default.
        config = {"original_max_position_embeddings": 4096} | config
        head_dim = count(config, "hidden_size") // count(config, "num_attention_heads")
        rope = read_rope(config, rotary_dim(config, head_dim))
        # Early configs say "yarn" and mean LongRoPE.
        require(config | {"rope scaling": rope.scaling}, "rope scaling", "default", "longrope")
        return cls._spec(
            config,
            rope=rope,
            sliding_windows=sliding_windows(config, num_layers_of(config, "num_hidden_layers")),
        )
