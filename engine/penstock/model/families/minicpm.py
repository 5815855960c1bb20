"""MiniCPM 1, 2 and 4 (arXiv 2404.06395, 2506.07900) have Llama's layer and three constants: factors of the
embedding, of what each layer adds, and of the last hidden state."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.errors import UnsupportedModel
from penstock.kernels import BatchLayout, LayerKV
from penstock.model.config_values import number, require
from penstock.model.families.llama import Llama, LlamaSpec
from penstock.model.layers import ACTIVATION_FUNCTIONS, attend, gated_mlp
from penstock.weights.layer_weights import LayerWeights

logger = logging.getLogger(__name__)

#: Keys of config.json that other models of the line have, and what these models are.
_OTHER_MODELS = {
    "num_experts": "a mixture of experts (MiniCPM-MoE)",
    "q_lora_rank": "latent attention (MiniCPM3)",
    "kv_lora_rank": "latent attention (MiniCPM3)",
    "mixer_types": "linear attention (MiniCPM-SALA)",
    "qk_norm": "norms on the heads of q and k",
    "kv_channels": "heads of another size (VoxCPM)",
}


@dataclass(frozen=True)
class MiniCPMSpec(LlamaSpec):
    """Llama's numbers, and the factors that MiniCPM adds. 1 changes nothing."""

    embedding_factor: float = 1.0
    #: Of what attention adds to the hidden state, and of what the mlp adds.
    branch_factor: float = 1.0
    #: Of the hidden state behind the final norm.
    head_factor: float = 1.0


class MiniCPM(Llama):
    """Llama with three factors. Products with a factor and sums are separate operations, because a fused
    operation rounds once, and not all of torch's loops fuse."""

    architectures = ("MiniCPMForCausalLM",)
    spec: MiniCPMSpec

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> MiniCPMSpec:
        _refuse_other_models(config)
        # The head is the embedding unless the config says otherwise, as in MiniCPM's own code.
        base = super().read_spec({"tie_word_embeddings": True} | config)
        depth, width = _constant(config, "scale_depth"), _constant(config, "dim_model_base")
        if config.get("sparse_config"):
            logger.info(
                "config.json has sparse_config (InfLLM-V2). Penstock computes dense attention: the results "
                "are those of the model without sparse_config, and long texts take as long as there"
            )
        return MiniCPMSpec(
            **vars(base),
            embedding_factor=number(config, "scale_emb"),
            branch_factor=1.0 if depth is None else depth / math.sqrt(base.num_layers),
            head_factor=1.0 if width is None else width / base.hidden_size,
        )

    def scale_tokens(self, vectors: Tensor) -> Tensor:
        return vectors * self.spec.embedding_factor

    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        spec, kernels = self.spec, self.kernels
        x = kernels.rms_norm(hidden, weights.vector("input_norm"), spec.norm_eps)
        hidden = hidden + attend(self, index, weights, x, kv, batch) * spec.branch_factor
        x = kernels.rms_norm(hidden, weights.vector("post_norm"), spec.norm_eps)
        return hidden + gated_mlp(self, weights, x, spec.activation) * spec.branch_factor

    def norm_final(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        return super().norm_final(weights, hidden) * self.spec.head_factor


def _constant(config: dict[str, Any], name: str) -> float | None:
    """The value of a constant; null, None here, is no scaling. Raises as number() does if the config does not
    have the constant."""
    return None if name in config and config[name] is None else number(config, name)


def _refuse_other_models(config: dict[str, Any]) -> None:
    """Raises UnsupportedModel for the models of the line whose layers compute something else."""
    for name, what in _OTHER_MODELS.items():
        if config.get(name):
            raise _unsupported(f"{name} = {config[name]!r:.40}", what)
    function = config.get("hidden_act", "silu")
    threshold = config.get("hidden_act_param") or 0
    if function not in ACTIVATION_FUNCTIONS or (threshold and function == "relu"):
        shown = f"hidden_act = {function!r}, hidden_act_param = {threshold!r}"
        raise _unsupported(shown, "an activation with a threshold (MiniCPM-S)")
    require(config, "use_mup", True, None)


def _unsupported(found: str, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"config.json has {found}, which means {what}. Of MiniCPM, Penstock computes the dense models 1, 2 "
        "and 4: take one of those, such as openbmb/MiniCPM-2B-sft-bf16 or openbmb/MiniCPM4-8B"
    )
