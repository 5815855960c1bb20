"""Folders of models that somebody damaged on purpose: each is refused by an error of ours, before anything is
allocated or waited for."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from penstock import gguf_file
from penstock.errors import CheckpointError, CheckpointNotFound, CorruptFile, InvalidConfig
from penstock.loader.advice import read_advice
from penstock.model.registry import open_model, read_spec
from penstock.text.tokenizer import Tokenizer
from penstock.weights.adapters.adapter_folder import AdapterFolder
from penstock.weights.checkpoints.hub import find_model
from penstock.weights.checkpoints.safetensors_header import read_header

NAN, INF = float("nan"), float("inf")
LONG, DEEP = "x" * 300, "[" * 200_000


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


# ---- names and kinds of files


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/../../b.safetensors", "", ".", LONG, "a\0b", 7, None]
)
def test_an_index_that_leads_out_of_the_folder(folder: Path, name: Any) -> None:
    shutil.copy(folder / "model.safetensors", folder.parent)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CorruptFile, match="index.json names a file .*which is none in the model's folder"):
        open_model(folder)


def test_links_into_a_cache_are_files_of_the_folder(folder: Path) -> None:
    """As the hub's cache has them."""
    (folder / "model.safetensors").rename(folder.parent / "blob")
    (folder / "model.safetensors").symlink_to("../blob")
    index = {"weight_map": dict.fromkeys(read_header(folder.parent / "blob")[0].name, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    open_model(folder).store.close()


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "model-00001.safetensors",
        "config.json",
        "tokenizer.json",
        "tokenizer.model",
        "a.txt",
    ],
)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_in_a_files_place(folder: Path, name: str, kind: str) -> None:
    if name.startswith("model"):
        (folder / "model.safetensors").unlink()
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=f"{name}|config.json"):
        open_model(folder)


@pytest.mark.parametrize("kind", ["folder", "circle", "no memory"])
@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
def test_weights_that_can_not_be_read(folder: Path, name: str, kind: str) -> None:
    """The last one is an ordinary file whose reads fail, as those of a broken disk do."""
    (folder / "model.safetensors").unlink()
    if kind == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to(name if kind == "circle" else "/proc/self/mem")
    with pytest.raises(CheckpointError, match="model"):
        open_model(folder / name if name == "model.gguf" else folder)


def test_a_disk_that_fails_within_a_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(reader: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(gguf_file._Reader, "header", fail)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CorruptFile, match=r"model\.gguf can't be read: Input/output error"):
        open_model(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("text", [DEEP, '{"a":' * 100_000, "", "7", "\xff", '{"architectures": ["Llama"]'])
def test_json_that_is_none(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text, encoding="latin-1")
    with pytest.raises(CorruptFile, match=name):
        open_model(folder)


@pytest.mark.parametrize("text", [DEEP, '{"a":' * 100_000])
def test_depth_in_the_files_beside(folder: Path, text: str) -> None:
    for name in ("tokenizer.json", "generation_config.json", "adapter_config.json"):
        (folder / name).write_text(text)
    with pytest.raises(CorruptFile, match="tokenizer"):
        Tokenizer.load(folder)
    with pytest.raises(CorruptFile, match=r"generation_config\.json"):
        read_advice(folder)
    with pytest.raises(CorruptFile, match=r"adapter_config\.json"):
        AdapterFolder.open(folder)


@pytest.mark.parametrize("name", ["x" * 5000, "/".join(["x" * 300] * 20), "~nobody-of-that-name/x"])
def test_names_that_no_system_takes(name: str) -> None:
    with pytest.raises(CheckpointNotFound):
        find_model(name)
    with pytest.raises(CheckpointNotFound):
        AdapterFolder.open(Path(name))


# ---- headers of safetensors


def with_header(path: Path, header: object, num_bytes: int = 64) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(num_bytes))
    return path


def tensor(begin: Any, end: Any, shape: Any = (4,)) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": tensor(0, 16), "b": tensor(8, 24)},
        {"a": tensor(0, 16), "b": tensor(0, 16)},
        {"a": tensor(0, 64, (16,)), "b": tensor(16, 32)},
        {"a": tensor(0.5, 16.5)},
        {"a": tensor(0.0, 16.0)},
        {"a": tensor(0, 16, (4.5,))},
        {"a": tensor(0, 4, (True,))},
        {"a": tensor("0", "16")},
        {"a": tensor(-16, 0)},
        {"a": tensor(16, 0)},
        {"a": tensor(60, 76)},
        {"a": tensor(1 << 70, (1 << 70) + 16)},
        {"a": tensor(0, 16, (-4,))},
        {"a": tensor(0, 16, (-2, -2))},
        {"a": tensor(0, 16, None)},
        {"a": tensor(None, 16)},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16, 16]}},
        {"a": None},
        DEEP.encode(),
    ],
)
def test_tensors_that_lie_nowhere_or_over_one_another(tmp_path: Path, header: object) -> None:
    with pytest.raises(CorruptFile, match=r"model\.safetensors"):
        read_header(with_header(tmp_path / "model.safetensors", header))


def test_tensors_side_by_side_and_without_bytes(tmp_path: Path) -> None:
    header = {"a": tensor(16, 32), "b": tensor(0, 16), "c": tensor(16, 16, (0,)), "d": tensor(8, 8, (0,))}
    assert len(read_header(with_header(tmp_path / "model.safetensors", header))) == 4


# ---- numbers of config.json


@pytest.mark.parametrize("rope_theta", [0, 0.0, -1, NAN, INF, -INF, True, "10000", [1]])
@pytest.mark.parametrize("place", ["top", "rope_parameters", "rope_scaling"])
def test_a_rope_without_frequencies(folder: Path, rope_theta: Any, place: str) -> None:
    config = json.loads((folder / "config.json").read_text()) | {
        "rope_parameters": None,
        "rope_scaling": None,
    }
    wrong = {"rope_theta": rope_theta}
    with pytest.raises(InvalidConfig, match="rope_theta"):
        read_spec(config | (wrong if place == "top" else {place: {"rope_type": "default"} | wrong}))


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": -2},
        {"rope_type": "linear", "factor": NAN},
        {"rope_type": "dynamic", "factor": NAN},
        {"rope_type": "dynamic", "factor": -3},
        {"rope_type": "yarn", "factor": 0},
        {"rope_type": "yarn", "factor": 4, "attention_factor": NAN},
        {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 0},
        {"rope_type": "llama3", "factor": 0, "low_freq_factor": 1, "high_freq_factor": 4},
        {"rope_type": "longrope", "long_factor": [0] * 8, "short_factor": [1] * 8},
        {"rope_type": "longrope", "long_factor": [1] * 8, "short_factor": [1] * 7},
        {"rope_type": "longrope", "long_factor": [NAN] * 8, "short_factor": [1] * 8},
    ],
)
def test_a_scaling_that_makes_no_frequencies(folder: Path, scaling: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"rope_parameters": None}
    with pytest.raises(InvalidConfig):
        read_spec(config | {"rope_scaling": scaling, "head_dim": 16, "rope_theta": 10000.0})


@pytest.mark.parametrize(
    "wrong",
    [
        {"eos_token_id": 10**9},
        {"eos_token_id": -1},
        {"eos_token_id": 1.5},
        {"eos_token_id": "</s>"},
        {"eos_token_id": [1, 10**9]},
        {"rms_norm_eps": 0},
        {"rms_norm_eps": NAN},
        {"rms_norm_eps": -1e-5},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 10**9},
        {"vocab_size": 10**12},
        {"hidden_size": 10**12},
        {"head_dim": 0},
        {"head_dim": 10**9},
        {"num_attention_heads": 0},
        {"num_attention_heads": 10**9},
        {"num_key_value_heads": 0},
        {"intermediate_size": 0},
        {"max_position_embeddings": 10**12},
    ],
)
def test_a_number_that_no_model_has(folder: Path, wrong: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(InvalidConfig, match=min(wrong) if "eps" not in min(wrong) else "eps"):
        read_spec(config | wrong)


@pytest.mark.parametrize(
    ("architecture", "wrong"),
    [
        ("GraniteForCausalLM", "attention_multiplier"),
        ("GraniteForCausalLM", "residual_multiplier"),
        ("Gemma2ForCausalLM", "query_pre_attn_scalar"),
        ("Gemma2ForCausalLM", "attn_logit_softcapping"),
        ("CohereForCausalLM", "logit_scale"),
    ],
)
@pytest.mark.parametrize("value", [NAN, INF, "a", [1]])
def test_a_scale_that_is_no_number(folder: Path, architecture: str, wrong: str, value: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    ones = ("embedding", "residual", "attention")
    ones = (*(f"{name}_multiplier" for name in ones), "logits_scaling", "logit_scale")
    gemma = {"query_pre_attn_scalar": 16, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 8}
    scales = dict.fromkeys(ones, 1.0) | {"layer_norm_eps": 1e-5} | gemma
    config |= scales | {"architectures": [architecture], "hidden_act": "silu"}
    read_spec(config)
    with pytest.raises(InvalidConfig):
        read_spec(config | {wrong: value})
