"""Llama 1-3 (arXiv 2302.13971) and the families that share its layer: Mistral, Qwen2, Qwen3. They differ in
biases, in norms on the heads of q and k, and in sliding windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from penstock.kernels import ActivationFunction, BatchLayout, LayerKV
from penstock.model.architecture import linear_tensors, sliding_windows
from penstock.model.config_values import count, flag, num_layers_of, number, require
from penstock.model.family import Family
from penstock.model.layers import activation_function, attend, gated_mlp
from penstock.model.rope import context_length, read_rope
from penstock.spec import ModelSpec
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec
from penstock.weights.weight_format import INT8


@dataclass(frozen=True)
class LlamaSpec(ModelSpec):
    """The families that share Llama's layer differ in these values."""

    activation: ActivationFunction = "silu"
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    has_head_norms: bool = False


class Llama(Family):
    """A layer has rms norms, rope, grouped heads, and a gated mlp."""

    architectures = ("LlamaForCausalLM",)
    #: The checkpoint's modules that make up our fused matrices.
    qkv_parts: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")
    gate_up_parts: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")
    spec: LlamaSpec

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        require(config, "pretraining_tp", 1)
        has_bias = flag(config, "attention_bias", False)
        return cls._spec(
            config,
            has_qkv_bias=has_bias,
            has_o_bias=has_bias,
            has_mlp_bias=flag(config, "mlp_bias", False),
        )

    @classmethod
    def _spec(cls, config: dict[str, Any], **differences: Any) -> LlamaSpec:
        num_heads = count(config, "num_attention_heads")
        hidden_size, num_layers = (
            count(config, "hidden_size"),
            num_layers_of(config, "num_hidden_layers"),
        )
        head_dim = count(config, "head_dim", default=hidden_size // num_heads)
        rope = read_rope(config, head_dim)
        numbers: dict[str, Any] = {
            "architecture": cls.architectures[0],
            "hidden_size": hidden_size,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "num_kv_heads": count(config, "num_key_value_heads", default=num_heads),
            "head_dim": head_dim,
            "intermediate_size": count(config, "intermediate_size"),
            "vocab_size": count(config, "vocab_size"),
            "max_position_embeddings": context_length(rope, count(config, "max_position_embeddings")),
            "norm_eps": number(config, "rms_norm_eps"),
            "is_tied": flag(config, "tie_word_embeddings", False),
            "rope": rope,
            "activation": activation_function(config.get("hidden_act", "silu")),
        }
        return LlamaSpec(**(numbers | differences))

    @classmethod
    def embedding_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        shape = (spec.vocab_size, spec.hidden_size)
        return (TensorSpec("embedding", shape, ("model.embed_tokens.weight",), INT8),)

    @classmethod
    def layer_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, LlamaSpec)
        prefix, hidden, ffn = f"model.layers.{index}.", spec.hidden_size, spec.intermediate_size
        q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        qkv = tuple(f"{prefix}self_attn.{part}" for part in cls.qkv_parts)
        gate_up = tuple(f"{prefix}mlp.{part}" for part in cls.gate_up_parts)
        o, down = (f"{prefix}self_attn.o_proj",), (f"{prefix}mlp.down_proj",)

        def norm(name: str, checkpoint_name: str, width: int = hidden) -> TensorSpec:
            return TensorSpec(name, (width,), (f"{prefix}{checkpoint_name}.weight",))

        head_norms = (
            norm("q_norm", "self_attn.q_norm", spec.head_dim),
            norm("k_norm", "self_attn.k_norm", spec.head_dim),
        )
        return (
            norm("input_norm", "input_layernorm"),
            *linear_tensors("qkv", (q_rows + 2 * kv_rows, hidden), qkv, spec.has_qkv_bias),
            *(head_norms if spec.has_head_norms else ()),
            *linear_tensors("o", (hidden, q_rows), o, spec.has_o_bias),
            norm("post_norm", "post_attention_layernorm"),
            *linear_tensors("gate_up", (2 * ffn, hidden), gate_up, spec.has_mlp_bias),
            *linear_tensors("down", (hidden, ffn), down, spec.has_mlp_bias),
        )

    @classmethod
    def head_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        norm = TensorSpec("final_norm", (spec.hidden_size,), ("model.norm.weight",))
        shape = (spec.vocab_size, spec.hidden_size)
        head = TensorSpec("head", shape, ("lm_head.weight",), INT8)
        return (norm,) if spec.is_tied else (norm, head)

    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        spec, kernels = self.spec, self.kernels
        x = kernels.rms_norm(hidden, weights.vector("input_norm"), spec.norm_eps)
        head_norm_offset = 0.0 if spec.has_head_norms else None
        hidden = hidden + attend(self, index, weights, x, kv, batch, head_norm_offset=head_norm_offset)
        x = kernels.rms_norm(hidden, weights.vector("post_norm"), spec.norm_eps)
        return hidden + gated_mlp(self, weights, x, spec.activation)

    def norm_final(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        return self.kernels.rms_norm(hidden, weights.vector("final_norm"), self.spec.norm_eps)


class Mistral(Llama):
    """Llama with sliding windows (arXiv 2310.06825)."""

    architectures = ("MistralForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        return cls._spec(
            config, sliding_windows=sliding_windows(config, num_layers_of(config, "num_hidden_layers"))
        )


class Qwen2(Llama):
    """Llama with biases on q, k, v (arXiv 2407.10671)."""

    architectures = ("Qwen2ForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        return cls._spec(config, has_qkv_bias=True, sliding_windows=cls._windows(config))

    @classmethod
    def _windows(cls, config: dict[str, Any]) -> tuple[int, ...]:
        """The window of each layer. Older configs say which layer is the first with a window; newer configs
        name each layer's kind."""
        num_layers = num_layers_of(config, "num_hidden_layers")
        windows = sliding_windows(config, num_layers) if config.get("use_sliding_window") else ()
        if not windows or config.get("layer_types") is not None:
            return windows
        first = number(config, "max_window_layers", 28)
        return tuple(window if index >= first else 0 for index, window in enumerate(windows))


class Qwen3(Qwen2):
    """Qwen2 without biases by default, and with norms on the heads of q and k (arXiv 2505.09388)."""

    architectures = ("Qwen3ForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        has_bias = flag(config, "attention_bias", False)
        return cls._spec(
            config,
            has_qkv_bias=has_bias,
            has_o_bias=has_bias,
            has_head_norms=True,
            sliding_windows=cls._windows(config),
        )
