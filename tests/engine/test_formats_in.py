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
from units import layer_key, read_layer

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.errors import CheckpointError, MissingTensor, UnexpectedTensor, UnsupportedModel, WrongTensor
from penstock.generation.requests.generation_request import SamplingParams
from penstock.model.registry import open_model
from penstock.unquantized import UnquantizedModel
from penstock.weights.conversion.convert import convert
from penstock.weights.quantization_error import quantization_errors
from penstock.weights.quantize import quantize

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)
PROMPTS = [[5, 9, 20], [7] * 40]


class Ids:
    """Instead of a tokenizer."""

    eos_token_ids: frozenset[int] = frozenset()

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return b""


def assert_computes(
    folder: Path,
    expected: Any,
    group_size: int = 0,
    kernels: Any = "auto",
    is_rounded: bool = False,
    weights: Any = "int8",
) -> None:
    """That the engine's log-probabilities are those of transformers' model, once its embedding and head have
    been quantized as well, unless they are (`is_rounded`)."""
    tokenizer: Any = Ids()
    embedding, head = expected.get_input_embeddings(), expected.get_output_embeddings()
    if head.weight is not embedding.weight and not is_rounded:
        head.weight.data = quantize(head.weight.data, group_size).dequantize()
    if not is_rounded:
        embedding.weight.data = quantize(embedding.weight.data).dequantize()
    # Plain kernels are slow, and a warm-up computes the largest step.
    few = {} if kernels == "auto" else {"max_num_seqs": 2, "max_num_batched_tokens": 48}
    config = EngineConfig(
        kv_dtype="float32", group_size=group_size or None, max_model_len=128, kernels=kernels,
        weights=weights, **few
    )  # fmt: skip
    with Engine.load(folder, config, tokenizer=tokenizer) as engine:
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
    assert store.contiguous_unit(layer_key(0)) is None
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


# ---- GPTQ


def gptq_words(values: torch.Tensor) -> torch.Tensor:
    """AutoGPTQ's packing: four rows of 8-bit integers [4 n, columns] to one of int32 words [n, columns]."""
    words = sum(values[k::4].long() << (8 * k) for k in range(4))
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def write_gptq(
    kind: str, folder: Path, group_size: int, is_first: bool = True, act_order: bool = False
) -> Any:
    """A GPTQ checkpoint with 8 bits, symmetric; returns transformers' model with the weights that it stands
    for, w = (q - 128) * scale. Inputs of a group are drawn at random if the order of activations counts."""
    model = build(kind, folder, **({} if kind == "GPT-2" else SIZES))
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(3)
    for name, module in model.named_modules():
        is_linear = isinstance(module, torch.nn.Linear) and name != "lm_head"
        if not is_linear and type(module).__name__ != "Conv1D":
            continue
        weight = module.weight.data if is_linear else module.weight.data.t()
        num_outputs, num_inputs = weight.shape
        size = num_inputs if group_size == -1 else group_size
        g_idx = torch.arange(num_inputs) // size
        g_idx = g_idx[torch.randperm(num_inputs)] if act_order else g_idx
        groups = range(num_inputs // size)
        largest = torch.stack([weight[:, g_idx == group].abs().amax(1) for group in groups])
        scales = (largest * 2 / 255).half()  # [groups, out]
        per_input = scales.float()[g_idx].t()
        q = (weight / per_input).round().add(128).clamp(0, 255)
        dequantized = (q - 128) * per_input
        module.weight.data = dequantized if is_linear else dequantized.t().contiguous()
        del tensors[f"{name}.weight"]
        zeros = torch.full((num_outputs, len(groups)), 127 if is_first else 128)
        tensors[f"{name}.qweight"] = gptq_words(q.t().int())
        tensors[f"{name}.qzeros"] = gptq_words(zeros).t().contiguous()
        tensors[f"{name}.scales"] = scales
        tensors[f"{name}.g_idx"] = g_idx.int()
        tensors.setdefault(f"{name}.bias", torch.zeros(num_outputs, dtype=torch.float16))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    quantization = {
        "quant_method": "gptq", "bits": 8, "group_size": group_size, "sym": True, "desc_act": act_order,
        "checkpoint_format": "gptq" if is_first else "gptq_v2",
    }  # fmt: skip
    edit_config(folder, quantization_config=quantization)
    return model


@pytest.mark.parametrize(
    ("group_size", "is_first", "act_order"),
    [(-1, True, False), (32, True, False), (64, False, False), (128, False, False), (-1, True, True)],
)
def test_gptq_is_kept(group_size: int, is_first: bool, act_order: bool, tmp_path: Path) -> None:
    expected = write_gptq("Qwen2", tmp_path, group_size, is_first, act_order)
    for index in range(3):
        layer = read_layer(open_model(tmp_path).store, index)
        theirs = expected.model.layers[index]
        assert int(layer.matrix("gate_up").qweight.min()) == -128
        assert torch.equal(layer.matrix("down").dequantize(), theirs.mlp.down_proj.weight)
        qkv = [getattr(theirs.self_attn, f"{name}_proj").weight for name in "qkv"]
        assert torch.equal(layer.matrix("qkv").dequantize(), torch.cat(qkv))
    assert_computes(tmp_path, expected, max(group_size, 0))


def test_gptq_in_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gptq("Llama", tmp_path, 32)
    whole = read_layer(open_model(tmp_path).store).matrix("gate_up")
    monkeypatch.setattr("penstock.weights.formats.weight_format.CHUNK_BYTES", 1000)
    pieces = read_layer(open_model(tmp_path).store).matrix("gate_up")
    assert torch.equal(whole.qweight, pieces.qweight) and torch.equal(whole.scale, pieces.scale)


@pytest.mark.parametrize("kind", ["Llama", "GPT-2"])
@pytest.mark.parametrize("group_size", [None, 64])
def test_gptq_out_of_order_is_quantized_again(
    kind: str, group_size: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_gptq(kind, tmp_path, 32, act_order=True)
    with caplog.at_level(logging.INFO):
        store = open_model(tmp_path, group_size=group_size).store
    weight = model.transformer.h[0].attn.c_proj.weight.t() if kind == "GPT-2" else None
    weight = model.model.layers[0].self_attn.o_proj.weight if weight is None else weight
    expected, mine = quantize(weight.data, group_size or 0), read_layer(store).matrix("o")
    assert torch.equal(mine.qweight, expected.qweight) and torch.equal(mine.scale, expected.scale)
    first = next(error for error in quantization_errors(store) if "h.0" in error.name or "s.0" in error.name)
    assert 0.002 < first.relative < 0.02
    assert "out of order (desc_act)" in caplog.text and "which loses 0.0" in caplog.text
    report = convert(store, tmp_path / "converted")
    assert report.errors[f"{first.name.split(', ')[0]}"] == pytest.approx(first.relative, rel=0.3)


@pytest.mark.parametrize("kind", ["Llama", "GPT-2"])
@pytest.mark.parametrize("act_order", [False, True])
def test_the_unquantized_twin_of_gptq(kind: str, act_order: bool, tmp_path: Path) -> None:
    expected = write_gptq(kind, tmp_path, 32, act_order=act_order)
    ids = torch.randint(3, 160, (2, 40), generator=torch.Generator().manual_seed(5))
    computed = UnquantizedModel(open_model(tmp_path)).forward(ids)
    with torch.inference_mode():
        torch.testing.assert_close(computed.logits, expected(ids).logits, atol=1e-4, rtol=1e-4)


def test_gptq_with_a_config_of_its_own(tmp_path: Path) -> None:
    write_gptq("Llama", tmp_path, 32)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "quantize_config.json").write_text(json.dumps(config.pop("quantization_config")))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_layer(open_model(tmp_path).store).matrix("o").scale.shape == (128, 4)


DOWN = "model.layers.1.mlp.down_proj."
FAULTS: dict[str, tuple[dict[str, torch.Tensor | None], type[CheckpointError], str]] = {
    "asymmetric": ({"qzeros": torch.full((8, 32), 0x7F7F7F80)}, WrongTensor, "other zero points"),
    "out of order": ({"g_idx": torch.arange(256) % 8}, WrongTensor, "out of order.*desc_act"),
    "4 bits": ({"qweight": torch.zeros(32, 128)}, WrongTensor, "g_idx.*256.*8 bits"),
    "groups beyond the last": ({"g_idx": torch.arange(256) % 9}, WrongTensor, "have no scales"),
    "no group": ({"g_idx": torch.full((256,), -1)}, WrongTensor, "have no scales"),
    "other groups": ({"scales": torch.zeros(4, 128)}, WrongTensor, "scales.*belongs to 8 bits"),
    "no scales": ({"scales": None}, MissingTensor, f"{DOWN}scales"),
    "a bias": ({"bias": torch.ones(128)}, UnexpectedTensor, f"{DOWN}bias"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_gptq_are_named(fault: str, tmp_path: Path) -> None:
    write_gptq("Llama", tmp_path, 32)
    changes, kind, message = FAULTS[fault]
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in changes.items():
        is_integer = name in ("qweight", "qzeros", "g_idx")
        found = tensors.pop(DOWN + name)
        if tensor is not None:
            tensors[DOWN + name] = tensor.to(torch.int32 if is_integer else found.dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(kind, match=message):
        read_layer(open_model(tmp_path).store, 1)


@pytest.mark.parametrize("quantization", [{"group_size": "many"}, {"group_size": [1]}, ["gptq"], "gptq"])
def test_a_quantization_that_makes_no_sense(quantization: object, tmp_path: Path) -> None:
    write_gptq("Llama", tmp_path, 32)
    config = json.loads((tmp_path / "config.json").read_text())
    if isinstance(quantization, dict):
        quantization = config["quantization_config"] | quantization
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    with pytest.raises(CheckpointError):
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
    "NF4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "bitsandbytes with 4 bits .nf4, whose table of 16 is not one of integers",
    ),
    "GPTQ with 3 bits": ({"quant_method": "gptq", "bits": 3}, "gptq with 3 bits"),
    "GPTQ in groups of 256": ({"quant_method": "gptq", "bits": 8, "group_size": 256}, "groups of 256"),
    "GPTQ, asymmetric": ({"quant_method": "gptq", "bits": 8, "sym": False}, "gptq.*asymmetric"),
    "Marlin": ({"quant_method": "gptq", "bits": 8, "is_marlin_format": True}, "gptq.*marlin"),
    "GPTQ in bytes": ({"quant_method": "gptq", "bits": 8, "pack_dtype": "int8"}, "gptq.*in int8"),
    "AWQ with 3 bits": ({"quant_method": "awq", "bits": 3}, "awq with 3 bits"),
    "ModelOpt": ({"quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
}


@pytest.mark.parametrize("method", FOREIGN)
def test_other_methods_are_named(method: str, tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_llama, tmp_path / "model")
    quantization, message = FOREIGN[method]
    edit_config(tmp_path / "model", quantization_config=quantization)
    with pytest.raises(
        UnsupportedModel, match=f"{message}.*Use the original, unquantized repository"
    ) as found:
        open_model(tmp_path / "model")
    assert ("nearest is: with --weights int4" in str(found.value)) == (method == "NF4")


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
    with pytest.raises(UnsupportedModel, match=f"{method}.*files hold model.layers.0.mlp.up_proj.{tensor}"):
        open_model(tmp_path / "model")
