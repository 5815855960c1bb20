"""Model types that are another model under other names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_families import Model
from tiny_models import build
from torch import Tensor

from penstock.config import EngineConfig
from penstock.errors import WrongTensor
from penstock.model.registry import open_model

EXAONE = [
    ("model.embed_tokens.", "transformer.wte."), ("model.layers.", "transformer.h."),
    ("model.norm.", "transformer.ln_f."), (".self_attn.o_proj.", ".self_attn.out_proj."),
    (".self_attn.", ".attn.attention."), (".input_layernorm.", ".ln_1."),
    (".post_attention_layernorm.", ".ln_2."), (".mlp.gate_proj.", ".mlp.c_fc_0."),
    (".mlp.up_proj.", ".mlp.c_fc_1."), (".mlp.down_proj.", ".mlp.c_proj."),
]  # fmt: skip
SARVAM = [
    ("model.embed_tokens.", "model.word_embeddings."), (".self_attn.o_proj.", ".self_attn.dense."),
    (".self_attn.q_norm.", ".self_attn.query_layernorm."),
    (".self_attn.k_norm.", ".self_attn.key_layernorm."),
    (".self_attn.", ".attention."), (".mlp.gate.e_score_correction_bias", ".mlp.gate.expert_bias"),
]  # fmt: skip
YARN = {
    "type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
#: The model type, the model that it is and changes of that, names of tensors, keys that have other names, and
#: keys that its config.json leaves out or has otherwise.
CASES: dict[str, tuple[str, dict[str, Any], list[tuple[str, str]], dict[str, str], dict[str, Any]]] = {
    "exaone": (
        "Llama", {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        EXAONE, {"num_hidden_layers": "num_layers", "hidden_act": "activation_function"},
        {"rope_parameters": None},
    ),
    "sarvam_moe": (
        "GLM-4.5",
        {
            "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 8e6, "partial_rotary_factor": 1.0},
        },
        SARVAM, {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
        {"n_group": None, "topk_group": None, "rope_parameters": None, "partial_rotary_factor": None},
    ),
    "sarvam_mla": (
        "DeepSeek V3",
        {"n_group": 1, "topk_group": 1, "rope_parameters": YARN | {"type": "yarn", "rope_theta": 1e4}},
        [], {"n_routed_experts": "num_experts"},
        {"n_group": None, "topk_group": None, "rope_parameters": None, "rope_scaling": YARN, "head_dim": 576},
    ),
}  # fmt: skip


def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """q, k and v in one tensor."""
    found = dict(tensors)
    for name in tensors:
        if name.endswith(".self_attn.q_proj.weight"):
            parts = [found.pop(name.replace(".q_proj.", f".{each}_proj.")) for each in "qkv"]
            found[name.replace(".q_proj.", ".query_key_value.")] = torch.cat(parts)
    return found


def disguise(kind: str, folder: Path) -> None:
    """The model of a folder as a checkpoint of this type has it."""
    _, _, names, keys, others = CASES[kind]
    tensors, renamed = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    for name, tensor in (fused(tensors) if kind == "sarvam_moe" else tensors).items():
        for own, instead in names:
            name = name.replace(own, instead)
        renamed[name] = tensor
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"model_type": kind} | others
    config = {keys.get(name, name): value for name, value in config.items() if value is not None}
    config["architectures"] = [f"{kind}ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", CASES)
def test_an_alias_is_the_other_model(kind: str, tmp_path: Path) -> None:
    model, changes = CASES[kind][:2]
    for name in ("plain", "alias"):
        build(model, tmp_path / name, **changes)
    disguise(kind, tmp_path / "alias")
    plain, alias = (Model(tmp_path / name, EngineConfig()) for name in ("plain", "alias"))
    assert torch.equal(alias.all_logits(alias.sequences()), plain.all_logits(plain.sequences()))
    if kind in transformers.CONFIG_MAPPING:  # 5.24 and later
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "alias", dtype=torch.float32, attn_implementation="eager"
        )
        ours = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "plain", dtype=torch.float32, attn_implementation="eager"
        )
        ids = torch.tensor([[5, 9, 20, 7] * 10])
        with torch.inference_mode():
            torch.testing.assert_close(theirs(ids).logits, ours(ids).logits)


def test_rows_that_are_no_heads_are_named(tmp_path: Path) -> None:
    build(CASES["sarvam_moe"][0], tmp_path, **CASES["sarvam_moe"][1])
    disguise("sarvam_moe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 1}))
    with pytest.raises(WrongTensor, match="query_key_value.*rows together"):
        open_model(tmp_path)
