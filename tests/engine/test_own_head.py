"""Checkpoints whose config.json ties head and embedding, and that hold both: transformers is the judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_families import Model, dequantized, oracle_logits
from test_formats_in import W8A16, Ids
from tiny_models import build
from torch import Tensor

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.errors import ConfigError, UnexpectedTensor, WrongTensor
from penstock.generation.requests.generation_request import SamplingParams
from penstock.model.registry import open_model
from penstock.unquantized import UnquantizedModel
from penstock.weights.checkpoints import own_head
from penstock.weights.conversion.convert import convert
from penstock.weights.quantize import quantize

#: One of each family that ties, by its config or by its class.
TIED = ("Llama, tied, biases", "Qwen3", "Gemma 2", "GPT-2", "OPT", "BLOOM", "Falcon")
TIED += ("GPT-NeoX, tied, whole heads",)
TIED_BY_CLASS = ("Gemma 2", "GPT-2", "OPT", "BLOOM", "Falcon")
PROMPT = [5, 9, 20, 33, 8, 120, 7]


def head_name(name: str) -> str:
    return "embed_out.weight" if name.startswith("GPT-NeoX") else "lm_head.weight"


def add_head(folder: Path, name: str, head: Tensor) -> None:
    tensors = load_file(folder / "model.safetensors")
    assert name not in tensors
    save_file(tensors | {name: head.contiguous()}, folder / "model.safetensors", {"format": "pt"})


def other_head(model: transformers.PreTrainedModel) -> Tensor:
    """The embedding with one row moved: a token that was trained further."""
    embedding = model.get_input_embeddings().weight.detach().clone()
    embedding[-1] += 0.5 * torch.randn(embedding.shape[1], generator=torch.Generator().manual_seed(7))
    return embedding


def from_transformers(folder: Path) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.from_pretrained(folder)
    attention = "sdpa" if config.model_type == "falcon" else "eager"  # as in tiny_models.py
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    ).eval()


def difference(folder: Path, oracle: transformers.PreTrainedModel) -> float:
    """Largest difference of logits over the range of transformers'."""
    model = Model(folder, EngineConfig(kv_dtype="float32"))
    mine, theirs = model.all_logits(model.sequences()), oracle_logits(oracle)
    return float((mine - theirs).abs().max() / (theirs.max() - theirs.min()))


@pytest.mark.parametrize(
    ("name", "says_so"), [(name, True) for name in TIED] + [(name, False) for name in TIED_BY_CLASS]
)
def test_a_head_that_differs_is_kept(name: str, says_so: bool, tmp_path: Path) -> None:
    head = other_head(build(name, tmp_path))
    add_head(tmp_path, head_name(name), head)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(
        json.dumps(config | ({"tie_word_embeddings": True} if says_so else {}))
    )
    oracle = from_transformers(tmp_path)
    assert torch.equal(oracle.get_output_embeddings().weight, head)
    assert difference(tmp_path, dequantized(oracle, tmp_path)) < 5e-4


@pytest.mark.parametrize("name", TIED)
def test_a_head_that_is_the_embedding_takes_no_memory(name: str, tmp_path: Path) -> None:
    model = build(name, tmp_path)
    before = Model(tmp_path, EngineConfig())
    add_head(tmp_path, head_name(name), model.get_input_embeddings().weight.detach().clone())
    after = Model(tmp_path, EngineConfig())
    assert after.spec.is_tied and after.store.tensors.head == before.store.tensors.head
    assert torch.equal(after.all_logits(after.sequences()), before.all_logits(before.sequences()))


def test_all_of_it_is_compared_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one row that differs is the last."""
    head = other_head(build("Gemma 2", tmp_path))
    monkeypatch.setattr(own_head, "SLICE_BYTES", 1000)  # three rows
    add_head(tmp_path, "lm_head.weight", head)
    assert not open_model(tmp_path).spec.is_tied


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_floats_of_another_width_are_compared_by_value(dtype: torch.dtype, tmp_path: Path) -> None:
    model = build("GPT-2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rounded = tensors["transformer.wte.weight"].to(dtype)
    tensors["transformer.wte.weight"] = rounded.float()
    save_file(tensors | {"lm_head.weight": rounded}, tmp_path / "model.safetensors")
    assert open_model(tmp_path).spec.is_tied
    exact = model.get_input_embeddings().weight.detach()
    save_file(tensors | {"lm_head.weight": exact.clone()}, tmp_path / "model.safetensors")
    assert not open_model(tmp_path).spec.is_tied


def test_checkpoints_of_the_bare_model(tmp_path: Path) -> None:
    """Without the prefix that the family's embedding has."""
    head = other_head(build("GPT-2", tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    assert not open_model(tmp_path).spec.is_tied


def test_heads_that_can_not_be_used_are_named(tmp_path: Path) -> None:
    build("Gemma 2", tmp_path / "narrow")
    add_head(tmp_path / "narrow", "lm_head.weight", torch.ones(3, 64))
    with pytest.raises(WrongTensor, match=r"lm_head.weight.*3 rows.*160"):
        open_model(tmp_path / "narrow")
    head = other_head(build("GPT-NeoX, tied, whole heads", tmp_path / "renamed"))
    add_head(tmp_path / "renamed", "lm_head.weight", head)
    with pytest.raises(UnexpectedTensor, match=r"head lm_head.weight that differs.*embed_out.weight.*Rename"):
        open_model(tmp_path / "renamed")


def test_the_unquantized_twin_has_the_head(tmp_path: Path) -> None:
    add_head(tmp_path, "lm_head.weight", other_head(build("Gemma 2", tmp_path)))
    twin, ids = UnquantizedModel(open_model(tmp_path)), torch.tensor([PROMPT])
    with torch.inference_mode():
        expected = from_transformers(tmp_path)(ids).logits
    torch.testing.assert_close(twin.forward(ids).logits, expected, atol=1e-4, rtol=1e-4)


def answer(folder: Path, group_size: int | None = None) -> Any:
    tokenizer: Any = Ids()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
    with Engine.load(folder, EngineConfig(group_size=group_size), tokenizer=tokenizer) as engine:
        (completion,) = engine.generate([PROMPT], params)
    return completion.token_ids, completion.logprobs


@pytest.mark.parametrize("group_size", [None, 32])
@pytest.mark.parametrize("name", ["Gemma 2", "GPT-2", "GPT-NeoX, tied, whole heads"])
def test_a_converted_folder_has_the_head(name: str, group_size: int | None, tmp_path: Path) -> None:
    head = other_head(build(name, tmp_path / "source"))
    add_head(tmp_path / "source", head_name(name), head)
    convert(open_model(tmp_path / "source", group_size=group_size).store, tmp_path / "target")
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False and "penstock_tied_head" not in config
    opened = open_model(tmp_path / "target")
    mine = opened.store.read_resident(opened.store.tensors.head).matrix("head")
    expected = quantize(head, group_size or 0)
    assert torch.equal(mine.qweight, expected.qweight) and torch.equal(mine.scale, expected.scale)
    assert answer(tmp_path / "target") == answer(tmp_path / "source", group_size)


def test_a_conversion_that_tied_them_is_not_taken_for_this_one(tmp_path: Path) -> None:
    """The head was there while Penstock did not look."""
    model = build("Gemma 2", tmp_path / "source")
    add_head(tmp_path / "source", "lm_head.weight", other_head(model))
    opened = open_model(tmp_path / "source")
    convert(opened.store, tmp_path / "target")
    manifest = json.loads((tmp_path / "target" / "penstock.json").read_text())
    opened.store.checkpoint.config["tie_word_embeddings"] = True
    with pytest.raises(ConfigError, match="another model"):
        convert(opened.store, tmp_path / "target")
    assert json.loads((tmp_path / "target" / "penstock.json").read_text()) == manifest


def write_int8(folder: Path, head: Tensor, has_int8_embedding: bool) -> None:
    """A tied Gemma 2 in compressed-tensors' `int-quantized`, its head in INT8 beside the embedding."""
    build("Gemma 2", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = head
    names = [name for name in tensors if tensors[name].dim() == 2 and "embed" not in name]
    for name in [*names, *(["model.embed_tokens.weight"] if has_int8_embedding else [])]:
        quantized = quantize(tensors[name])
        tensors |= {name: quantized.qweight, f"{name}_scale": quantized.scale[:, None]}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    targets = ["Linear", "Embedding"] if has_int8_embedding else ["Linear"]
    group = {"targets": targets, "weights": W8A16, "format": "int-quantized"}
    quantization = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": [],
    }  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


@pytest.mark.parametrize("has_int8_embedding", [True, False])
def test_heads_in_int8(has_int8_embedding: bool, tmp_path: Path) -> None:
    model = build("Gemma 2", tmp_path / "float")
    head, embedding = other_head(model), model.get_input_embeddings().weight.detach().clone()
    write_int8(tmp_path / "int8", head, has_int8_embedding)
    opened = open_model(tmp_path / "int8")
    mine = opened.store.read_resident(opened.store.tensors.head).matrix("head")
    assert torch.equal(mine.qweight, quantize(head).qweight)
    write_int8(tmp_path / "equal", embedding, has_int8_embedding)
    assert open_model(tmp_path / "equal").spec.is_tied == has_int8_embedding
    # The same integers with other scales are another head.
    write_int8(tmp_path / "scaled", 2 * embedding, has_int8_embedding)
    assert not open_model(tmp_path / "scaled").spec.is_tied
