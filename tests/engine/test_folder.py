"""Folders as other tools lay them out: loaded, or named with what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_formats_in import edit_config
from test_gguf import make
from tiny_models import build

from penstock.errors import (
    CheckpointError,
    CheckpointNotFound,
    CorruptFile,
    UnsafeCheckpoint,
    UnsupportedModel,
)
from penstock.model.registry import open_model
from penstock.weights.checkpoints.checkpoint import read_json
from penstock.weights.checkpoints.formats import read_config
from penstock.weights.checkpoints.hub import find_config, find_model

#: peft 0.14's adapter_config.json, without what is as by default.
LORA = {
    "base_model_name_or_path": "meta-llama/Llama-3.1-8B-Instruct", "bias": "none", "lora_alpha": 16,
    "peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM",
}  # fmt: skip
#: mlx-lm's.
MLX_LORA = {
    "fine_tune_type": "lora", "lora_parameters": {"rank": 8, "scale": 20.0}, "num_layers": 16,
    "model": "mlx-community/Llama-3.2-1B-Instruct",
}  # fmt: skip
MODELOPT = {
    "producer": {"name": "modelopt", "version": "0.23.0"},
    "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    build("Llama", tmp_path / "model")
    return tmp_path / "model"


def write_adapter(folder: Path, config: dict[str, Any] = LORA, name: str = "adapter_model") -> None:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    matrix = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({matrix: torch.zeros(8, 64)}, folder / f"{name}.safetensors")


# ---- GGUF


@pytest.mark.parametrize("beside", [[], ["config.json"], ["mmproj-model-f16.gguf"], ["README.md"]])
def test_a_folder_with_one_gguf_is_that_file(beside: list[str], tmp_path: Path) -> None:
    """GGUF repositories often have a config.json that says model_type and nothing else."""
    (tmp_path / "files").mkdir()
    path = tmp_path / "files" / "llama.Q8_0.gguf"
    make("Llama", tmp_path)
    (tmp_path / "model.gguf").rename(path)
    for name in beside:
        (tmp_path / "files" / name).write_text('{"model_type": "llama"}')
    for found in (find_model(tmp_path / "files"), find_model(str(tmp_path / "files"))):
        assert found == path
        assert open_model(found).spec.num_layers == 3
    assert read_config(find_config(tmp_path / "files"))["architectures"] == ["LlamaForCausalLM"]


def test_parts_are_one_gguf_and_several_are_named(tmp_path: Path) -> None:
    for index in (1, 2, 3):
        (tmp_path / f"big-Q8_0-{index:05d}-of-00003.gguf").touch()
    assert find_model(tmp_path).name == "big-Q8_0-00001-of-00003.gguf"
    (tmp_path / "big-Q4_K_M.gguf").touch()
    with pytest.raises(
        CheckpointNotFound, match=r"2 models as GGUF.*path of one.*Q4_K_M.gguf, .*00001-of-00003"
    ):
        find_model(tmp_path)


def test_safetensors_come_before_gguf(llama: Path) -> None:
    (llama / "model.Q8_0.gguf").touch()
    assert find_model(llama) == llama


# ---- adapters


@pytest.mark.parametrize(("config", "name"), [(LORA, "adapter_model"), (MLX_LORA, "adapters")])
@pytest.mark.parametrize("is_beside", [False, True])
def test_adapters_are_named(config: dict[str, Any], name: str, is_beside: bool, llama: Path) -> None:
    folder = llama if is_beside else llama.parent / "adapter"
    write_adapter(folder, config, name)
    base = config.get("base_model_name_or_path", config.get("model"))
    with pytest.raises(UnsupportedModel, match=rf"an adapter .*{name}.*for {base}.*merge_and_unload"):
        open_model(folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match="an adapter.*for a model"):
        open_model(folder)


def test_a_merged_model_may_keep_its_adapters_config(llama: Path) -> None:
    (llama / "adapter_config.json").write_text(json.dumps(LORA))
    assert open_model(llama).spec.num_layers == 3


# ---- the same weights once more


@pytest.mark.parametrize("name", ["consolidated.safetensors", "model.fp16.safetensors"])
def test_copies_beside_the_model_are_left_alone(name: str, llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    renamed = {"layers.0.attention.wq.weight": torch.zeros(64, 64)}
    save_file(renamed if "cons" in name else {n: t.half() for n, t in tensors.items()}, llama / name)
    checkpoint = open_model(llama).store.checkpoint
    assert {entry.file.name for entry in checkpoint.entries.values()} == {"model.safetensors"}


def test_parts_without_an_index_beside_a_copy(llama: Path) -> None:
    tensors = list(load_file(llama / "model.safetensors").items())
    for part in (0, 1):
        save_file(dict(tensors[part::2]), llama / f"model-{part + 1:05d}-of-00002.safetensors")
    (llama / "model.safetensors").rename(llama / "consolidated.safetensors")
    assert len({entry.file for entry in open_model(llama).store.checkpoint.entries.values()}) == 2


def test_a_variant_alone_is_the_model(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "model.fp16.safetensors")
    assert open_model(llama).spec.num_layers == 3


@pytest.mark.parametrize("has_config", [True, False])
@pytest.mark.parametrize("name", ["consolidated.safetensors", "consolidated.00.pth"])
def test_the_makers_own_layout_is_named(name: str, has_config: bool, llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / name)
    (llama / "params.json").write_text('{"dim": 64, "n_layers": 3, "vocab_size": 160}')
    if not has_config:
        (llama / "config.json").unlink()
    message = rf"params.json or consolidated.*Hugging Face's layout|only as .*{name}"
    with pytest.raises((CheckpointNotFound, UnsafeCheckpoint), match=message):
        open_model(llama)


def test_nothing_known_says_what_could_be(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"no config.json.*no .gguf"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointNotFound, match=r"no \*.safetensors.*GGUF.*give the path"):
        open_model(tmp_path)


# ---- quantized by others, and said elsewhere


@pytest.mark.parametrize("is_repeated", [False, True])
def test_mlx_is_named(is_repeated: bool, llama: Path) -> None:
    """mlx-lm's affine 4 bits: eight to a word, a scale and a bias per group."""
    tensors = load_file(llama / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    tensors[f"{name}.weight"] = torch.zeros(96, 8, dtype=torch.uint32)
    tensors |= {f"{name}.{kind}": torch.zeros(96, 1) for kind in ("scales", "biases")}
    save_file(tensors, llama / "model.safetensors", {"format": "mlx"})
    quantization = {"group_size": 64, "bits": 4, "mode": "affine"}
    again = {"quantization_config": quantization} if is_repeated else {}
    edit_config(llama, quantization=quantization, **again)
    with pytest.raises(UnsupportedModel, match="quantized .MLX with 4 bits.*Use the original"):
        open_model(llama)


def test_mlx_without_quantization_is_a_model_like_others(llama: Path) -> None:
    save_file(load_file(llama / "model.safetensors"), llama / "model.safetensors", {"format": "mlx"})
    assert open_model(llama).spec.num_layers == 3


@pytest.mark.parametrize("says_config", [False, True])
def test_modelopt_is_named(says_config: bool, llama: Path) -> None:
    told = MODELOPT | {"quantization": MODELOPT["quantization"] | {"quant_algo": "W4A8_AWQ"}}
    (llama / "hf_quant_config.json").write_text(json.dumps(told))
    if says_config:
        edit_config(llama, quantization_config={"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"})
    with pytest.raises(UnsupportedModel, match="quantized .modelopt, W4A8_AWQ.*Use the original"):
        open_model(llama)


def test_modelopt_of_keys_and_values_alone(llama: Path) -> None:
    quantization = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (llama / "hf_quant_config.json").write_text(json.dumps(MODELOPT | {"quantization": quantization}))
    file = llama / "model.safetensors"
    name = "model.layers.0.self_attn.k_proj.k_scale"
    save_file(load_file(file) | {name: torch.ones(())}, file)
    opened = open_model(llama)
    assert opened.spec.num_layers == 3 and name not in opened.store.checkpoint.entries


def test_a_file_that_makes_no_sense(llama: Path) -> None:
    shutil.copy(llama / "model.safetensors", llama / "hf_quant_config.json")
    with pytest.raises(CheckpointError, match="hf_quant_config.json is not readable JSON"):
        open_model(llama)


def test_a_file_that_cannot_be_read_need_not_be_downloaded_again(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match="can't be read: Is a directory$"):
        read_json(tmp_path)
