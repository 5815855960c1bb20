"""The text part of multimodal checkpoints: the names that hubs and transformers give to it, and a config.json
that leaves out what the class knows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_families import TOLERANCE, Model, dequantized, oracle_logits
from tiny_models import MODELS, build

from penstock.config import EngineConfig
from penstock.errors import UnexpectedTensor, UnsupportedModel
from penstock.model.registry import open_model, read_spec
from penstock.weights.checkpoints.formats import read_config
from penstock.weights.conversion.convert import convert

#: Name of a model in tiny_models, the multimodal architecture, and the type of its text part in config.json.
WHOLES = [
    ("Gemma 3", "Gemma3ForConditionalGeneration", "gemma3_text"),
    ("Ministral 3", "Mistral3ForConditionalGeneration", "ministral3"),
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
