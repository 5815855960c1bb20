"""config.json as publishers spelled it before transformers 5: the same numbers come out of both spellings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_families import Model
from tiny_models import build

from penstock.config import EngineConfig
from penstock.errors import PenstockError
from penstock.model.registry import find_family, read_spec

#: Name of a model, keys that the old spelling lacks, and what it has in their place.
OLD: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "Gemma 3": (
        ("rope_parameters", "layer_types"),
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0},
         "sliding_window_pattern": 2},
    ),
    "GLM-4": (("rope_parameters",), {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
    "OLMo 3": (
        ("rope_parameters", "layer_types"),
        {"rope_theta": 10000.0,
         "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48}},
    ),
    "SmolLM3": (("no_rope_layers", "layer_types", "rope_parameters"), {"rope_theta": 2e6}),
    "EXAONE 4": (("layer_types",), {"sliding_window_pattern": "LLLG"}),
    "Hunyuan": (
        ("rope_parameters",),
        {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
         "use_qk_norm": True},
    ),
    "Cohere 2": (("layer_types",), {"sliding_window_pattern": 4}),
    "Ministral 3": (
        ("rope_parameters",),
        {"rope_scaling": {"type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0,
                          "original_max_position_embeddings": 48, "mscale_all_dim": 0.5,
                          "llama_4_scaling_beta": 0.5}},
    ),
    "Qwen3-MoE": (
        ("rope_parameters", "num_local_experts"),
        {"rope_theta": 10000.0, "rope_scaling": None, "num_experts": 8, "use_sliding_window": False,
         "max_window_layers": 48},
    ),
    "GLM-4.5": (
        ("rope_parameters", "num_local_experts", "num_mtp_layers"),
        {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "n_routed_experts": 8,
         "num_nextn_predict_layers": 1},
    ),
    "MiniMax-M2": (
        ("rope_parameters",),
        {"rope_theta": 1e4, "rotary_dim": 12, "scoring_func": "sigmoid", "use_qk_norm": True,
         "qk_norm_type": "per_layer", "use_routing_bias": True, "shared_intermediate_size": 0},
    ),
    "Hunyuan-A13B": (
        ("num_local_experts",),
        {"num_experts": 5, "moe_topk": [2, 2, 2], "num_shared_expert": [1, 1, 1], "use_qk_norm": True,
         "moe_intermediate_size": [96, 96, 96], "moe_layer_num_skipped": 0},
    ),
    "ERNIE 4.5 MoE": (("moe_norm_min",), {"moe_gate": "topk", "num_nextn_predict_layers": 1}),
    "Llama 4": (("no_rope_layers", "layer_types", "moe_layers"), {}),
    "ERNIE 4.5": (("tie_word_embeddings",), {"architectures": ["Ernie4_5_ForCausalLM"]}),
}  # fmt: skip


@pytest.mark.parametrize("name", OLD)
def test_old_spellings_give_the_same_numbers(name: str, tmp_path: Path) -> None:
    build(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    missing, given = OLD[name]
    old = {key: value for key, value in config.items() if key not in missing} | given
    (family, new), (other, mine) = read_spec(config), read_spec(old)
    assert family is other
    if name == "Gemma 3":  # the pattern puts a full layer at every second place
        assert [rope.theta for rope in mine.layer_ropes if rope] == [1e4, 1e6, 1e4]
    assert [bare(rope) for rope in mine.ropes] == [bare(rope) for rope in new.ropes]
    for rope_of in (mine, new):
        assert not rope_of.layer_ropes or len(rope_of.layer_ropes) == rope_of.num_layers
    for field in ("mixture", "num_extra_layers", "attention_chunks"):
        assert getattr(mine, field, None) == getattr(new, field, None)
    same = ("sliding_windows", "attention", "norm", "norm_places", "is_tied", "max_position_embeddings")
    for field in same[:-2] if name == "ERNIE 4.5" else same:
        assert getattr(mine, field) == getattr(new, field), field


#: Classes of transformers' configurations, and keys that a config.json may lack.
SILENT: dict[str, tuple[str, ...]] = {
    "DeepseekV3": ("n_group", "topk_group", "routed_scaling_factor"),
    "Exaone4": ("sliding_window",),
    "Llama4Text": ("attention_chunk_size", "attn_temperature_tuning"),
    "MiniMaxM2": ("head_dim", "rope_parameters"),
    "Ministral": ("sliding_window",),
    "Ministral3": ("sliding_window", "rope_parameters"),
    "Mistral": ("sliding_window",),
    "Mixtral": ("rope_parameters",),
    "Phimoe": ("rope_parameters",),
}


@pytest.mark.parametrize("name", SILENT)
def test_a_missing_key_has_the_value_that_transformers_gives_it(name: str) -> None:
    named = {"architectures": [f"{name.removesuffix('Text')}ForCausalLM"]}
    config = getattr(transformers, f"{name}Config")().to_dict() | named
    silent = {key: value for key, value in config.items() if key not in SILENT[name]}
    (_, whole), (_, mine) = read_spec(config, "penstock"), read_spec(silent, "penstock")
    assert [bare(rope) for rope in mine.ropes] == [bare(rope) for rope in whole.ropes]
    for field in ("head_dim", "sliding_windows", "attention_chunks", "mixture", "without_rope", "attention"):
        assert getattr(mine, field, None) == getattr(whole, field, None), field


def test_llama_4_with_a_number_in_place_of_true(tmp_path: Path) -> None:
    """So the config.json of Llama 4 Scout had it at first."""
    build("Llama 4", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tuning = [{"attn_temperature_tuning": value} for value in (4, True, False)]
    old, on, off = (read_spec(config | value, "penstock")[1].without_rope for value in tuning)  # type: ignore[attr-defined]
    assert old == on != off


def bare(rope: Any) -> tuple[Any, ...]:
    """What rope computes with, without what else a config's rope_parameters hold."""
    names = ("factor", "original_max_position_embeddings", "mscale", "mscale_all_dim")
    numbers = [rope.parameters.get(name) for name in names] if rope.scaling != "default" else []
    return rope.theta, rope.rotary_dim, rope.scaling, rope.is_interleaved, numbers


def test_internlm3_is_llama_under_other_names(tmp_path: Path) -> None:
    build("Llama, tied, biases", tmp_path)
    llama = Model(tmp_path, EngineConfig())
    config = json.loads((tmp_path / "config.json").read_text())
    del config["attention_bias"], config["mlp_bias"]
    named = {"architectures": ["InternLM3ForCausalLM"], "qkv_bias": True, "bias": True}
    (tmp_path / "config.json").write_text(json.dumps(config | named))
    model = Model(tmp_path, EngineConfig())
    assert torch.equal(model.all_logits(model.sequences()), llama.all_logits(llama.sequences()))
    assert load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.o_proj.bias"].any()


def test_exaone_4_without_windows_has_rope_everywhere(tmp_path: Path) -> None:
    build("EXAONE 4", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    _, spec = read_spec(config)
    assert [rope is not None for rope in spec.layer_ropes] == [True, True, True, False]
    _, spec = read_spec(config | {"sliding_window": None, "layer_types": ["full_attention"] * 4})
    assert spec.sliding_windows == () and all(spec.rope_of(index) is spec.rope for index in range(4))


REFUSED = {
    "Gemma 3": [{"attn_logit_softcapping": 30.0}, {"layer_types": ["chunked_attention"] * 3}],
    "Hunyuan": [{"use_qk_norm": False}, {"use_cla": True}],
    "Granite": [{"logits_scaling": 0}],
    "EXAONE 4": [{"sliding_window_pattern": 2.5, "layer_types": None}],
    "SmolLM3": [{"no_rope_layers": [2, 0, 0, 1]}],
    "Cohere 2": [{"layer_types": ["full_attention"]}],
    "Qwen2-MoE": [{"use_sliding_window": True, "layer_types": None}],
    "Qwen3-MoE": [{"mlp_only_layers": "1"}],
    "Mixtral": [{"num_experts_per_tok": 9}],
    "OLMoE": [{"clip_qkv": 8.0}],
    "Phi-3.5-MoE": [
        {"long_mscale": 2.0, "rope_parameters": None, "max_position_embeddings": 192,
         "rope_scaling": {"type": "longrope", "short_mscale": 1.5, "long_mscale": 2.0}},
    ],
    "Llama 4": [{"layer_types": ["sliding_attention"] * 4}, {"no_rope_layers": [1]}, {"moe_layers": 1}],
    "GLM-4.5": [{"scoring_func": "softmax"}, {"topk_method": "greedy"}, {"moe_layer_freq": 2}]
    + [{"num_nextn_predict_layers": 10**9}],
    "MiniMax-M2": [{"qk_norm_type": "per_head"}, {"shared_intermediate_size": 64}],
    "Hunyuan-A13B": [{"moe_topk": [2, 3, 2]}, {"use_cla": True}],
    "ERNIE 4.5 MoE": [{"use_bias": True}, {"moe_layer_start_index": [1, 1]}],
    "DeepSeek V3": [{"n_group": 3}, {"topk_group": 5}],
    "Nemotron-H, experts": [{"n_group": 4}, {"topk_group": 9}],
    "Apertus": [{"hidden_act": "silu"}],
    "OLMo 3": [
        {"rope_parameters": {"full_attention": {"rope_type": "default"},
                             "sliding_attention": {"rope_type": "dynamic", "factor": 2.0}}}
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused_by_name(name: str, tmp_path: Path) -> None:
    build(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    read_spec(config)
    for change in REFUSED[name]:
        key, value = next(iter(change.items()))
        with pytest.raises(PenstockError, match="frequencies" if key == "rope_parameters" else key):
            read_spec(config | change, model_impl="penstock")
    assert find_family(config).architectures[0] in config["architectures"]
