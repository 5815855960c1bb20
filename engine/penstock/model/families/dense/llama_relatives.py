"""Families that differ from Llama in biases, activation, factors, windows, or in which layers have rope."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from penstock.model.architecture import layer_kinds, sliding_windows
from penstock.model.config_values import count, flag, num_layers_of, number, refuse, require
from penstock.model.families.llama import HEAD_NORMS, Llama, Mistral
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.layers import AttentionForm, QueryGrowth, activation_function
from penstock.model.norms import HeadNorms
from penstock.model.rope import read_rope
from penstock.spec import RopeSpec


class Arcee(Llama):
    """Llama with a plain mlp, down(relu(up x)^2)."""

    architectures = ("ArceeForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        function = activation_function(config.get("hidden_act") or "relu2")
        return replace(super().read_spec(config), has_gate=False, activation=function)


class InternLM3(Llama):
    """Llama with other names for its biases."""

    architectures = ("InternLM3ForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        has_qkv_bias = flag(config, "qkv_bias", flag(config, "attention_bias", False))
        has_bias = flag(config, "bias", flag(config, "mlp_bias", False))
        return cls._spec(config, has_qkv_bias=has_qkv_bias, has_o_bias=has_bias, has_mlp_bias=has_bias)


class SeedOss(Llama):
    """Llama with biases on q, k and v."""

    architectures = ("SeedOssForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        require(config, "pretraining_tp", 1)
        return cls._spec(
            config,
            has_qkv_bias=flag(config, "attention_bias", True),
            has_o_bias=flag(config, "attention_out_bias", False),
            has_mlp_bias=flag(config, "mlp_bias", False),
        )


class Cwm(Llama):
    """Llama with windows in three of four layers."""

    architectures = ("CwmForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        if not config.get("rope_parameters") and not config.get("rope_scaling"):
            scaling = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            config = config | {"rope_scaling": scaling | {"original_max_position_embeddings": 8192}}
        config = {"rope_theta": 1e6, "sliding_window": 8192} | config
        num_layers = num_layers_of(config, "num_hidden_layers")
        types = config.get("layer_types") or [
            "sliding_attention" if index % 4 else "full_attention" for index in range(num_layers)
        ]
        return cls._spec(
            config,
            has_mlp_bias=flag(config, "mlp_bias", False),
            sliding_windows=sliding_windows(config | {"layer_types": types}, num_layers),
        )


class Ernie45(Llama):
    """Llama whose rope turns neighbouring dimensions. All matrices have a bias, or none has."""

    architectures: ClassVar[tuple[str, ...]] = ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM")

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        base = cls._spec({"rope_theta": 500000.0, "tie_word_embeddings": True} | config)
        has_bias = flag(config, "use_bias", False)
        assert base.rope is not None
        return replace(
            base,
            rope=replace(base.rope, is_interleaved=True),
            has_qkv_bias=has_bias,
            has_o_bias=has_bias,
            has_mlp_bias=has_bias,
        )


class Helium(Llama):
    """Llama whose rope turns neighbouring dimensions."""

    architectures = ("HeliumForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        base = super().read_spec({"rope_theta": 100000.0} | config)
        assert base.rope is not None
        return replace(base, rope=replace(base.rope, is_interleaved=True), has_o_bias=False)


class Granite(Llama):
    """Llama with four factors: of the embedding, of what each layer adds, of scores and of logits."""

    architectures = ("GraniteForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        logits_divisor = number(config, "logits_scaling", 1.0)
        if not logits_divisor:
            refuse("logits_scaling", 0, "a number above 0")
        return replace(
            super().read_spec(config),
            attention_scale=number(config, "attention_multiplier", 1.0),
            embedding_factor=number(config, "embedding_multiplier", 1.0),
            branch_factor=number(config, "residual_multiplier", 1.0),
            head_factor=1.0 / logits_divisor,
        )


class SmolLM3(Llama):
    """Llama without rope in every fourth layer."""

    architectures = ("SmolLM3ForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        base = super().read_spec({"rope_theta": 2e6, "tie_word_embeddings": True} | config)
        has_rope = cls._layers_with_rope(config, base.num_layers)
        types = config.get("layer_types") or [
            "full_attention" if rope else "sliding_attention" for rope in has_rope
        ]
        windowed = {"use_sliding_window": False} | config | {"layer_types": types}
        return replace(
            base,
            layer_ropes=tuple(base.rope if rope else None for rope in has_rope),
            sliding_windows=sliding_windows(windowed, base.num_layers),
        )

    @classmethod
    def _layers_with_rope(cls, config: dict[str, Any], num_layers: int) -> list[int]:
        """1 for each layer with rope, 0 for each without. config.json calls the list `no_rope_layers`."""
        listed = config.get("no_rope_layers")
        if not listed:
            interval = count(config, "no_rope_layer_interval", default=4)
            return [int((index + 1) % interval != 0) for index in range(num_layers)]
        if not isinstance(listed, list) or len(listed) != num_layers or not {*listed} <= {0, 1}:
            refuse("no_rope_layers", listed, f"a list with 1 (rope) or 0 for each of {num_layers} layers")
        return listed


class Exaone4(Llama):
    """Norms after attention and mlp, norms on the heads of q and k. If some layers have a window, the others
    have no rope (arXiv 2507.11407)."""

    architectures = ("Exaone4ForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        config = {"sliding_window": 4096} | config  # null means none
        num_layers, pattern = num_layers_of(config, "num_hidden_layers"), config.get("sliding_window_pattern")
        named = {"sliding_window_pattern": pattern or 4}
        # "LLLG": local, then global.
        period = len(pattern) if isinstance(pattern, str) else count(named, "sliding_window_pattern")
        kinds = layer_kinds(config, num_layers, period)
        windows = sliding_windows(config | {"layer_types": list(kinds)}, num_layers)
        base = cls._spec(config, norm_places="after", attention=HEAD_NORMS, sliding_windows=windows)
        if not config.get("sliding_window"):
            return base
        return replace(base, layer_ropes=ropes_of_windows(base))


class HunYuanDense(Llama):
    """Llama with norms on the heads of q and k, after rope."""

    architectures = ("HunYuanDenseV1ForCausalLM",)
    head_norm_parts = ("query_layernorm", "key_layernorm")

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        require(config, "use_qk_norm", True)
        require(config, "use_cla", False, None)
        form = AttentionForm(norms=HeadNorms(is_after_rope=True))
        return replace(super().read_spec(_with_fixed_base(config)), attention=form)


class Ministral(Mistral):
    """Mistral, whose config names the layers that have a window."""

    architectures = ("MinistralForCausalLM",)


#: The rope of Ministral 3 where config.json has none.
MINISTRAL3_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


class Ministral3(Mistral):
    """Mistral whose q grows with the position."""

    architectures = ("Ministral3ForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
            config = config | {"rope_parameters": MINISTRAL3_ROPE}
        growth = query_growth(config)
        base = super().read_spec({"sliding_window": None} | config)
        return replace(base, attention=AttentionForm(growth=growth))


def query_growth(config: dict[str, Any]) -> QueryGrowth | None:
    """How q grows with the position, as the rope of a config.json describes it."""
    scaling = (config.get("rope_scaling") or {}) | (config.get("rope_parameters") or {})
    if not scaling.get("llama_4_scaling_beta"):
        return None
    length = count(scaling, "original_max_position_embeddings")
    return QueryGrowth(number(scaling, "llama_4_scaling_beta"), length)


def ropes_of_windows(spec: LlamaSpec) -> tuple[RopeSpec | None, ...]:
    """Rope in the layers with a window, and none in the others."""
    return tuple(spec.rope if spec.sliding_window(index) else None for index in range(spec.num_layers))


def _with_fixed_base(config: dict[str, Any]) -> dict[str, Any]:
    """The config with a plain rope in place of a "dynamic" one with `alpha`, whose base is larger by a fixed
    factor."""
    rope = read_rope(config, 2)
    alpha = rope.parameters.get("alpha")
    if rope.scaling != "dynamic" or not alpha:
        return config
    heads = count(config, "num_attention_heads")
    dim = count(config, "head_dim", default=count(config, "hidden_size") // heads)
    base = rope.theta * number({"alpha": alpha}, "alpha") ** (dim / (dim - 2))
    return config | {"rope_parameters": None, "rope_scaling": None, "rope_theta": base}
