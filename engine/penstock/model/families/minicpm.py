"""MiniCPM 1, 2 and 4 (arXiv 2404.06395, 2506.07900) have Llama's layer and three constants: factors of the
embedding, of what each layer adds, and of the last hidden state. MiniCPM3 has latent attention besides."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

from penstock.errors import UnsupportedModel
from penstock.model.attention.latent import LatentForm
from penstock.model.config_values import count, flag, number, require
from penstock.model.families.llama import Llama
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.layers import ACTIVATION_FUNCTIONS
from penstock.model.rope import read_rope

logger = logging.getLogger(__name__)

#: Keys of config.json that other models of the line have, and what these models are.
_OTHER_MODELS = {
    "num_experts": "a mixture of experts (MiniCPM-MoE)",
    "q_lora_rank": "latent attention, which MiniCPM3ForCausalLM has",
    "kv_lora_rank": "latent attention, which MiniCPM3ForCausalLM has",
    "mixer_types": "linear attention (MiniCPM-SALA)",
    "qk_norm": "norms on the heads of q and k",
    "kv_channels": "heads of another size (VoxCPM)",
}


class MiniCPM(Llama):
    """Llama with three factors."""

    architectures = ("MiniCPMForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        _refuse_other_models(config)
        # The head is the embedding unless the config says otherwise, as in MiniCPM's own code.
        return cls._with_factors(config, super().read_spec({"tie_word_embeddings": True} | config))

    @classmethod
    def _with_factors(cls, config: dict[str, Any], base: LlamaSpec) -> LlamaSpec:
        depth, width = _constant(config, "scale_depth"), _constant(config, "dim_model_base")
        if config.get("sparse_config"):
            logger.info(
                "config.json has sparse_config (InfLLM-V2). Penstock computes dense attention: the results "
                "and the time of long texts equal the model's without sparse_config"
            )
        return replace(
            base,
            embedding_factor=number(config, "scale_emb"),
            branch_factor=1.0 if depth is None else depth / math.sqrt(base.num_layers),
            head_factor=1.0 if width is None else width / base.hidden_size,
        )


class MiniCPM3(MiniCPM):
    """MiniCPM with latent attention, in which rope turns halves of its dimensions, as in Llama."""

    architectures = ("MiniCPM3ForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        latent = {name: None for name in ("q_lora_rank", "kv_lora_rank")}
        _refuse_other_models(config | latent)
        head_dim = count(config, "hidden_size") // count(config, "num_attention_heads")
        form = LatentForm.of(config, head_dim, flag(config, "attention_bias", False))
        values = form.values(config, read_rope(config, form.rope_dim))
        has_bias = flag(config, "mlp_bias", False)
        tied = {"tie_word_embeddings": True} | config
        return cls._with_factors(config, cls._spec(tied, has_mlp_bias=has_bias, **values))


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
