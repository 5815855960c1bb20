"""Checkpoints in floats of few bits (NVFP4, MXFP4, MXFP6, MXFP8, FP8) as ModelOpt, compressed-tensors and
others write them: bit for bit the numbers of the formats' definitions, which are written here anew."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_formats_in import assert_computes, edit_config, scheme
from test_formats_int4 import (
    Tensors,
    compressed,
    outcomes,
    packed_config,
    quantized_model,
    read_in_pieces,
    write_folder,
)
from tiny_models import build
from torch import Tensor
from units import read_layer

from penstock.errors import CorruptFile, MissingTensor, UnexpectedTensor, WrongTensor
from penstock.kernels import Int4Tensor, QuantizedTensor
from penstock.model.registry import OpenModel, open_model
from penstock.weights.checkpoints.formats import open_checkpoint
from penstock.weights.checkpoints.quantized.module_kinds import lossless_share, module_kinds
from penstock.weights.conversion.convert import convert
from penstock.weights.quantize import quantize
from penstock.weights.store import planned_tensors

#: OCP Microscaling Formats 1.0: a sign, so many bits of exponent and of mantissa, and a bias.
E2M1, E2M3 = (2, 1, 1), (2, 3, 1)


def number(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """A small float by its bits, as the definition has it."""
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) & 1 else 1.0
    exponent, mantissa = code >> mantissa_bits & (1 << exponent_bits) - 1, code & (1 << mantissa_bits) - 1
    fraction = mantissa / (1 << mantissa_bits)
    return sign * (2.0 ** (exponent - bias) * (1 + fraction) if exponent else 2.0 ** (1 - bias) * fraction)


def numbers(codes: Tensor, kind: tuple[int, int, int]) -> Tensor:
    count = 1 << (1 + kind[0] + kind[1])
    return torch.tensor([number(code, *kind) for code in range(count)])[codes.long()]


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes one after the other in a row's bits, the first in the lowest: uint8."""
    ones = torch.stack([codes >> bit & 1 for bit in range(bits)], dim=2).flatten(1).view(len(codes), -1, 8)
    return sum(ones[:, :, bit] << bit for bit in range(8)).to(torch.uint8)  # type: ignore[union-attr]


def random_codes(rows: int, width: int, bits: int) -> Tensor:
    return torch.randint(0, 1 << bits, (rows, width), dtype=torch.int32)


def e4m3(rows: int, groups: int) -> Tensor:
    """Positive scales of all sizes, a zero among them."""
    scale = torch.rand(rows, groups).mul(12).sub(7).exp2().to(torch.float8_e4m3fn)
    scale[0, 0] = 0
    return scale


def nvfp4(rows: int, width: int, divides: bool = False) -> tuple[Tensors, Tensor]:
    """The tensors of a matrix by their endings, and their product in float32."""
    codes, scale = random_codes(rows, width, 4), e4m3(rows, width // 16)
    whole = torch.tensor(1843.7 if divides else 0.00031)
    scales = scale.float() / whole if divides else scale.float() * whole
    dense = numbers(codes, E2M1) * scales.repeat_interleave(16, 1)
    names = ("weight_packed", "weight_global_scale") if divides else ("weight", "weight_scale_2")
    number = whole.view(1) if divides else whole
    return {names[0]: packed(codes, 4), "weight_scale": scale, names[1]: number}, dense


def mx(rows: int, width: int, bits: int, kind: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, exponents, and their product in float32."""
    codes = random_codes(rows, width, bits)
    exponents = torch.randint(110, 130, (rows, width // 32)).to(torch.uint8)
    scales = torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)
    return packed(codes, bits), exponents, (numbers(codes, kind) * scales).float()


def modelopt(algorithm: str, **changes: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]} | changes


def of_floats(bits: int, form: str, **changes: Any) -> dict[str, Any]:
    size = {"strategy": "group", "group_size": 32} | changes
    return scheme(num_bits=bits, type="float", **size) | {"format": form}


NVFP4 = of_floats(4, "nvfp4-pack-quantized", strategy="tensor_group", group_size=16)
MXFP6, MXFP8 = of_floats(6, "mxfp6-pack-quantized"), of_floats(8, "mxfp8-quantized")


def assert_kept(folder: Path, expected: Tensor, group_size: int) -> None:
    """That a matrix has these very numbers, whole and in pieces, and as codes or INT8 and scales, too."""
    with open_checkpoint(folder) as checkpoint:
        assert {"a.weight"} <= set(checkpoint.entries) <= {"a.weight", "a.weight_packed"}
        entry = checkpoint.entry("a.weight")
        if entry.int4 is not None:
            form, arrays = entry.int4.form, entry.int4.read(checkpoint, 0, len(expected))
            assert form.group_size == group_size
            codes = Int4Tensor(group_size=group_size, codebook=form.codebook, **arrays)
            assert torch.equal(codes.dequantize(), expected)
        else:
            assert entry.int8 is not None and entry.int8.group_size == group_size
            integers, scales = entry.int8.read(checkpoint, 0, len(expected))
            assert torch.equal(integers * scales.repeat_interleave(group_size, 1), expected)
        assert torch.equal(checkpoint.read("a.weight"), expected)
        assert torch.equal(read_in_pieces(checkpoint, "a.weight"), expected)


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("shape", [(1, 16), (13, 96), (7, 160)])
def test_nvfp4_is_kept(shape: tuple[int, int], divides: bool, tmp_path: Path) -> None:
    torch.manual_seed(shape[0])
    tensors, expected = nvfp4(*shape, divides)
    tensors["input_global_scale" if divides else "input_scale"] = torch.ones(1)
    config = NVFP4 if divides else modelopt("NVFP4")
    write_folder(tmp_path, {f"a.{name}": tensor for name, tensor in tensors.items()}, config)
    assert_kept(tmp_path, expected, 16)


def test_mxfp6_is_kept(tmp_path: Path) -> None:
    torch.manual_seed(4)
    codes, exponents, expected = mx(9, 96, 6, E2M3)
    write_folder(tmp_path, {"a.weight_packed": codes, "a.weight_scale": exponents}, MXFP6)
    assert_kept(tmp_path, expected, 32)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp6", "mxfp8"])
def test_the_package_reads_the_same(kind: str, tmp_path: Path) -> None:
    """Where its numbers are exact: it computes in bfloat16."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    torch.manual_seed(5)
    kept = preset_name_to_scheme(f"{kind.upper()}A16", ["Linear"])
    if kind == "nvfp4":
        tensors, _ = nvfp4(8, 96, divides=True)
        tensors["weight_global_scale"] = torch.tensor([256.0])
        config, name = NVFP4, "NVFP4PackedCompressor"
    elif kind == "mxfp6":
        codes, exponents, _ = mx(8, 96, 6, E2M3)
        tensors, config, name = (
            {"weight_packed": codes, "weight_scale": exponents},
            MXFP6,
            "MXFP6PackedCompressor",
        )
    else:
        tensors, _ = mxfp8(8, 96)
        config, name = MXFP8, "MXFP8QuantizationCompressor"
    theirs = getattr(compressors, name).decompress(dict(tensors), kept)["weight"]
    write_folder(tmp_path, {f"a.{name}": tensor for name, tensor in tensors.items()}, config)
    with open_checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read("a.weight").bfloat16(), theirs.bfloat16())


# ---- FP8


def stored_e4m3(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 of a matrix, and its product with the scales of each element."""
    stored = (weight / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return stored, stored.float() * scales


def mxfp8(rows: int, width: int) -> tuple[Tensors, Tensor]:
    exponents = torch.randint(115, 125, (rows, width // 32)).to(torch.uint8)
    scales = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    stored, dense = stored_e4m3(torch.randn(rows, width), scales)
    return {"weight": stored, "weight_scale": exponents}, dense


def blocks(shape: tuple[int, int], size: int) -> tuple[Tensor, Tensor]:
    """Scales of blocks, and those of each element."""
    scale = torch.rand(-(-shape[0] // size), -(-shape[1] // size)) / 50 + 0.01
    each = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)
    return scale, each[: shape[0], : shape[1]]


SHAPE = (160, 192)
ROWS = torch.linspace(0.01, 0.02, SHAPE[0]).view(-1, 1)


def _block(to_stored: Callable[[Tensor], Tensor], size: int = 128) -> Callable[[], tuple[Tensor, Tensor]]:
    def scales() -> tuple[Tensor, Tensor]:
        scale, each = blocks(SHAPE, size)
        return to_stored(scale), each

    return scales


def _exponents() -> tuple[Tensor, Tensor]:
    exponents = torch.randint(115, 125, (2, 2)).to(torch.uint8)
    each = torch.exp2(exponents.float() - 127).repeat_interleave(128, 0).repeat_interleave(128, 1)
    return exponents.view(torch.float8_e8m0fnu), each[:160, :192]


def _groups() -> tuple[Tensor, Tensor]:
    scale = torch.rand(160, 3).bfloat16() / 50 + 0.01
    return scale, scale.float().repeat_interleave(64, 1)


#: quantization_config, the name of the scales, and what makes the scales and those of each element.
LAYOUTS: dict[str, tuple[dict[str, Any], str, Callable[[], tuple[Tensor, Tensor]]]] = {
    "DeepSeek's blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]}, "weight_scale_inv", _block(lambda s: s)
    ),
    "blocks in exponents": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}, "scale", _exponents
    ),
    "ModelOpt's blocks of four axes": (
        modelopt("fp8_pb_wo"), "weight_scale", _block(lambda s: s.view(2, 1, 2, 1))
    ),
    "compressed-tensors' blocks": (
        scheme(num_bits=8, type="float", strategy="block", block_structure=[64, 64])
        | {"format": "float-quantized"}, "weight_scale", _block(lambda s: s.bfloat16().float(), 64)
    ),
    "compressed-tensors' groups": (
        scheme(num_bits=8, type="float", strategy="group", group_size=64) | {"format": "float-quantized"},
        "weight_scale", _groups,
    ),
    "a tensor, static": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        "weight_scale_inv", lambda: (torch.tensor(0.0131), torch.full((1, 1), 0.0131)),
    ),
    "a tensor, ModelOpt": (
        modelopt("FP8"), "weight_scale", lambda: (torch.tensor([0.02]), torch.full((1, 1), 0.02))
    ),
    "rows, ModelOpt": (modelopt("FP8_PER_CHANNEL_PER_TOKEN"), "weight_scale", lambda: (ROWS[:, 0], ROWS)),
    "rows, FBGEMM": ({"quant_method": "fbgemm_fp8"}, "weight_scale", lambda: (ROWS, ROWS)),
    "rows, compressed-tensors": (
        scheme(num_bits=8, type="float") | {"format": "float-quantized"}, "weight_scale", lambda: (ROWS, ROWS)
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_of_fp8(layout: str, tmp_path: Path) -> None:
    config, ending, make = LAYOUTS[layout]
    torch.manual_seed(6)
    scale, each = make()
    if layout == "compressed-tensors' blocks":
        scale, each = scale, scale.repeat_interleave(64, 0).repeat_interleave(64, 1)[:160, :192]
    stored, expected = stored_e4m3(torch.randn(SHAPE), each)
    tensors = {"a.weight": stored, f"a.{ending}": scale}
    tensors |= {f"a.{name}": torch.ones(1) for name in ("input_scale", "activation_scale")}
    tensors |= {f"a.{name}_scale": torch.ones(()) for name in "kvq"}
    write_folder(tmp_path, tensors, config)
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.entries) == {"a.weight"}
        assert torch.equal(checkpoint.read("a.weight"), expected)
        assert torch.equal(read_in_pieces(checkpoint, "a.weight", 37), expected)


def test_fp4_among_fp8_is_kept(tmp_path: Path) -> None:
    """DeepSeek V4's experts: MXFP4 with the names of FP8."""
    torch.manual_seed(5)
    codes, exponents, expected = mx(9, 96, 4, E2M1)
    tensors = {"a.weight": codes.view(torch.int8), "a.scale": exponents.view(torch.float8_e8m0fnu)}
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write_folder(tmp_path, tensors, config)
    assert_kept(tmp_path, expected, 32)
    kind_of = module_kinds({"quantization_config": config, "expert_dtype": "fp4"})
    names = ("layers.3.ffn.experts.7.w1", "layers.3.ffn.shared_experts.w1", "layers.3.attn.wq_a")
    assert [kind and kind.name for kind in map(kind_of, names)] == ["mxfp4", "fp8", "fp8"]


@pytest.mark.parametrize("is_modelopt", [False, True])
def test_mxfp8_becomes_int8_in_its_groups(is_modelopt: bool, tmp_path: Path) -> None:
    torch.manual_seed(7)
    tensors, expected = mxfp8(9, 96)
    config = modelopt("MXFP8") if is_modelopt else MXFP8
    write_folder(tmp_path, {f"a.{name}": tensor for name, tensor in tensors.items()}, config)
    with open_checkpoint(tmp_path) as checkpoint:
        assert torch.equal(read_in_pieces(checkpoint, "a.weight"), expected)
        assert checkpoint.entry("a.weight").group_size == 32
        assert checkpoint.requantized


# ---- whole models


def test_a_model_of_modelopts_nvfp4(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Modules that config.json leaves out are floats, and become INT8 as an unquantized checkpoint's; scales
    of keys and values are named, and not used. Converted, the folder has the same integers."""
    left_out = ("model.layers.0.self_attn", "lm_head")

    def pack(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        if name.startswith(left_out):
            return {f"{name}weight": weight}, quantize(weight).dequantize()
        tensors, dense = nvfp4(*weight.shape)
        tensors["input_scale"] = torch.tensor(0.1)
        return {name + ending: tensor for ending, tensor in tensors.items()}, dense

    config = modelopt("NVFP4", ignore=list(left_out), kv_cache_scheme={"num_bits": 8, "type": "float"})
    torch.manual_seed(8)
    expected = quantized_model("Qwen2", tmp_path / "model", pack, **config)
    file = tmp_path / "model" / "model.safetensors"
    scales = {f"model.layers.0.self_attn.{of}_proj.{of}_scale": torch.ones(()) for of in "kv"}
    save_file(load_file(file) | scales, file)
    with caplog.at_level(logging.INFO):
        opened = open_model(tmp_path / "model")
    assert "keys and values" in caplog.text
    layer, theirs = read_layer(opened.store, 1), expected.model.layers[1]
    assert layer.matrix("down").scale.shape == (128, 16)
    assert torch.equal(layer.matrix("down").dequantize(), theirs.mlp.down_proj.weight)
    assert read_layer(opened.store, 0).matrix("o").scale.dim() == 1
    convert(opened.store, tmp_path / "converted")
    again = read_layer(open_model(tmp_path / "converted").store, 1).matrix("down")
    assert isinstance(again, Int4Tensor) and torch.equal(again.codes, layer.matrix("down").codes)
    assert torch.equal(again.dequantize(), layer.matrix("down").dequantize())
    assert_computes(tmp_path / "model", expected)
    assert_planned(opened)


def assert_planned(opened: OpenModel) -> None:
    """That config.json alone tells how many bytes each unit takes."""
    tensors = planned_tensors(
        opened.family.model_tensors(opened.spec), opened.store.checkpoint.config, "int8", None
    )
    assert [unit.num_bytes for unit in tensors.units] == [
        unit.num_bytes for unit in opened.store.tensors.units
    ]
    assert tensors.head == opened.store.tensors.head
    share = lossless_share(opened.store.checkpoint.config, tensors)
    assert share == pytest.approx(opened.store.lossless_share) and 0 < share < 1


def test_a_plan_of_4_bits_knows_what_is_left_out(tmp_path: Path) -> None:
    """Experts alone, in groups of 32, as Kimi's are trained: attention and others are floats."""

    def pack(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        if "mlp" not in name:
            return {f"{name}weight": weight}, weight
        tensors, dense = compressed(weight, True, 32)
        return {name + ending: tensor for ending, tensor in tensors.items()}, dense

    config = packed_config(True, 32, targets=["Linear"]) | {"ignore": ["lm_head", "re:.*self_attn.*"]}
    quantized_model("Llama", tmp_path, pack, **config)
    opened = open_model(tmp_path)
    assert isinstance(read_layer(opened.store, 0).matrix("o"), QuantizedTensor)
    assert_planned(opened)


def test_a_model_that_mixes_algorithms(tmp_path: Path) -> None:
    """Attention in FP8, the rest in NVFP4 or MXFP4: each matrix is told by its tensors."""

    def pack(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        if "self_attn" in name:
            stored, dense = stored_e4m3(weight, torch.tensor(0.01))
            tensors = {"weight_f8": stored, "weight_scale": torch.tensor(0.01)}
            return {name + ending: one for ending, one in tensors.items()}, quantize(dense, 128).dequantize()
        if "down" in name:
            codes, exponents, dense = mx(*weight.shape, 4, E2M1)
            return {f"{name}weight": codes, f"{name}weight_scale": exponents}, dense
        tensors, dense = nvfp4(*weight.shape)
        return {name + ending: one for ending, one in tensors.items()}, dense

    layers = {f"model.layers.{i}.mlp.down_proj": {"quant_algo": "W4A8_MXFP4_FP8"} for i in range(3)}
    layers |= {f"model.layers.{i}.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16} for i in range(3)}
    layers |= {f"model.layers.{i}.mlp.gate_proj": {"quant_algo": "NVFP4", "group_size": 16} for i in range(3)}
    layers |= {
        f"model.layers.{i}.self_attn.{n}_proj": {"quant_algo": "FP8"} for i in range(3) for n in "qkvo"
    }
    torch.manual_seed(9)
    config = modelopt("MIXED_PRECISION", quant_method="modelopt_mixed", quantized_layers=layers)
    expected = quantized_model("Llama", tmp_path, pack, **config)
    file = tmp_path / "model.safetensors"
    tensors = {name.replace("_f8", ""): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    opened = open_model(tmp_path)
    layer, theirs = read_layer(opened.store, 2), expected.model.layers[2]
    for name, matrix in (("down", theirs.mlp.down_proj), ("o", theirs.self_attn.o_proj)):
        assert torch.equal(layer.matrix(name).dequantize(), matrix.weight)
    both = torch.cat([theirs.mlp.gate_proj.weight, theirs.mlp.up_proj.weight])
    assert torch.equal(layer.matrix("gate_up").dequantize(), both)
    assert_planned(opened)


def test_inputs_that_awq_scales(tmp_path: Path) -> None:
    """NVFP4_AWQ multiplies a module's inputs: y = W (x * s)."""
    torch.manual_seed(10)
    tensors, dense = nvfp4(9, 96)
    tensors["pre_quant_scale"] = torch.rand(96).bfloat16() + 0.5
    write_folder(tmp_path, {f"a.{name}": tensor for name, tensor in tensors.items()}, modelopt("NVFP4_AWQ"))
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.entries) == {"a.weight"} and checkpoint.entry("a.weight").int8 is None
        found = checkpoint.read("a.weight")
        assert "pre_quant_scale" in checkpoint.requantized
    x = torch.randn(4, 96, dtype=torch.float64)
    expected = (x * tensors["pre_quant_scale"].double()) @ dense.double().t()
    torch.testing.assert_close(x @ found.double().t(), expected, rtol=1e-6, atol=1e-6)


# ---- what is wrong


FAULTS: dict[str, tuple[str, Callable[[Tensor], Tensor | None], type[Exception], str]] = {
    "scales of NaN": ("weight_scale", lambda s: (s.float() / 0).to(s.dtype), CorruptFile, "NaN"),
    "groups of 32": ("weight_scale", lambda s: s[:, ::2].clone(), WrongTensor, "not NVFP4.*each 16 inputs"),
    "scales in floats": ("weight_scale", lambda s: s.float(), WrongTensor, "F32.*not NVFP4"),
    "no scales": ("weight_scale", lambda s: None, MissingTensor, "a.weight_scale"),
    "no number": ("weight_scale_2", lambda s: None, MissingTensor, "a.weight_scale_2"),
    "a number for each row": ("weight_scale_2", lambda s: s.expand(9).clone(), WrongTensor, "one number"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault: str, tmp_path: Path) -> None:
    name, change, kind, message = FAULTS[fault]
    torch.manual_seed(11)
    tensors, _ = nvfp4(9, 96)
    changed = change(tensors.pop(name))
    tensors |= {} if changed is None else {name: changed}
    write_folder(tmp_path, {f"a.{each}": tensor for each, tensor in tensors.items()}, modelopt("NVFP4"))
    with pytest.raises(kind, match=message), open_checkpoint(tmp_path) as checkpoint:
        checkpoint.read("a.weight")


def test_mutated_headers_are_read_or_refused(tmp_path: Path) -> None:
    torch.manual_seed(12)
    codes, exponents, _ = mx(16, 96, 6, E2M3)
    scaled = nvfp4(16, 96)[0] | {"pre_quant_scale": torch.ones(96)}
    stored, _ = stored_e4m3(torch.randn(160, 192), torch.ones(160, 192))
    files = [
        (nvfp4(16, 96)[0], modelopt("NVFP4")),
        (nvfp4(16, 96, divides=True)[0], NVFP4),
        (scaled, modelopt("NVFP4_AWQ")),
        ({"weight_packed": codes, "weight_scale": exponents}, MXFP6),
        (mxfp8(16, 96)[0], MXFP8),
        ({"weight": stored, "weight_scale": torch.ones(2, 1, 2, 1)}, modelopt("FP8_PB_WO")),
    ]
    results = outcomes(files, tmp_path)
    assert results["read"] > 50 and results["WrongTensor"] > 50, results


def test_what_nobody_knows_of_a_module_is_refused(tmp_path: Path) -> None:
    """A pre_quant_scale beside FP8 would change answers if it were left out."""
    build("Llama", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.mlp.up_proj.pre_quant_scale": torch.ones(128)}, file)
    edit_config(tmp_path, quantization_config=modelopt("FP8"))
    with pytest.raises(UnexpectedTensor, match="pre_quant_scale"):
        open_model(tmp_path)
