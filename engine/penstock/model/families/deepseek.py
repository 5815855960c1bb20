"""DeepSeek V2, V2-Lite and V3, and R1, which is a V3 (arXiv 2405.04434, 2412.19437): latent attention, and a
mixture after a few dense layers. Mistral 4 has both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

from penstock.model.attention.indexer import Indexer
from penstock.model.attention.latent import LatentForm
from penstock.model.config_values import count, flag, number, refuse, require
from penstock.model.families.deepseek_mixture import deepseek_mixture, num_extra_layers
from penstock.model.families.dense.llama_relatives import query_growth
from penstock.model.families.hybrid.layers import kinds_of
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.families.mixture_frame import MixtureFamily, with_mixture
from penstock.model.heads.mtp import MTPHead
from penstock.model.mixture.mixture import Mixture
from penstock.model.rope import read_rope
from penstock.spec import ModelSpec
from penstock.weights.tensors import ModelTensors, TensorSpec


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
    """DeepSeek V3.2 (arXiv 2512.02556): an indexer chooses the keys of each query. Up to `index_topk` tokens
    it chooses all, and attention is V3's."""

    architectures = ("DeepseekV32ForCausalLM",)
    num_index_heads: ClassVar[int] = 64
    has_interleaved_index: ClassVar[bool] = False

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        spec = super().read_spec(config)
        assert spec.latent is not None
        if not spec.latent.query_rank:
            refuse("q_lora_rank", config.get("q_lora_rank"), "the rank of the indexer's queries")
        width = count(config, "index_head_dim", default=128)
        if spec.latent.rope_dim > width:
            refuse("index_head_dim", width, f"at least qk_rope_head_dim, {spec.latent.rope_dim}")
        indexer = Indexer(
            count(config, "index_n_heads", default=cls.num_index_heads),
            width,
            count(config, "index_topk", default=2048),
            cls.has_interleaved_index,
            cls._shared(config, spec.num_layers),
        )
        return replace(
            spec,
            latent=replace(spec.latent, indexer=indexer),
            side_dims=(width,),
            num_chosen_keys=indexer.num_chosen,
            layers_without_choice=indexer.shared,
        )

    @classmethod
    def _shared(cls, config: dict[str, Any], num_layers: int) -> frozenset[int]:
        """Indexer.shared"""
        return frozenset()

    @classmethod
    def attention_tensors(cls, spec: LlamaSpec, index: int, prefix: str) -> tuple[TensorSpec, ...]:
        tensors, latent = super().attention_tensors(spec, index, prefix), spec.latent
        if latent is None or latent.indexer is None or index in latent.indexer.shared:
            return tensors
        return (*tensors, *latent.indexer.tensors(spec, latent.query_rank, prefix))

    @classmethod
    def _as_head(cls, spec: LlamaSpec, head: MTPHead) -> LlamaSpec:
        """The head attends to all keys: what it guesses is checked."""
        found = super()._as_head(spec, head)
        assert found.latent is not None
        plain = replace(found.latent, indexer=None)
        return replace(
            found, latent=plain, side_dims=(), num_chosen_keys=0, layers_without_choice=frozenset()
        )

    @classmethod
    def model_tensors(cls, spec: ModelSpec) -> ModelTensors:
        tensors = super().model_tensors(spec)
        assert isinstance(spec, LlamaSpec)
        is_head = spec.mtp is not None
        return replace(tensors, unused=(*tensors.unused, r"\.self_attn\.indexer\.")) if is_head else tensors


class GlmMoeDsa(DeepseekV32):
    """GLM-5 (arXiv 2602.15763): DeepSeek V3.2 without groups of experts. Some layers take the keys that the
    last indexer before has chosen."""

    architectures = ("GlmMoeDsaForCausalLM",)
    num_index_heads = 32
    has_interleaved_index = True

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        return super().read_spec({"n_group": 1, "topk_group": 1} | config)

    @classmethod
    def _shared(cls, config: dict[str, Any], num_layers: int) -> frozenset[int]:
        """By the kind of each layer, by a pattern of letters, or every so many layers."""
        letters = {"F": "full", "S": "shared"}
        pattern = config.get("index_topk_pattern")
        if isinstance(pattern, str):
            pattern = [letters.get(letter, letter) for letter in pattern]
        kinds = kinds_of({"index": config.get("indexer_types") or pattern}, ("index",), num_layers)
        if kinds is None:
            every = count(config, "index_topk_freq", default=1)
            first = int(number(config, "index_skip_topk_offset", 2))
            return frozenset(index for index in range(num_layers) if max(index - first + 1, 0) % every)
        if {*kinds} - {"full", "shared"} or kinds[0] != "full":
            refuse("indexer_types", list(kinds), "full or shared for each layer, and full for the first one")
        return frozenset(index for index, kind in enumerate(kinds) if kind == "shared")
