"""OLMo Hybrid: Gated DeltaNet in three of four layers, OLMo 3's attention without windows in the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from penstock.kernels import BatchLayout, LayerKV
from penstock.model.architecture import CONV, linear_tensors
from penstock.model.config_values import count, flag, num_layers_of, require
from penstock.model.families.dense.olmo import Olmo2
from penstock.model.families.hybrid.layers import linear_layers, with_recurrence
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.recurrent.delta_net import GatedDeltaNet
from penstock.model.rope import read_rope
from penstock.spec import ModelSpec
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.merged_experts import rename
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec

#: Of the norm after the recurrence, whatever the config says of the other norms.
MIXER_EPS = 1e-5
#: Names of norms in published checkpoints -> those that transformers has in memory.
NORM_NAMES = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}


@dataclass(frozen=True)
class OlmoDeltaNet(GatedDeltaNet):
    """Gated DeltaNet whose checkpoint has q, k and v in tensors of their own."""

    def tensors(self, spec: ModelSpec, prefix: str) -> tuple[TensorSpec, ...]:
        hidden, heads, part = spec.hidden_size, self.num_value_heads, f"{prefix}linear_attn."

        def matrix(name: str, rows: int, inputs: int, *own: str) -> tuple[TensorSpec, ...]:
            return linear_tensors(name, (rows, inputs), tuple(part + each for each in own), has_bias=False)

        def exact(name: str, shape: tuple[int, ...], *own: str) -> TensorSpec:
            return TensorSpec(name, shape, tuple(part + each for each in own))

        convolutions = (f"{each}_conv1d.weight" for each in "qkv")
        return (
            *matrix("mixer_in", self._num_channels, hidden, "q_proj", "k_proj", "v_proj"),
            *matrix("mixer_gate", self._num_values, hidden, "g_proj"),
            exact("gates", (2 * heads, hidden), "b_proj.weight", "a_proj.weight"),
            exact(CONV, (self._num_channels, 1, self.width), *convolutions),
            exact("dt_bias", (heads,), "dt_bias"),
            exact("a_log", (heads,), "A_log"),
            exact("mixer_norm", (self.value_dim,), "o_norm.weight"),
            *matrix("mixer_out", hidden, self._num_values, "o_proj"),
        )


class OlmoHybrid(Olmo2):
    """Recurrent layers have their norms before attention and mlp, the others after them. Rope is there only
    if the config has a base for it."""

    architectures = ("OlmoHybridForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        require(config, "hidden_act", "silu")
        heads, num_layers = count(config, "num_attention_heads"), num_layers_of(config, "num_hidden_layers")
        key_heads = count(config, "linear_num_key_heads", default=heads)
        hidden = count(config, "hidden_size")
        key_dim = count(config, "linear_key_head_dim", default=max(1, int(0.75 * hidden / key_heads)))
        sizes = {
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": count(config, "linear_num_value_heads", default=heads),
            "linear_key_head_dim": key_dim,
            "linear_value_head_dim": count(config, "linear_value_head_dim", default=2 * key_dim),
        }
        form = replace(
            OlmoDeltaNet.of(config | sizes),
            beta_factor=2.0 if flag(config, "linear_allow_neg_eigval", True) else 1.0,
            norm_eps=MIXER_EPS,
        )
        layers = linear_layers(config, num_layers)
        if layers is None:
            layers = frozenset(index for index in range(num_layers) if index % 4 != 3)
        spec = super().read_spec(config)
        theta = (config.get("rope_parameters") or config).get("rope_theta")
        spec = replace(spec, rope=None if theta is None else read_rope(config, spec.head_dim))
        return with_recurrence(spec, form, layers)

    @classmethod
    def layer_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, LlamaSpec)
        is_recurrent = index in spec.layers_without_kv
        return super().layer_tensors(replace(spec, norm_places="before") if is_recurrent else spec, index)

    @classmethod
    def separate(cls, checkpoint: Checkpoint, spec: ModelSpec) -> Checkpoint:
        for index in range(spec.num_layers):
            for name, usual in NORM_NAMES.items():
                rename(
                    checkpoint, f"model.layers.{index}.{name}.weight", f"model.layers.{index}.{usual}.weight"
                )
        return super().separate(checkpoint, spec)

    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        if CONV not in weights:
            return super().layer(index, weights, hidden, kv, batch)
        hidden = hidden + self.attention(index, weights, self._norm("input_norm", weights, hidden), kv, batch)
        return hidden + self.mlp(index, weights, self._norm("post_norm", weights, hidden))
