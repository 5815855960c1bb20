"""Checkpoints that others quantized: the same numbers as their libraries make of them, or a clear refusal."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import build

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.errors import UnexpectedTensor, UnsupportedModel
from penstock.generation.sequence import SamplingParams
from penstock.model.registry import open_model
from penstock.weights.convert import convert
from penstock.weights.quantize import quantize
from penstock.weights.store import LayerWeights, WeightStore

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)
PROMPTS = [[5, 9, 20], [7] * 40]


class Ids:
    """Instead of a tokenizer."""

    eos_token_ids: frozenset[int] = frozenset()

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return ""


def read_layer(store: WeightStore, index: int = 0) -> LayerWeights:
    return store.read_layer(index, torch.empty(store.layouts[index].num_bytes, dtype=torch.uint8))


def assert_computes(folder: Path, expected: Any, group_size: int = 0, **config: Any) -> None:
    """That the engine's log-probabilities are those of transformers' model, once its embedding and head have
    been quantized as well."""
    tokenizer: Any = Ids()
    for matrix, inputs in (
        (expected.get_input_embeddings(), 0),
        (expected.get_output_embeddings(), group_size),
    ):
        matrix.weight.data = quantize(matrix.weight.data, inputs).dequantize()
    with Engine.load(folder, EngineConfig(kv_dtype="float32", **config), tokenizer=tokenizer) as engine:
        for prompt in PROMPTS:
            (mine,) = engine.generate([prompt], GREEDY)
            with torch.inference_mode():
                logits = expected(torch.tensor([prompt + mine.token_ids])).logits[0, len(prompt) - 1 : -1]
            theirs = torch.log_softmax(logits.double(), -1)
            for step, (token, logprobs) in enumerate(zip(mine.token_ids, mine.logprobs, strict=True)):
                spread = float(logits[step].max() - logits[step].min())
                assert abs(logprobs.logprob - float(theirs[step, token])) <= 1e-3 * spread


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


# ---- compressed-tensors

W8A16 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
GROUPS = {"strategy": "group", "group_size": 32}
#: Whole groups of each size.
SIZES = {"hidden_size": 128, "intermediate_size": 256}
DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}


def write_compressed(
    kind: str, folder: Path, weights: dict[str, Any], activations: dict[str, Any] | None, form: str | None
) -> None:
    """A checkpoint as compressed-tensors makes it of transformers' model; form None is what it chooses."""
    compressed_tensors = pytest.importorskip("compressed_tensors")
    from compressed_tensors import quantization
    from compressed_tensors.quantization.utils import calculate_qparams

    model = build(kind, folder, **SIZES)
    arguments = quantization.QuantizationArgs(**weights)
    scheme = quantization.QuantizationScheme(
        targets=["Linear"],
        weights=arguments,
        input_activations=activations and quantization.QuantizationArgs(**activations),
        format=form,
    )
    config = quantization.QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    quantization.apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            groups = module.weight.unflatten(1, (-1, weights.get("group_size") or module.weight.shape[1]))
            scale, _ = calculate_qparams(groups.amin(2), groups.amax(2), arguments)
            module.weight_scale.data.copy_(scale.view_as(module.weight_scale))
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.05)
    compressor = compressed_tensors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    shutil.rmtree(folder)
    model.save_pretrained(folder)
    compressor.update_config(folder)


@pytest.mark.parametrize(
    ("activations", "form"),
    [(None, None), (None, "int-quantized"), (None, "naive-quantized"), (DYNAMIC, None), (STATIC, None)],
    ids=["A16", "A16 int", "A16 naive", "A8", "A8 static"],
)
@pytest.mark.parametrize("group_size", [0, 32, 64, 128])
def test_compressed_tensors(
    group_size: int,
    activations: dict[str, Any] | None,
    form: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    import transformers

    weights = W8A16 | ({"strategy": "group", "group_size": group_size} if group_size else {})
    write_compressed("Qwen2", tmp_path, weights, activations, form)
    names = load_file(tmp_path / "model.safetensors")
    is_packed = form is None and activations is None
    assert any(name.endswith("_packed") for name in names) == is_packed
    assert any(name.endswith("input_scale") for name in names) == (activations is STATIC)
    dense = transformers.CompressedTensorsConfig(dequantize=True)
    expected = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", quantization_config=dense
    )
    with caplog.at_level(logging.INFO):
        assert_computes(tmp_path, expected, group_size)
    assert ("activations of 8 bits" in caplog.text) == (activations is not None)
    assert ("scales in the files are not used" in caplog.text) == (activations is STATIC)


def test_packed_integers_are_kept(tmp_path: Path) -> None:
    write_compressed("Llama", tmp_path / "packed", W8A16 | GROUPS, None, None)
    write_compressed("Llama", tmp_path / "plain", W8A16 | GROUPS, None, "int-quantized")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    store = open_model(tmp_path / "packed").store
    o = read_layer(store).matrix("o")
    name = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(o.qweight, plain[name]) and torch.equal(o.scale, plain[name + "_scale"])
    assert store.contiguous_layer(0) is None
    convert(store, tmp_path / "converted")
    again = read_layer(open_model(tmp_path / "converted").store).matrix("o")
    assert torch.equal(again.qweight, o.qweight) and torch.equal(again.scale, o.scale)


def test_zero_points_are_zero_or_unexpected(tmp_path: Path) -> None:
    write_compressed("Llama", tmp_path, W8A16, None, "int-quantized")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight_zero_point"
    tensors[name] = torch.zeros(256, 1, dtype=torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    open_model(tmp_path).store.close()
    tensors[name][7] = 3
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnexpectedTensor, match=name):
        open_model(tmp_path)


# ---- what is refused


def scheme(**changes: object) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": W8A16 | changes}},
    }


FOREIGN: dict[str, tuple[dict[str, Any], str]] = {
    "4 bits": (scheme(num_bits=4), "compressed-tensors: 4 bits int per channel"),
    "FP8": (scheme(type="float"), "8 bits float"),
    "asymmetric": (scheme(symmetric=False), "asymmetric"),
    "groups of 48": (scheme(strategy="group", group_size=48), "per group of 48"),
    "act order": (scheme(**GROUPS, actorder="group"), "actorder group"),
    "sparse": (scheme() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    "rotated": (scheme() | {"transform_config": {"config_groups": {"R1": {}}}}, "transforms"),
    "marlin": (scheme() | {"format": "marlin-24"}, "marlin-24"),
    "nothing said": ({"quant_method": "compressed-tensors"}, "no format given"),
    "LLM.int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, r"bitsandbytes LLM\.int8"),
    "LLM.int8, old": ({"load_in_8bit": True}, r"bitsandbytes LLM\.int8"),
    "NF4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes with 4 bits"),
    "AWQ": ({"quant_method": "awq", "bits": 4}, "awq with 4 bits"),
    "FP8 blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
    "MXFP4": ({"quant_method": "mxfp4"}, "mxfp4"),
    "ModelOpt": ({"quant_algo": "NVFP4"}, "NVFP4"),
}


@pytest.mark.parametrize("method", FOREIGN)
def test_other_methods_are_named(method: str, tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_llama, tmp_path / "model")
    quantization, message = FOREIGN[method]
    edit_config(tmp_path / "model", quantization_config=quantization)
    with pytest.raises(UnsupportedModel, match=f"{message}.*Use the original, unquantized repository"):
        open_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("tensor", "method"),
    [
        ("weight.absmax", "bitsandbytes"),
        ("SCB", "LLM.int8"),
        ("qweight", "GPTQ"),
        ("weight_scale_inv", "FP8"),
    ],
)
def test_tensors_give_methods_away(tensor: str, method: str, tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_llama, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors[f"model.layers.0.mlp.up_proj.{tensor}"] = torch.zeros(4)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=f"{method}.*holds model.layers.0.mlp.up_proj.{tensor}"):
        open_model(tmp_path / "model")
