"""Adapters that PEFT makes and saves, against PEFT's own models with the same dequantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_cpmant
import test_encoder_decoder
import torch
from test_adapters import TOLERANCE, with_adapter
from test_families import Built, Model, oracle_logits

from penstock.config import EngineConfig
from penstock.weights.adapters.loaded_adapters import LoadedAdapters
from penstock.weights.adapters.targets import Targets

peft: Any = pytest.importorskip("peft", reason="the extra dev has the package")

#: model -> what peft is asked for
ASKED: dict[str, dict[str, Any]] = {
    "Llama": {"target_modules": "all-linear", "r": 16, "use_rslora": True},
    "Qwen3": {
        "target_modules": ["q_proj", "v_proj", "up_proj"], "rank_pattern": {"layers.1.self_attn.q_proj": 9},
        "alpha_pattern": {"v_proj": 30}, "exclude_modules": r".*\.2\.mlp\.up_proj",
    },
    "Phi-3": {"target_modules": ["qkv_proj", "gate_up_proj"], "layers_to_transform": [0, 2]},
    "GPT-2": {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "lora_dropout": 0.1},
    "Falcon": {"target_modules": ["query_key_value"], "init_lora_weights": "orthogonal", "r": 6},
}  # fmt: skip


def adapted(model: Any, folder: Path, **asked: Any) -> Any:
    """peft's model with an adapter whose B is not zero, as it is before a training; saved in `folder`."""
    torch.manual_seed(2)
    made = peft.get_peft_model(model, peft.LoraConfig(**{"r": 5, "lora_alpha": 11} | asked)).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_((0.2 * torch.randn_like(parameter)).half())
    made.save_pretrained(folder)
    return made


@pytest.mark.parametrize("name", ASKED)
def test_logits_equal_pefts(name: str, tmp_path: Path) -> None:
    built = Built.of(name, tmp_path / "model")
    oracle = adapted(built.oracle, tmp_path / "adapter", **ASKED[name])
    model = Model(built.folder, EngineConfig(kv_dtype="float32"))
    adapter = LoadedAdapters(lambda: Targets(model.store), 1 << 24).load("a", tmp_path / "adapter")
    sequences = model.sequences()
    for sequence in sequences:
        object.__setattr__(sequence.request, "adapter", adapter)
    mine, expected = model.all_logits(sequences), oracle_logits(oracle)
    assert (mine - expected).abs().max() <= TOLERANCE * (expected.max() - expected.min())
    with oracle.disable_adapter():
        assert (oracle_logits(oracle) - expected).abs().max() > 0.5, "the adapter changes nothing"


@pytest.mark.parametrize(
    ("room", "name", "modules"),
    [
        (test_encoder_decoder, "T5 v1.1", ["q", "v", "wi_0", "wo"]),
        (test_cpmant, "CPM-Ant", ["project_q", "project_v"]),
    ],
)
def test_prompts_that_are_read_whole(room: Any, name: str, modules: list[str], tmp_path: Path) -> None:
    oracle = adapted(room.build(name, tmp_path / "model"), tmp_path / "adapter", target_modules=modules)
    config = {"adapters": (("a", str(tmp_path / "adapter")),), "kv_dtype": "float32"}
    with room.load(tmp_path / "model", **config, max_model_len=200, max_num_batched_tokens=200) as engine:
        engine.add = with_adapter(engine.add, engine.adapters.by_name["a"])
        mine = room.answer(engine, room.PROMPTS[1:3])
    for prompt, tokens, logits in zip(room.PROMPTS[1:3], mine.tokens, mine.logits, strict=True):
        expected = room.oracle_logits(oracle, prompt, tokens)
        # Attention without a scale makes the rounding of 16-bit activations larger.
        assert (logits - expected).abs().max() <= 4 * TOLERANCE * (expected.max() - expected.min())
