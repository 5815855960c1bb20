"""Reading safetensors folders: right, and every way of being wrong."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from units import read_layer

from penstock.errors import (
    CheckpointError,
    CheckpointNotFound,
    CorruptFile,
    MissingTensor,
    UnexpectedTensor,
    UnsafeCheckpoint,
    UnsupportedModel,
    WrongTensor,
)
from penstock.model.registry import find_family
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.safetensors_header import read_header
from penstock.weights.store import WeightStore


def test_every_tensor_reads_as_safetensors_reads_it(tiny_llama: Path) -> None:
    expected = load_file(tiny_llama / "model.safetensors")
    with Checkpoint.open(tiny_llama) as checkpoint:
        assert set(checkpoint.entries) == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(checkpoint.read(name), tensor)
            if tensor.shape[0] > 2:
                assert torch.equal(checkpoint.read_rows(name, 1, 3), tensor[1:3])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_dtypes_and_scalars(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"matrix": torch.randn(5, 7).to(dtype), "scalar": torch.tensor(3).to(dtype)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read("matrix"), tensors["matrix"])
        assert checkpoint.read("scalar").item() == 3


def test_shards_with_an_index(tiny_llama: Path, tmp_path: Path) -> None:
    folder = shard(tiny_llama, tmp_path)
    with Checkpoint.open(folder) as checkpoint, Checkpoint.open(tiny_llama) as whole:
        assert set(checkpoint.entries) == set(whole.entries)
        assert len({entry.file for entry in checkpoint.entries.values()}) == 3
        for name in whole.entries:
            assert torch.equal(checkpoint.read(name), whole.read(name))


def shard(source: Path, folder: Path) -> Path:
    """A copy of a folder with its weights in three files and an index."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{index % 3}.safetensors" for index, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def open_all(folder: Path) -> None:
    """Everything that loading does with files."""
    with Checkpoint.open(folder) as checkpoint:
        family = find_family(checkpoint.config)
        store = WeightStore(checkpoint, family.model_tensors(family.read_spec(checkpoint.config)))
        store.read_resident(store.tensors.embedding)
        store.read_resident(store.tensors.head)
        for index in range(store.num_layers):
            read_layer(store, index)


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def cut(folder: Path, num_bytes: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-num_bytes])


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")


K = "model.layers.1.self_attn.k_proj.weight"

FAULTS: dict[str, tuple[Callable[[Path], object], type[CheckpointError], str]] = {
    "no folder": (shutil.rmtree, CheckpointNotFound, "not a folder"),
    "no config": (lambda f: (f / "config.json").unlink(), CheckpointNotFound, "config.json"),
    "config not json": (lambda f: (f / "config.json").write_text("{"), CorruptFile, "config.json"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), CorruptFile, "list"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), CheckpointNotFound, "safetensors"),
    "pickle": (
        pickle_only,
        UnsafeCheckpoint,
        "pytorch_model.bin.*without running anything.*convert --allow-pickle",
    ),
    "truncated": (lambda f: cut(f, 100), CorruptFile, "model.safetensors is truncated"),
    "empty file": (lambda f: (f / "model.safetensors").write_bytes(b""), CorruptFile, "header"),
    "html page": (lambda f: (f / "model.safetensors").write_bytes(b"<html>" * 99), CorruptFile, "header"),
    "missing tensor": (lambda f: edit_tensors(f, lambda t: t.pop(K)), MissingTensor, K),
    "extra tensor": (
        lambda f: edit_tensors(f, lambda t: t.update(adapter=torch.zeros(1))),
        UnexpectedTensor,
        "adapter.*--ignore-unexpected-tensors",
    ),
    "wrong shape": (
        lambda f: edit_tensors(f, lambda t: t.update({K: torch.zeros(32, 65)})),
        WrongTensor,
        f"{K}.*model.safetensors.*65",
    ),
    "wrong rows": (
        lambda f: edit_tensors(f, lambda t: t.update({K: torch.zeros(31, 64)})),
        WrongTensor,
        "31|rows",
    ),
    "integers": (
        lambda f: edit_tensors(f, lambda t: t.update({K: torch.zeros(32, 64, dtype=torch.int32)})),
        WrongTensor,
        "I32",
    ),
    "not finite": (
        lambda f: edit_tensors(f, lambda t: t[K].__setitem__((3, 4), float("nan"))),
        WrongTensor,
        f"{K}.*NaN",
    ),
    "unknown architecture": (
        lambda f: edit_config(f, architectures=["MambaForCausalLM"]),
        UnsupportedModel,
        "MambaForCausalLM.*LlamaForCausalLM",
    ),
    "no architecture": (lambda f: edit_config(f, architectures=None), UnsupportedModel, "none named"),
    "foreign quantization": (
        lambda f: edit_config(f, quantization_config={"quant_method": "gptq", "bits": 3}),
        UnsupportedModel,
        "gptq.*unquantized",
    ),
    "unknown rope": (
        lambda f: edit_config(f, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        UnsupportedModel,
        "spiral",
    ),
    "incomplete config": (lambda f: edit_config(f, hidden_size=None), UnsupportedModel, "hidden_size"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_its_own_error_that_names_it(fault: str, tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    open_all(folder)
    damage, kind, message = FAULTS[fault]
    damage(folder)
    with pytest.raises(CheckpointError, match=f"(?s){message}") as caught:
        open_all(folder)
    assert type(caught.value) is kind


def test_a_missing_shard_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    folder = shard(tiny_llama, tmp_path / "sharded")
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointNotFound, match="model-1.safetensors"):
        open_all(folder)


def test_a_file_cut_after_it_was_opened(tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    with Checkpoint.open(folder) as checkpoint:
        file = folder / "model.safetensors"
        with file.open("r+b") as stream:
            stream.truncate(file.stat().st_size // 2)
        last = max(checkpoint.entries.values(), key=lambda entry: entry.offset)
        with pytest.raises(CorruptFile, match="ends within tensor"):
            checkpoint.read(last.name)


def test_unexpected_tensors_can_be_allowed(tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    edit_tensors(folder, lambda tensors: tensors.update(adapter=torch.zeros(1)))
    with Checkpoint.open(folder) as checkpoint:
        family = find_family(checkpoint.config)
        tensors = family.model_tensors(family.read_spec(checkpoint.config))
        assert WeightStore(checkpoint, tensors, ignore_unexpected=True).num_layers == 3


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    header=st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["a", "dtype", "shape", "data_offsets", "__metadata__"]),
                    inner,
                    max_size=3,
                )
            ),
            max_leaves=8,
        ).map(lambda value: json.dumps(value).encode()),
    )
)
def test_any_header_is_read_or_refused(header: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever stands there: a list of tensors, or CorruptFile. Never another exception."""
    file = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    try:
        for entry in read_header(file):
            assert entry.offset + entry.num_bytes <= file.stat().st_size
    except CorruptFile as error:
        assert "fuzz.safetensors" in str(error)
