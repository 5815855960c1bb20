"""StarCoder2 (arXiv 2402.19173), Nemotron-4 and Minitron (arXiv 2402.16819), Jais 2: Llama's attention, with
layer norms and a plain mlp."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.model.architecture import sliding_windows
from penstock.model.config_values import count, flag, num_layers_of
from penstock.model.families.gpt.gpt import GPT
from penstock.model.families.gpt.gpt_architecture import LAYER_NORM, MODEL_NAMES, GPTSpec, Keys, partial_rope
from penstock.model.rope import read_rope


class Starcoder2(GPT):
    """All matrices of a layer have biases, or none has."""

    architectures = ("Starcoder2ForCausalLM",)
    optional_prefix = "model."
    names = MODEL_NAMES._replace(up=("mlp.c_fc",), down="mlp.c_proj")
    keys = Keys(eps="norm_epsilon")
    default_activation = "gelu_pytorch_tanh"

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> GPTSpec:
        has_bias = flag(config, "use_bias", True)
        windows = sliding_windows(config, num_layers_of(config, "num_hidden_layers"))
        return cls._grouped(config, has_bias, has_bias, sliding_windows=windows)

    @classmethod
    def _grouped(
        cls, config: dict[str, Any], has_attention_bias: bool, has_mlp_bias: bool, **differences: Any
    ) -> GPTSpec:
        """The numbers, with grouped heads and rope as Llama has them."""
        hidden_size, num_heads = count(config, "hidden_size"), count(config, "num_attention_heads")
        head_dim = count(config, "head_dim", default=hidden_size // num_heads)
        numbers: dict[str, Any] = {
            "rope": read_rope(config, head_dim),
            "num_kv_heads": count(config, "num_key_value_heads", default=num_heads),
            "head_dim": head_dim,
            "has_qkv_bias": has_attention_bias,
            "has_o_bias": has_attention_bias,
            "has_mlp_bias": has_mlp_bias,
        }
        return cls._spec(config, **(numbers | differences))


class Nemotron(Starcoder2):
    """Norm weights are stored as their difference from 1."""

    architectures = ("NemotronForCausalLM",)
    names = MODEL_NAMES
    keys = Keys(eps="norm_eps")
    default_activation = "relu2"
    is_tied_by_default = False

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> GPTSpec:
        has_bias, has_mlp_bias = flag(config, "attention_bias", False), flag(config, "mlp_bias", False)
        rope, norm = partial_rope(config, 0.5), replace(LAYER_NORM, offset=1.0)
        return cls._grouped(config, has_bias, has_mlp_bias, rope=rope, norm=norm)


class Jais2(Starcoder2):
    """Biases in attention and mlp."""

    architectures = ("Jais2ForCausalLM",)
    names = MODEL_NAMES
    keys = Keys()
    default_activation = "relu2"
    is_tied_by_default = False

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> GPTSpec:
        has_bias, has_mlp_bias = flag(config, "attention_bias", True), flag(config, "mlp_bias", True)
        return cls._grouped(config, has_bias, has_mlp_bias)
