"""Checkpoints in 4 bits of other tools, as folders: the same bits before and after, the numbers of
compressed-tensors' package, and our own form where it has no words for a format."""

from __future__ import annotations

import contextlib
import json
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_convert import GREEDY, PROMPTS, Ids
from test_formats_in import edit_config
from test_formats_int4 import (
    awq,
    awq_config,
    compressed,
    gptq,
    gptq_config,
    packed_config,
    quantized_model,
)
from tiny_models import build
from torch import Tensor
from units import layer_key

from penstock import Engine, EngineConfig
from penstock.errors import MissingTensor, UnsupportedModel, WrongTensor
from penstock.memory.direct_io import aligned_buffer
from penstock.model.registry import find_family, open_model
from penstock.unquantized import UnquantizedModel
from penstock.weights.conversion import convert as conversion
from penstock.weights.conversion.convert import convert
from penstock.weights.formats.int4_format import Int4
from penstock.weights.formats.stacked_format import in_one_format
from penstock.weights.store import WeightStore, planned_tensors
from penstock.weights.tensors import Unit
from penstock.weights.tiers.readers import StoreReader

#: What packs a matrix, the config that says so, and the family (Qwen3 shares embedding and head).
PACKED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "AWQ": (lambda weight: awq(weight, 64), awq_config(64), "Llama"),
    "GPTQ": (lambda weight: gptq(weight, -1, sym=False), gptq_config(-1, sym=False), "Llama, tied, biases"),
    "compressed-tensors": (lambda weight: compressed(weight, False, 32), packed_config(False, 32), "Phi-3"),
}


def write_packed(kind: str, folder: Path) -> Path:
    pack, config, family = PACKED[kind]

    def named(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        tensors, dense = pack(weight)
        tensors.pop("bias", None)
        return {name + of: tensor for of, tensor in tensors.items()}, dense

    torch.manual_seed(0)
    quantized_model(family, folder, named, **config)
    return folder


def write_mixture(folder: Path, monkeypatch: pytest.MonkeyPatch, **kinds: str) -> Path:
    """A GGUF file without a tokenizer."""
    pytest.importorskip("gguf")
    import test_gguf_types

    monkeypatch.setattr(conversion, "read_companions", lambda *_: {})
    monkeypatch.setitem(test_gguf_types.MIXTURES, "mixture", {"": "Q4_0"} | kinds)
    test_gguf_types.make("mixture", folder)
    return folder / "model.gguf"


def assert_package_reads(folder: Path, source: WeightStore) -> None:
    """That compressed-tensors' own package makes the source's numbers of every matrix in 4 bits."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import PackedQuantizationCompressor as Compressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    groups = config["config_groups"].values()
    weights = next(group["weights"] for group in groups if group["format"] == "pack-quantized")
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    tensors = {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}
    names = [name for name in tensors if name.endswith("weight_packed")]
    assert len(names) >= 2 * source.num_layers
    for name in names:
        module = name.removesuffix("weight_packed")
        state = {n.removeprefix(module): t for n, t in tensors.items() if n.startswith(module)}
        state["weight_scale"] = state["weight_scale"].float()
        assert torch.equal(
            Compressor.decompress(state, scheme)["weight"], source.read_exact(f"{module}weight")
        )


def layer_buffers(stores: list[WeightStore], index: int) -> list[Tensor]:
    """A layer as each store reads it, and as it comes straight from the last one's file."""
    key, (*_, last) = layer_key(index), stores
    num_bytes = last.units[key].num_bytes
    buffers = [aligned_buffer(num_bytes) for _ in range(len(stores) + 1)]
    for store, buffer in zip(stores, buffers, strict=False):
        store.read_unit(key, buffer)
    assert last.contiguous_unit(key)
    with contextlib.closing(StoreReader(last)) as reader:
        reader.submit(key, buffers[-1]).result()
    return [buffer[:num_bytes] for buffer in buffers]


@pytest.mark.parametrize("kind", [*PACKED, "GGUF"])
def test_a_folder_has_the_same_bits(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero points per group and per row; v in 8 bits beside q and k; embeddings in floats and in groups."""
    mixed = {"token_embd": "Q8_0", "attn_v": "Q6_K", "ffn_down": "F16", "output": "Q6_K"}
    is_gguf, target = kind == "GGUF", tmp_path / "target"
    path = (
        write_mixture(tmp_path, monkeypatch, **mixed) if is_gguf else write_packed(kind, tmp_path / "source")
    )
    source = open_model(path)
    convert(source.store, target)
    opened = open_model(target)
    for index in range(source.store.num_layers):
        first, *others = layer_buffers([source.store, opened.store], index)
        assert all(torch.equal(first, other) for other in others)
    assert_package_reads(target, source.store)
    tokenizer: Any = Ids()
    answers = []
    for folder, config in ((path, EngineConfig()), (target, EngineConfig(num_resident_layers=1))):
        with Engine.load(folder, config, tokenizer=tokenizer) as engine:
            answers.append([(c.token_ids, c.logprobs) for c in engine.generate(PROMPTS, GREEDY)])
    assert answers[0] == answers[1]


def test_transformers_opens_a_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With zero points it does not, whoever wrote them: compressed-tensors 0.20 forgets the packed shape."""
    pytest.importorskip("compressed_tensors")
    import transformers

    path = write_mixture(tmp_path, monkeypatch, token_embd="Q5_K", attn_v="Q8_0", output="F16")
    convert(open_model(path).store, tmp_path / "target")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", dtype=torch.float32, attn_implementation="eager"
    )
    ids, opened = torch.tensor([PROMPTS[1]]), open_model(tmp_path / "target")
    with torch.inference_mode():
        torch.testing.assert_close(theirs(ids).logits, UnquantizedModel(opened).forward(ids).logits)


@pytest.mark.parametrize("kind", ["Q4_K", "IQ4_XS", "desc_act"])
def test_what_has_no_words_is_in_our_own(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte, and one read a layer. transformers refuses the folder."""
    if kind == "desc_act":
        order = {"sym": True, "desc_act": True, "checkpoint_format": "gptq_v2"}
        found = lambda weight: gptq(weight, 32, **order), gptq_config(32, **order), "Llama"
        monkeypatch.setitem(PACKED, kind, found)
        path = write_packed(kind, tmp_path / "source")
    else:
        path = write_mixture(tmp_path, monkeypatch, attn_output=kind, token_embd=kind)
    store = open_model(path).store
    convert(store, tmp_path / "target")
    converted = open_model(tmp_path / "target").store
    for key, unit in store.units.items():
        buffers = [torch.zeros(unit.num_bytes, dtype=torch.uint8) for _ in range(2)]
        for each, buffer in zip((store, converted), buffers, strict=True):
            each.read_unit(key, buffer)
        assert torch.equal(*buffers) and converted.contiguous_unit(key) is not None
    ids = torch.tensor([PROMPTS[1]])
    logits = [UnquantizedModel(open_model(each)).forward(ids).logits for each in (path, tmp_path / "target")]
    assert torch.equal(*logits)
    assert (
        "quant_method" not in json.loads((tmp_path / "target/config.json").read_text())["quantization_config"]
    )


def test_codes_of_another_form_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_mixture(tmp_path, monkeypatch, attn_output="Q4_K")
    convert(open_model(path).store, tmp_path / "target")
    file = tmp_path / "target/model-layer-00001.safetensors"
    tensors, name = load_file(file), "model.layers.1.self_attn.o_proj.weight_sub_scale"
    save_file(tensors | {name: tensors[name][:5].clone()}, file)
    with pytest.raises(WrongTensor, match="o_proj.weight_sub_scale .* does not fit"):
        open_model(tmp_path / "target")
    edit_config(tmp_path / "target", quantization_config={"penstock": "codes", "version": 2})
    with pytest.raises(UnsupportedModel, match="4-bit codes of version 2"):
        open_model(tmp_path / "target")


def write_own(folder: Path) -> Path:
    """A converted folder in Penstock's own 4 bits."""
    build("Llama", folder / "source")
    convert(open_model(folder / "source", weights="int4", group_size=32).store, folder / "target")
    return folder / "target"


def int4_formats(unit: Unit) -> list[Int4]:
    kinds = [own.format for tensor in unit.tensors for own in in_one_format(tensor)]
    return [kind for kind in kinds if isinstance(kind, Int4)]


def greedy_answers(folder: Path, **options: Any) -> list[Any]:
    tokenizer: Any = Ids()
    config = EngineConfig(num_resident_layers=1, **options)
    with Engine.load(folder, config, tokenizer=tokenizer) as engine:
        return [(c.token_ids, c.logprobs) for c in engine.generate(PROMPTS, GREEDY)]


def planned_bytes(folder: Path) -> list[int]:
    """The units' bytes by config.json alone."""
    config = json.loads((folder / "config.json").read_text())
    family = find_family(config)
    planned = planned_tensors(family.model_tensors(family.read_spec(config)), config, "int8", None)
    return [unit.num_bytes for unit in planned.units]


def test_other_tools_have_the_scales_of_units_and_steps(tmp_path: Path) -> None:
    """And a folder that has these scales alone, as older ones do, gives the same answers."""
    target = write_own(tmp_path)
    opened = open_model(target).store
    assert_package_reads(target, opened)
    assert planned_bytes(target) == [unit.num_bytes for unit in opened.units.values()]
    answers = greedy_answers(target)
    for file in target.glob("model-layer-*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith("_steps.bias")]:
            units, steps = tensors.pop(name.replace("_steps", "_units")), tensors.pop(name)
            scale = tensors[name.replace("_steps.bias", "_scale")]
            assert units.dtype == scale.dtype == torch.bfloat16 and steps.abs().max() == 15
            assert torch.equal(scale.float(), units.float() * steps)
        save_file(tensors, file)
    edit_config(target, penstock_int4_steps=None)
    older = open_model(target).store
    assert planned_bytes(target) == [unit.num_bytes for unit in older.units.values()]
    assert older.units[layer_key(0)].num_bytes > opened.units[layer_key(0)].num_bytes
    assert greedy_answers(target) == answers


def test_units_and_steps_of_other_shapes_are_refused(tmp_path: Path) -> None:
    file = write_own(tmp_path) / "model-layer-00001.safetensors"
    tensors, name = load_file(file), "model.layers.1.self_attn.o_proj.weight"
    for ending, wrong in (
        ("_steps.bias", tensors[f"{name}_steps.bias"][:, :1].clone()),
        ("_units.bias", tensors[f"{name}_units.bias"].float()),
    ):
        save_file(tensors | {name + ending: wrong}, file)
        with pytest.raises(WrongTensor, match=f"o_proj.weight{ending} .* Convert the model again"):
            open_model(tmp_path / "target")
    del tensors[f"{name}_units.bias"]
    save_file(tensors, file)
    with pytest.raises(MissingTensor, match="o_proj.weight_units.bias"):
        open_model(tmp_path / "target")


@pytest.mark.parametrize("others", ["Q4_0", "Q4_1"])
def test_own_four_bits_beside_other_ones(
    others: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a fused matrix, and matrices by themselves, in folders of both descriptions. What they become
    converts to the same again."""
    path = write_mixture(tmp_path, monkeypatch, **{"": others, "attn_v": "F16", "ffn_down": "F16"})
    source = open_model(path, weights="int4", group_size=32).store
    folders = [tmp_path / "target", tmp_path / "again"]
    for folder in folders:
        convert(source, folder)
        source = open_model(folder).store
        assert all(source.contiguous_unit(key) for key in source.units)
        memory = [unit.num_bytes for unit in source.units.values()]
        # config.json does not tell of minima, which Q4_1 has.
        assert others == "Q4_1" or all(map(operator.ge, planned_bytes(folder), memory))
    mixed = {each.form.has_steps for unit in source.units.values() for each in int4_formats(unit)}
    assert mixed == {False, True}
    answers = [greedy_answers(path, weights="int4", group_size=32), *map(greedy_answers, folders)]
    assert answers[0] == answers[1] == answers[2]
