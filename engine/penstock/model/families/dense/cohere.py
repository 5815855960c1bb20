"""Cohere (Command R) and Cohere 2 (Command R7B, Command A; arXiv 2504.00698): attention and mlp in parallel
after one layer norm, rope on neighbouring dimensions, a factor of logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.model.architecture import layer_kinds, sliding_windows
from penstock.model.config_values import count, flag, num_layers_of, number
from penstock.model.families.dense.llama_relatives import ropes_of_windows
from penstock.model.families.llama import Llama
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.layers import PLAIN, AttentionForm
from penstock.model.norms import HeadNorms, Norm

#: The layer norms have weights and no biases.
_NORM = Norm(is_centred=True)


class Cohere(Llama):
    """Command R+ has norms on the heads of q and k, with weights of their own for each head."""

    architectures = ("CohereForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        norms = HeadNorms(_NORM, has_own_weights=True)
        form = AttentionForm(norms=norms) if flag(config, "use_qk_norm", False) else PLAIN
        return cls._cohere({"rope_theta": 500000.0} | config, attention=form)

    @classmethod
    def _cohere(cls, config: dict[str, Any], **differences: Any) -> LlamaSpec:
        """What both share."""
        has_bias = flag(config, "attention_bias", False)
        base = cls._spec(
            {"tie_word_embeddings": True} | config,
            has_qkv_bias=has_bias,
            has_o_bias=has_bias,
            norm=_NORM,
            norm_eps=number(config, "layer_norm_eps", 1e-5),
            is_parallel=True,
            head_factor=number(config, "logit_scale", 0.0625),
            **differences,
        )
        assert base.rope is not None
        return replace(base, rope=replace(base.rope, is_interleaved=True))


class Cohere2(Cohere):
    """Three of four layers have a window, and only these have rope."""

    architectures = ("Cohere2ForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        num_layers = num_layers_of(config, "num_hidden_layers")
        kinds = layer_kinds(config, num_layers, count(config, "sliding_window_pattern", default=4))
        config = {"sliding_window": 4096} | config | {"layer_types": list(kinds)}
        base = cls._cohere(config, sliding_windows=sliding_windows(config, num_layers))
        return replace(base, layer_ropes=ropes_of_windows(base))
