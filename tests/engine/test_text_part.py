"""The text part of multimodal checkpoints: the names that hubs and transformers give to it, and a config.json
that leaves out what the class knows."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_families import TOLERANCE, Model, dequantized, oracle_logits
from tiny_models import MODELS, build
from transformers.models.auto import modeling_auto

from penstock.config import EngineConfig
from penstock.errors import UnexpectedTensor, UnsupportedModel
from penstock.model.registry import open_model, read_spec
from penstock.unquantized import UnquantizedModel
from penstock.weights.checkpoints.formats import read_config
from penstock.weights.conversion.convert import convert
from penstock.weights.quantize import quantize

#: Name of a model in tiny_models, the multimodal architecture, and the type of its text part in config.json.
WHOLES = [
    ("Gemma 3", "Gemma3ForConditionalGeneration", "gemma3_text"),
    ("Ministral 3", "Mistral3ForConditionalGeneration", "ministral3"),
    ("Mistral 4", "Mistral3ForConditionalGeneration", "mistral4"),
    ("Mistral, window", "Mistral3ForConditionalGeneration", None),
    ("Gemma 3n", "Gemma3nForConditionalGeneration", "gemma3n_text"),
    ("Gemma 4", "Gemma4ForConditionalGeneration", None),
    ("Cohere 2", "Cohere2VisionForConditionalGeneration", "cohere2"),
]


def wrap(folder: Path, whole: Path, architecture: str, kind: str | None, is_old: bool) -> None:
    """Write a text model as the text part of a multimodal one. `is_old`: with the names of older files."""
    layers, head = ("language_model.model.", "language_model.lm_head.") if is_old else (
        "model.language_model.", "lm_head."
    )  # fmt: skip
    tensors = {
        name.replace("model.", layers, 1) if name.startswith("model.") else name.replace("lm_head.", head): t
        for name, t in load_file(folder / "model.safetensors").items()
    }
    tensors["vision_tower.vision_model.embeddings.patch_embedding.weight"] = torch.ones(4, 3, 2, 2)
    tensors["model.audio_tower.layers.0.norm.weight"] = torch.ones(2)
    tensors["multi_modal_projector.linear_1.weight"] = torch.ones(8, 4)
    text = json.loads((folder / "config.json").read_text())
    del text["architectures"], text["model_type"]
    config: dict[str, Any] = {
        "architectures": [architecture], "model_type": "some_whole", "eos_token_id": 1, "vision_config": {},
        "text_config": text | ({"model_type": kind} if kind else {}),
    }  # fmt: skip
    whole.mkdir()
    (whole / "config.json").write_text(json.dumps(config))
    save_file(tensors, whole / "model.safetensors")


@pytest.mark.parametrize(("name", "architecture", "kind"), WHOLES)
@pytest.mark.parametrize("is_old", [True, False])
def test_the_text_part_is_the_text_model(
    name: str, architecture: str, kind: str | None, is_old: bool, tmp_path: Path
) -> None:
    build(name, tmp_path / "text")
    wrap(tmp_path / "text", tmp_path / "whole", architecture, kind, is_old)
    whole, text = (Model(tmp_path / folder, EngineConfig()) for folder in ("whole", "text"))
    assert torch.equal(whole.all_logits(whole.sequences()), text.all_logits(text.sequences()))
    assert whole.spec == text.spec


def test_what_transformers_saves_is_what_transformers_computes(tmp_path: Path) -> None:
    """The whole model, with a vision tower; converted, it is a text model that transformers opens as one."""
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    torch.manual_seed(5)
    config = transformers.Gemma3Config(
        text_config=MODELS["Gemma 3"][1], vision_config=vision, mm_tokens_per_image=4
    )
    whole = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager")
    whole.float().eval().save_pretrained(tmp_path / "whole")
    model = Model(tmp_path / "whole", EngineConfig(kv_dtype="float32"))
    convert(open_model(tmp_path / "whole").store, tmp_path / "int8")
    opened = transformers.AutoConfig.from_pretrained(tmp_path / "int8")
    assert opened.architectures == ["Gemma3ForCausalLM"]
    oracle = transformers.Gemma3ForCausalLM(whole.config.text_config).float().eval()
    oracle.model = whole.model.language_model
    oracle.lm_head.weight = oracle.model.embed_tokens.weight
    expected = oracle_logits(dequantized(oracle, tmp_path / "whole"))
    difference = float((model.all_logits(model.sequences()) - expected).abs().max())
    assert difference <= TOLERANCE["float32"] * float(expected.max() - expected.min())
    converted = Model(tmp_path / "int8", EngineConfig(kv_dtype="float32"))
    mine = model.all_logits(model.sequences())
    assert torch.equal(converted.all_logits(converted.sequences()), mine)


#: What makes the part that sees small, where its config has a number of this name.
FEW = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "depth": 1, "num_heads": 2, "embed_dim": 16, "out_hidden_size": 64,
    "image_size": 28, "patch_size": 14, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    "layer_types": ["full_attention"],
    "fullatt_block_indexes": [0], "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16, "vocab_size": 32, "init_pos_emb_height": 4, "init_pos_emb_width": 4,
}  # fmt: skip
ROPE3 = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
HALF3 = ROPE3 | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
#: transformers' type of a multimodal model; the text model in tiny_models from which its text part has its
#: numbers, and others of its own.
SAVED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2", {"rope_parameters": ROPE3}),
    "qwen2_5_vl": ("Qwen2", {"rope_parameters": ROPE3}),
    "qwen3_vl": ("Qwen3", {"rope_parameters": ROPE3 | {"mrope_interleaved": True}}),
    "qwen3_vl_moe": ("Qwen3-MoE", {"rope_parameters": ROPE3 | {"mrope_interleaved": True}}),
    "glm4v": ("GLM-4-0414", {"num_attention_heads": 4, "rope_parameters": HALF3}),
    "glm46v": ("GLM-4-0414", {"num_attention_heads": 4, "rope_parameters": ROPE3}),
    "glm4v_moe": ("GLM-4.5", {"use_qk_norm": False, "rope_parameters": HALF3}),
    "kimi_k25": ("DeepSeek V3", {}),
    "exaone4_5": ("EXAONE 4", {}),
    "lfm2_vl": ("LFM2", {}),
    "smolvlm": ("Llama", {}),
    "internvl": ("Qwen3", {}),
    "llava_onevision": ("Qwen2", {}),
    "voxtral": ("Llama", {}),
    "minicpmv4_6": ("Qwen3.5", {}),
    "nemotron_h_omni": ("Nemotron-H", {}),
    "paligemma": ("Gemma", {}),
    "mistral3": ("Ministral 3", {}),
    "llava_next_video": ("Mistral, window", {}),
    "idefics2": ("Mistral, window", {}),
    "idefics3": ("Llama", {}),
    "got_ocr2": ("Qwen2", {}),
    "fuyu": ("Persimmon", {}),
    "video_llama_3": ("Qwen2", {}),
    "qwen2_audio": ("Qwen2", {}),
    "deepseek_vl": ("Llama", {}),
    "janus": ("Llama", {}),
    "lighton_ocr": ("Qwen3", {}),
    "qianfan_ocr": ("Qwen3", {}),
    "glm_ocr": ("GLM-4-0414", {"num_attention_heads": 4, "rope_parameters": HALF3}),
    "minicpm_ocr": ("Qwen3.5", {}),
    "deepseek_vl_hybrid": ("Llama", {}),
    "vipllava": ("Llama", {}),
    "qwen3_5": ("Qwen3.5", {}),
    "qwen3_5_moe": ("Qwen3.5 MoE", {}),
    "muse_glimmer": (
        "Mistral, window",
        {"num_hidden_layers": 6, "head_dim": 24, "attention_bias": True, "post_norm_eps": 1e-2},
    ),
}
#: Types without a text model of their own in transformers, so that test_families.py can't try them: norms and
#: biases, which start as ones and zeros, are moved here.
WITHOUT_TEXT_MODEL = ("muse_glimmer",)

#: Each form of names once.
OFTEN = ["muse_glimmer", "qwen2_5_vl", "qwen3_vl_moe", "kimi_k25", "smolvlm", "glm4v"]


def build_whole(kind: str, folder: Path) -> Any:
    """A multimodal model of transformers, small and random, as it saves itself."""
    made, (text_model, own) = transformers.CONFIG_MAPPING[kind](), SAVED[kind]
    name = made.text_config.model_type
    text = transformers.CONFIG_MAPPING[name](**(MODELS[text_model][1] | own))
    made.text_config, made.tie_word_embeddings = text, bool(getattr(text, "tie_word_embeddings", False))
    for part in ("vision_config", "audio_config"):
        for key, value in FEW.items():
            if hasattr(config := getattr(made, part, None), key):
                is_pair = isinstance(getattr(config, key), list | tuple) and not isinstance(value, list)
                setattr(config, key, [value, value] if is_pair else value)
    torch.manual_seed(5)
    names = {**modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    names |= modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    whole = getattr(transformers, names[kind])._from_config(made, attn_implementation="eager")
    whole = whole.float().eval()
    for parameter in whole.parameters():  # numbers that INT8 has
        if parameter.dim() == 1 and kind in WITHOUT_TEXT_MODEL:
            parameter.data += 0.2 * torch.randn_like(parameter)
        if parameter.dim() in (2, 3):
            rows = quantize(parameter.detach().flatten(0, -2)).dequantize()
            parameter.data = rows.view_as(parameter)
    whole.save_pretrained(folder)
    return whole


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in SAVED if kind not in OFTEN] + OFTEN
)
def test_a_whole_model_given_text_alone(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The engine and the unquantized twin against transformers' whole model; what else the files hold is
    named."""
    whole = build_whole(kind, tmp_path)
    expected = oracle_logits(whole)
    tolerance = TOLERANCE["float32"] * float(expected.max() - expected.min())
    with caplog.at_level(logging.INFO):
        model = Model(tmp_path, EngineConfig(kv_dtype="float32"))
    assert "the text part is served; left out: " in caplog.text
    assert model.spec.implementation == "penstock"
    assert float((model.all_logits(model.sequences()) - expected).abs().max()) <= tolerance
    ids = torch.randint(3, 160, (1, 40), generator=torch.Generator().manual_seed(5))
    if kind in WITHOUT_TEXT_MODEL:
        with pytest.raises(UnsupportedModel, match="no class MuseGlimmerForCausalLM"):
            UnquantizedModel(open_model(tmp_path))
        return
    with torch.inference_mode():
        twin = UnquantizedModel(open_model(tmp_path)).forward(ids).logits
        assert float((twin - whole(input_ids=ids).logits).abs().max()) <= tolerance


SPARSE = {
    # As the config.json of the 4B model has it.
    ("Gemma3", "gemma3_text"): {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    ("Gemma3n", "gemma3n_text"): {"num_kv_shared_layers": 10},
    ("Gemma4", "gemma4_text"): {"hidden_size": 1536, "rms_norm_eps": 1e-6},
    ("Gemma4Unified", "gemma4_unified_text"): {"num_hidden_layers": 12},
    # LLaVA 1.5 with 7B, and LLaVA 1.6 on Mistral.
    ("Llava", "llama"): {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064},
    ("LlavaNext", "mistral"): {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None},
}  # fmt: skip


@pytest.mark.parametrize(("whole", "kind"), SPARSE)
def test_a_text_config_may_leave_out_what_its_class_knows(whole: str, kind: str, tmp_path: Path) -> None:
    text = SPARSE[whole, kind]
    config = {
        "architectures": [f"{whole}ForConditionalGeneration"],
        "text_config": text | {"model_type": kind},
    }
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": [1, 106]}))
    read = read_config(tmp_path)
    assert read["eos_token_id"] == [1, 106]
    _, spec = read_spec(read)
    expected = transformers.CONFIG_MAPPING[kind](**text)
    numbers = {
        "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads", "vocab_size": "vocab_size",
        "num_layers": "num_hidden_layers", "intermediate_size": "intermediate_size",
        "hidden_size": "hidden_size", "norm_eps": "rms_norm_eps", "is_tied": "tie_word_embeddings",
        "max_position_embeddings": "max_position_embeddings",
    }  # fmt: skip
    given = {mine: getattr(expected, theirs) for mine, theirs in numbers.items()}
    if kind == "gemma3n_text":  # an inner width for each layer
        given["intermediate_size"] = max(given["intermediate_size"])
    assert {mine: getattr(spec, mine) for mine in numbers} == given
    if kind.startswith("gemma"):
        kinds = [each == "sliding_attention" for each in expected.layer_types]
        assert [bool(window) for window in spec.sliding_windows] == kinds
        scaling = {"gemma3_text": "linear", "gemma3n_text": "default"}.get(kind, "proportional")
        assert {(rope.theta, rope.scaling) for rope in spec.ropes} == {(1e6, scaling), (1e4, "default")}


def test_unknown_tensors_and_wholes_are_refused(tmp_path: Path) -> None:
    build("Gemma 3", tmp_path / "text")
    wrap(tmp_path / "text", tmp_path / "whole", *WHOLES[0][1:], is_old=True)
    file, config = tmp_path / "whole" / "model.safetensors", tmp_path / "whole" / "config.json"
    save_file(load_file(file) | {"third_tower.weight": torch.ones(2)}, file)
    with pytest.raises(UnexpectedTensor, match="third_tower"):
        open_model(tmp_path / "whole")
    os.truncate(file, 0)
    config.write_text(config.read_text().replace("Gemma3ForConditional", "Gemma9ForConditional"))
    with pytest.raises(UnsupportedModel, match="Gemma9"):
        read_spec(read_config(tmp_path / "whole"))
