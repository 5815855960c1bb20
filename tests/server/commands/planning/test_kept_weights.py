"""The 30 repositories that people downloaded most in autumn 2026, by their config.json as far as it is known
(sizes of some are those of their kin): each is planned, with at most an image part left out, or refused for a
known reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config import EngineConfig
from penstock.errors import UnsupportedModel
from penstock_server.commands.planning.footprints import described_at

Config = dict[str, Any]


def whole(architecture: str, kind: str, text: Config, **others: Any) -> Config:
    """A model that sees."""
    return {
        "architectures": [f"{architecture}ForConditionalGeneration"], "model_type": kind,
        "text_config": {"model_type": f"{kind}_text"} | text, "vision_config": {"depth": 27},
        "tie_word_embeddings": False,
    } | others  # fmt: skip


def hybrid(hidden: int, layers: int, heads: int, values: int, **others: Any) -> Config:
    """Gated DeltaNet, with every fourth layer attention."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320, "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6, "intermediate_size": 17408, "linear_num_key_heads": 16,
        "linear_num_value_heads": values, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "mtp_num_hidden_layers": 1, "hidden_act": "silu",
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
        "rope_parameters": rope | {"mrope_section": [11, 11, 10], "mrope_interleaved": True},
    } | others  # fmt: skip


EXPERTS = {
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_key_value_heads": 2,
}  # fmt: skip
DENSE_27B = whole("Qwen3_5", "qwen3_5", hybrid(5120, 64, 24, 48))
MIXED_35B = whole("Qwen3_5Moe", "qwen3_5_moe", hybrid(2048, 40, 16, 32, **EXPERTS))
NVFP4 = {
    "quantization_config": {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.visual*", "mtp*"],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    }
}  # fmt: skip


def qwen3(hidden: int, layers: int, heads: int, inner: int) -> Config:
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": hidden, "head_dim": 128,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8,
        "intermediate_size": inner, "vocab_size": 151936, "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "hidden_act": "silu",
    }  # fmt: skip


def gemma4(hidden: int, layers: int, heads: int, inner: int, **others: Any) -> Config:
    kinds = [("full_attention" if index % 6 == 5 else "sliding_attention") for index in range(layers)]
    text = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": inner, "vocab_size": 262144,
        "sliding_window": 1024, "layer_types": kinds, "hidden_size_per_layer_input": 0,
    }  # fmt: skip
    return whole("Gemma4", "gemma4", text | others, tie_word_embeddings=True)


def gpt_oss(layers: int, experts: int) -> Config:
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    rope = {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    }  # fmt: skip
    return {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "head_dim": 64,
        "num_hidden_layers": layers, "num_attention_heads": 64, "num_key_value_heads": 8,
        "intermediate_size": 2880, "num_local_experts": experts, "num_experts_per_tok": 4,
        "sliding_window": 128, "vocab_size": 201088, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 150000, "rope_scaling": rope, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "attention_bias": True,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": left_out},
    }  # fmt: skip


def from_transformers(kind: str, architecture: str, **changes: Any) -> Config:
    """What the class of a configuration has by default."""
    import transformers

    made = transformers.CONFIG_MAPPING[kind](**changes).to_dict()
    return made | {"architectures": [architecture], "model_type": kind}


def nemotron(pattern: str, **changes: Any) -> Config:
    kinds = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
    layers = [kinds[letter] for letter in pattern]
    return from_transformers("nemotron_h", "NemotronHForCausalLM", layers_block_type=layers, **changes)


NANO = nemotron("MEMEM*EMEMEM*E" * 3, hidden_size=2688, mamba_num_heads=64, mamba_head_dim=64)
SUPER = nemotron(
    "MEMEM*EMEMEM*E" * 4, hidden_size=4096, n_routed_experts=512, num_experts_per_tok=22,
    moe_intermediate_size=2688, moe_latent_size=1024,
)  # fmt: skip
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
    "vision_config": {"vt_hidden_size": 1152}, "tie_word_embeddings": False,
    "text_config": {
        "model_type": "kimi_k2", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64,
        "num_key_value_heads": 64, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "vocab_size": 163840, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
        "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "hidden_act": "silu",
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                        "group_size": 32,
                    },
                }
            },
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
        },
    },
}  # fmt: skip
V4 = from_transformers("deepseek_v4", "DeepseekV4ForCausalLM")
#: From the most downloaded on. A GGUF file has the architecture of its original, whose config.json this is.
SERVED: dict[str, Config] = {
    "Qwen/Qwen3-0.6B": qwen3(1024, 28, 16, 3072),
    "Qwen/Qwen3-4B": qwen3(2560, 36, 32, 9728),
    "unsloth/Qwen3.8-27B-GGUF": DENSE_27B,
    "Qwen/Qwen3.8-27B": DENSE_27B,
    "Qwen/Qwen3.6-27B": DENSE_27B,
    "Qwen/Qwen3.6-35B-A3B": MIXED_35B,
    "openai/gpt-oss-120b": gpt_oss(36, 128),
    "openai/gpt-oss-20b": gpt_oss(24, 32),
    "Ornith-1.0-35B": MIXED_35B,
    "DavidAU's fine-tune of Qwen3.8-27B": DENSE_27B,
    "Qwen3.6-27B-NVFP4": DENSE_27B | NVFP4,
    "Nemotron-3-Super-120B-A12B": SUPER,
    "Qwen3.6-27B-MTP-GGUF": DENSE_27B,
    "Ornith-1.5-35B": MIXED_35B,
    "Qwen3.6-35B-A3B-MTP-GGUF": MIXED_35B,
    "a fine-tune of gemma-4-12B, GGUF": gemma4(3840, 48, 16, 15360),
    "google/gemma-4-26B-A4B-it": gemma4(
        2816, 30, 16, 2112, enable_moe_block=True, num_experts=128, top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "google/gemma-4-31B-it": gemma4(5376, 60, 32, 21504),
    "google/gemma-4-E4B-it": gemma4(
        2560, 42, 8, 10240, num_key_value_heads=2, hidden_size_per_layer_input=256, num_kv_shared_layers=18
    ),
    "Nemotron-3-Nano-30B-A3B": NANO,
    "Laguna-S-2.1-NVFP4": from_transformers("laguna", "LagunaForCausalLM") | NVFP4,
    "Muse-Glimmer-30B-GGUF": whole("MuseGlimmer", "muse_glimmer", from_transformers("muse_glimmer_text", "")),
    "Ling-3.0-Flash-GGUF": from_transformers("bailing_hybrid", "BailingMoeV3ForCausalLM", head_dim=128)
    | {"expert_swiglu_limit_list": [0.0] * 35 + [4.0] * 7},
    "GLM-5.2-GGUF": {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "hidden_size": 6144,
        "num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048,
        "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "intermediate_size": 12288, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "vocab_size": 154880,
        "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "index_topk": 2048,
        "index_n_heads": 32, "index_head_dim": 128, "tie_word_embeddings": False,
    },
    "antirez's DeepSeek-V4-Flash, GGUF": V4,
    "DeepSeek-V4-Flash, abliterated, GGUF": V4,
    "Qwen/Qwen3.5-9B": whole("Qwen3_5", "qwen3_5", hybrid(4096, 32, 16, 32)),
}  # fmt: skip
#: Up to as many tokens as the indexer of its attention chooses.
#: In every engine's list, with no number of downloads.
OTHERS = {
    "moonshotai/Kimi-K2.6": KIMI,
    "mistralai/Mistral-Small-4-119B": whole(
        "Mistral3", "mistral3", from_transformers("mistral4", "Mistral4ForCausalLM")
    ),
}
THROUGH_TRANSFORMERS: dict[str, tuple[str, str, Config]] = {
    "zai-org/GLM-4.7-Flash": ("glm4_moe_lite", "Glm4MoeLiteForCausalLM", {}),
}
#: Those that are not computed: config.json, why not, and the repositories.
REFUSED: dict[str, tuple[Config, str, list[str]]] = {
    "Qwen3.8-Flash-Next": (
        whole("Qwen4Exp", "qwen4_exp", hybrid(2048, 48, 16, 32, **EXPERTS)),
        "Qwen4ExpForCausalLM.*recurrent state",
        ["Qwen/Qwen3.8-Flash-Next", "Qwen3.8-Flash-Next-GGUF"],
    ),
}  # fmt: skip


def line_of(config: Config, folder: Path) -> str:
    """What a plan says of a repository's weights."""
    (folder / "config.json").write_text(json.dumps(config))
    size, (line,) = described_at(folder, EngineConfig())
    assert size.layer_bytes and line.startswith("weights: ")
    return line


def _cases() -> list[Any]:
    """A config that several repositories have is often tried once."""
    first = {id(config): name for name, config in reversed(SERVED.items())}
    often = {*first.values()} - {"openai/gpt-oss-120b"}  # 20b is the same with fewer experts
    return [pytest.param(name, marks=() if name in often else pytest.mark.slow) for name in SERVED | OTHERS]


@pytest.mark.parametrize("name", _cases())
def test_what_people_download_is_planned(name: str, tmp_path: Path) -> None:
    """By our own code; nothing but images is left out."""
    config = (SERVED | OTHERS)[name]
    line = line_of(config, tmp_path)
    assert "computed by Penstock's own code" in line
    left_out = line.partition("left out: ")[2].partition(";")[0]
    expected = {"images"} if "vision_config" in config else set()
    expected |= {"the files' scales of keys and values"} if "NVFP4" in name else set()
    assert {*filter(None, left_out.split(", "))} == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", THROUGH_TRANSFORMERS)
def test_what_transformers_modules_compute(name: str, tmp_path: Path) -> None:
    kind, architecture, others = THROUGH_TRANSFORMERS[name]
    assert "transformers' modules" in line_of(from_transformers(kind, architecture) | others, tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused(name: str, tmp_path: Path) -> None:
    """A model that has come to be served belongs into the table of those."""
    config, reason, _ = REFUSED[name]
    with pytest.raises(UnsupportedModel, match=f"{reason}.*What comes nearest and works: "):
        line_of(config, tmp_path)


def test_how_many_of_thirty_are_served() -> None:
    refused = [repository for _, _, repositories in REFUSED.values() for repository in repositories]
    assert (len(SERVED) + len(THROUGH_TRANSFORMERS), len(refused)) == (28, 2)
