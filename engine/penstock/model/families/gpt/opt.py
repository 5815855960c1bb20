"""OPT (arXiv 2205.01068) and Galactica (arXiv 2211.09085): GPT-2 with learned positions that begin at 2.
OPT-350m has its norms after the sums, and an embedding that is narrower than the hidden state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from penstock.model.architecture import linear_tensors
from penstock.model.config_values import count, flag
from penstock.model.families.gpt.gpt import GPT
from penstock.model.families.gpt.gpt_architecture import GPTSpec, Keys, Names
from penstock.model.norms import Norm
from penstock.spec import ModelSpec
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec

#: Modules of a layer, which OPT's relatives share.
OPT_LAYER = Names(
    input_norm="self_attn_layer_norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    o="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    up=("fc1",),
    down="fc2",
)


@dataclass(frozen=True)
class OPTSpec(GPTSpec):
    """Configs differ in the width of the embedding."""

    #: 0: as wide as the hidden state.
    narrow_size: int = 0

    @property
    def embedding_size(self) -> int:
        return self.narrow_size or self.hidden_size


class OPT(GPT):
    """Two rows of the table of positions were used only for padding. A narrow embedding is projected to the
    hidden state, and the last hidden state back."""

    architectures = ("OPTForCausalLM",)
    optional_prefix = "model."
    position_offset = 2
    names = OPT_LAYER._replace(
        embedding="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        layers="model.decoder.layers",
        final_norm="model.decoder.final_layer_norm",
    )
    keys = Keys(ffn="ffn_dim", activation="activation_function")
    default_activation = "relu"
    spec: OPTSpec

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> OPTSpec:
        has_bias = flag(config, "enable_bias", True)
        has_weight = flag(config, "layer_norm_elementwise_affine", True)
        is_before = flag(config, "do_layer_norm_before", True)
        base = cls._spec(
            config,
            norm_eps=1e-5,
            norm=Norm(is_centred=True, has_weight=has_weight, has_bias=has_weight),
            is_post_norm=not is_before,
            has_final_norm=is_before and not flag(config, "_remove_final_layer_norm", False),
            has_qkv_bias=has_bias,
            has_o_bias=has_bias,
            has_mlp_bias=has_bias,
        )
        width = count(config, "word_embed_proj_dim", default=base.hidden_size)
        return OPTSpec(**vars(base), narrow_size=0 if width == base.hidden_size else width)

    @classmethod
    def embedding_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, OPTSpec)
        words, positions = super().embedding_tensors(spec)
        if not spec.narrow_size:
            return words, positions
        shape = (spec.hidden_size, spec.narrow_size)
        project = linear_tensors("project_in", shape, ("model.decoder.project_in",), has_bias=False)
        return _narrow(words, spec), positions, *project

    @classmethod
    def head_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, OPTSpec)
        tensors = super().head_tensors(spec)
        if not spec.narrow_size:
            return tensors
        shape = (spec.narrow_size, spec.hidden_size)
        project = linear_tensors("project_out", shape, ("model.decoder.project_out",), has_bias=False)
        return *project, *(_narrow(each, spec) if each.name == "head" else each for each in tensors)

    def place(self, weights: LayerWeights, vectors: Tensor, positions: Tensor) -> Tensor:
        if self.spec.narrow_size:
            vectors = self.host_kernels.linear(vectors, weights.matrix("project_in"))
        return super().place(weights, vectors, positions)

    def norm_final(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        hidden = super().norm_final(weights, hidden)
        return self.project(weights, "project_out", hidden) if self.spec.narrow_size else hidden


def _narrow(words: TensorSpec, spec: OPTSpec) -> TensorSpec:
    """The embedding, or the head, of a model with a narrow embedding."""
    return replace(words, shape=(spec.vocab_size, spec.embedding_size))
