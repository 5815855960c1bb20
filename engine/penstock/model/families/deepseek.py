"""DeepSeek V2, V2-Lite and V3, and R1, which is a V3 (arXiv 2405.04434, 2412.19437): latent attention, and a
mixture after a few dense layers. Mistral 4 has both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

from penstock.model.attention.latent import LatentForm
from penstock.model.config_values import count, flag, require
from penstock.model.families.deepseek_mixture import deepseek_mixture, num_extra_layers
from penstock.model.families.dense.llama_relatives import query_growth
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.families.mixture_frame import MixtureFamily, with_mixture
from penstock.model.mixture.mixture import Mixture
from penstock.model.rope import read_rope
from penstock.spec import ModelSpec
from penstock.weights.tensors import ModelTensors


class DeepseekV2(MixtureFamily):
    """The router has a softmax. Rope turns pairs of neighbours."""

    architectures = ("DeepseekV2ForCausalLM",)
    scoring: ClassVar[Literal["softmax", "sigmoid"]] = "softmax"
    #: Layers without experts where the config is silent.
    num_dense: ClassVar[int] = 0

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        require(config, "mlp_bias", False, None)
        require(config, "pretraining_tp", 1, None)
        form = LatentForm.of(config, has_bias=flag(config, "attention_bias", False))
        form = replace(form, growth=query_growth(config))
        rope = replace(read_rope(config, form.rope_dim), is_interleaved=cls._is_interleaved(config))
        mixture = cls._mixture(config)
        spec = cls._spec(config, **form.values(config, rope))
        return with_mixture(spec, mixture, num_extra_layers=num_extra_layers(config))

    @classmethod
    def _mixture(cls, config: dict[str, Any]) -> Mixture:
        return deepseek_mixture(config, cls.scoring, cls.num_dense)

    @classmethod
    def _is_interleaved(cls, config: dict[str, Any]) -> bool:
        return True


class DeepseekV3(DeepseekV2):
    """The router has a sigmoid, and a correction where experts are chosen."""

    architectures = ("DeepseekV3ForCausalLM",)
    scoring = "sigmoid"
    num_dense = 3

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        return super().read_spec({"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5} | config)

    @classmethod
    def _is_interleaved(cls, config: dict[str, Any]) -> bool:
        return flag(config, "rope_interleave", True)


#: The rope of Mistral 4 where config.json has none.
_MISTRAL4_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


class Mistral4(DeepseekV3):
    """DeepSeek V3 whose router has a softmax without a correction, and whose q grows with the position."""

    architectures = ("Mistral4ForCausalLM",)
    num_dense = 0

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
            config = config | {"rope_parameters": _MISTRAL4_ROPE}
        silent = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "n_shared_experts": 1}
        return super().read_spec(silent | config)

    @classmethod
    def _mixture(cls, config: dict[str, Any]) -> Mixture:
        require(config, "scoring_func", "softmax")
        mixture = deepseek_mixture(config | {"scoring_func": "sigmoid"}, "sigmoid", cls.num_dense)
        routing = replace(mixture.routing, function="softmax", has_correction=False)
        return replace(mixture, routing=routing)


class DeepseekV32(DeepseekV3):
    """DeepSeek V3.2 (arXiv 2512.02556): an indexer chooses `index_topk` keys for each query. Up to so many
    tokens the indexer chooses all, and attention is V3's. Longer texts are not computed."""

    architectures = ("DeepseekV32ForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        spec, most = super().read_spec(config), count(config, "index_topk", default=2048)
        if spec.max_position_embeddings <= most:
            return spec
        note = (
            f"the context is limited to {most} tokens, index_topk in config.json: of up to so many the "
            "model's indexer (DSA) chooses every token, and attention to all of them is exactly the model's. "
            "What it would choose of more tokens is not computed, and its tensors (self_attn.indexer) are "
            "left out"
        )
        return replace(spec, max_position_embeddings=most, context_note=note)

    @classmethod
    def model_tensors(cls, spec: ModelSpec) -> ModelTensors:
        tensors = super().model_tensors(spec)
        return replace(tensors, unused=(*tensors.unused, r"\.self_attn\.indexer\."))


class GlmMoeDsa(DeepseekV32):
    """GLM-5 (arXiv 2602.15763): DeepSeek V3.2 without groups of experts. Some layers take the keys that the
    last indexer before has chosen."""

    architectures = ("GlmMoeDsaForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        return super().read_spec({"n_group": 1, "topk_group": 1} | config)
