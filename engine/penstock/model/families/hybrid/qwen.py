"""Qwen3-Next, Qwen3.5 and its mixtures: Gated DeltaNet in three of four layers, attention with a gate in the
others."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from penstock.kernels import Routing
from penstock.model.config_values import count, flag, number, require
from penstock.model.families.hybrid.layers import linear_layers, with_recurrence
from penstock.model.families.llama import Llama
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.families.mixture_frame import (
    MixtureFamily,
    all_layers,
    chosen_of,
    sparse_layers,
    with_mixture,
)
from penstock.model.heads.mtp import MTPHead
from penstock.model.layers import AttentionForm
from penstock.model.mixture.mixture import Mixture
from penstock.model.norms import HeadNorms, Norm
from penstock.model.recurrent.delta_net import GatedDeltaNet
from penstock.model.rope import read_rope, rotary_dim
from penstock.spec import ModelSpec

#: Checkpoints keep the weights of norms as their difference from 1, but for those after the recurrence.
FROM_ONE = Norm(offset=1.0)


class Qwen35(Llama):
    """Qwen3.5 without experts, which computes text. Rope turns a quarter of each head."""

    architectures = ("Qwen3_5ForCausalLM",)
    #: The head that guesses further tokens.
    unused_tensors = (r"^(model\.)?mtp\.",)
    #: GatedDeltaNet.is_grouped
    _is_grouped = False

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        require(config, "hidden_act", "silu")
        has_bias = flag(config, "attention_bias", False)
        head_dim = count(config, "head_dim", default=256)
        config = config | {"head_dim": head_dim}
        spec = cls._spec(
            {"intermediate_size": head_dim} | config,  # a mixture may have none
            has_qkv_bias=has_bias,
            has_o_bias=has_bias,
            attention=AttentionForm(norms=HeadNorms(FROM_ONE), has_gate=True),
            norm=FROM_ONE,
            rope=read_rope(config, rotary_dim(config, head_dim, 0.25)),
            num_extra_layers=int(number(config, "mtp_num_hidden_layers", 0)),
        )
        form = GatedDeltaNet.of(config, cls._is_grouped)
        recurrent = linear_layers(config, spec.num_layers)
        if recurrent is None:
            period = count(config, "full_attention_interval", default=4)
            recurrent = frozenset(index for index in range(spec.num_layers) if (index + 1) % period)
        return with_recurrence(spec, form, recurrent)

    @classmethod
    def mtp_head(cls, spec: LlamaSpec) -> MTPHead | None:
        return MTPHead.of_qwen()

    @classmethod
    def mtp_spec(cls, spec: ModelSpec, names: Collection[str] | None) -> ModelSpec | None:
        """The config.json of Qwen3-Next does not tell of its head: the names of tensors do."""
        assert isinstance(spec, LlamaSpec)
        return None if names is None and not spec.num_extra_layers else super().mtp_spec(spec, names)


class Qwen35Moe(MixtureFamily, Qwen35):
    """Qwen3.5 with experts in every layer, and a shared one that has a gate."""

    architectures = ("Qwen3_5MoeForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        spec = super().read_spec(config)
        return with_mixture(spec, _mixture(config, spec, all_layers(spec), is_renormalized=True))


class Qwen3Next(MixtureFamily, Qwen35):
    """Qwen3-Next: the rows of its projections are grouped by key heads."""

    architectures = ("Qwen3NextForCausalLM",)
    _is_grouped = True

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        spec = super().read_spec(config)
        is_renormalized = flag(config, "norm_topk_prob", True)
        layers = sparse_layers(config, spec.num_layers)
        return with_mixture(spec, _mixture(config, spec, layers, is_renormalized))


def _mixture(
    config: dict[str, Any], spec: LlamaSpec, layers: frozenset[int], is_renormalized: bool
) -> Mixture:
    num_experts = count(config, "num_experts", "num_local_experts")
    routing = Routing(num_experts, chosen_of(config, num_experts), is_renormalized=is_renormalized)
    size, shared = count(config, "moe_intermediate_size"), count(config, "shared_expert_intermediate_size")
    return Mixture(routing, spec.hidden_size, size, layers, shared_size=shared, has_shared_gate=True)
