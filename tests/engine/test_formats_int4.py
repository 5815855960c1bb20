"""Checkpoints with 4-bit codes that others wrote: bit for bit the numbers of their own packages or of a plain
twin, whole models against transformers, and clear refusals."""

from __future__ import annotations

import collections
import json
import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_formats_in import SIZES, assert_computes, edit_config, scheme
from tiny_models import build
from torch import Tensor
from units import read_layer

from penstock.errors import CheckpointError, InvalidConfig, MissingTensor, UnsupportedModel, WrongTensor
from penstock.model.known_shapes import find_shape
from penstock.model.registry import find_family, open_model
from penstock.unquantized import UnquantizedModel
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.formats import open_checkpoint
from penstock.weights.checkpoints.quantized.mxfp4 import Mxfp4
from penstock.weights.checkpoints.quantized.packed_int4 import DequantizedRows
from penstock.weights.conversion.convert import convert
from penstock.weights.quantize import quantize
from penstock.weights.store import planned_tensors

Tensors = dict[str, Tensor]


def write_folder(folder: Path, tensors: Tensors, quantization: dict[str, Any]) -> None:
    """A checkpoint that is no model."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))


def read_in_pieces(checkpoint: Checkpoint, name: str, step: int = 5) -> Tensor:
    """A matrix of the checkpoint, some rows at a time."""
    rows = checkpoint.entry(name).shape[0]
    pieces = [checkpoint.read_rows(name, at, min(at + step, rows)) for at in range(0, rows, step)]
    return torch.cat(pieces)


def assert_reads(folder: Path, name: str, expected: Tensor) -> None:
    """That a matrix has these very numbers, whole and in pieces."""
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.entry(name).int4 is not None
        assert torch.equal(checkpoint.read(name), expected)
        assert torch.equal(read_in_pieces(checkpoint, name), expected)


def quantized_model(
    kind: str, folder: Path, pack: Callable[[str, Tensor], tuple[Tensors, Tensor]], **changes: Any
) -> Any:
    """A tiny model whose linear layers (but for the head) `pack` has made tensors of; returns transformers'
    model with the weights that these stand for. `pack` takes and returns [out_features, in_features]."""
    model = build(kind, folder, **(SIZES | changes.pop("sizes", {})))
    tensors = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and (name != "lm_head" or changes.get("lm_head")):
            packed, dequantized = pack(f"{name}.", module.weight.data)
            module.weight.data = dequantized
            del tensors[f"{name}.weight"]
            tensors |= packed
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    edit_config(folder, quantization_config=changes)
    return model


# ---- compressed-tensors


def compressed(
    weight: Tensor, symmetric: bool, group_size: int, g_idx: Tensor | None = None
) -> tuple[Tensors, Tensor]:
    """What compressed-tensors makes of a matrix, and what its decompression makes of this in float32. Codes
    lie in the inputs' own order; g_idx says which group's scale each input has."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import PackedQuantizationCompressor as Compressor
    from compressed_tensors.compressors import pack_to_int32, unpack_from_int32
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams

    size = group_size if group_size > 0 else weight.shape[1]
    kind = {"strategy": "group", "group_size": size} if group_size > 0 else {"strategy": "channel"}
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, **kind)
    kept = QuantizationScheme(targets=["Linear"], weights=weights)
    order = torch.arange(weight.shape[1]) if g_idx is None else torch.argsort(g_idx, stable=True)
    groups = weight[:, order].unflatten(1, (-1, size))
    scale, zero = calculate_qparams(groups.amin(2), groups.amax(2), weights)
    state = {
        "weight": weight[:, order],
        "weight_scale": scale.bfloat16(),
        "weight_zero_point": zero.to(torch.int8),
    }
    made = Compressor.compress(state, kept)
    # Its decompress() fails where the zero points of all rows are in one word.
    integers = unpack_from_int32(made["weight_packed"], 4, weight.shape)
    dense = dequantize(integers, scale.bfloat16().float(), zero, args=weights)
    back = torch.argsort(order)
    made |= {"weight_packed": pack_to_int32(integers[:, back].contiguous(), 4)}
    made |= {"weight_g_idx": g_idx.int()} if g_idx is not None else {}
    return made, dense[:, back]


def packed_config(symmetric: bool, group_size: int, **changes: Any) -> dict[str, Any]:
    kind = {"strategy": "group", "group_size": group_size} if group_size > 0 else {"strategy": "channel"}
    return scheme(num_bits=4, symmetric=symmetric, **kind, **changes) | {"format": "pack-quantized"}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("shape", "group_size"),
    [((1, 96), 32), ((13, 192), 64), ((16, 256), 128), ((7, 96), -1), ((8, 512), 256), ((9, 160), 160)],
)
@pytest.mark.parametrize("ordered", [False, True])
def test_compressed_tensors_matrices(
    shape: tuple[int, int], group_size: int, symmetric: bool, ordered: bool, tmp_path: Path
) -> None:
    torch.manual_seed(shape[0])
    size = group_size if group_size > 0 else shape[1]
    g_idx = torch.arange(shape[1])[torch.randperm(shape[1])] // size if ordered else None
    tensors, expected = compressed(torch.randn(shape) + 0.3, symmetric, group_size, g_idx)
    order = {"actorder": "group"} if ordered else {}
    config = packed_config(symmetric, group_size, **order)
    write_folder(tmp_path, {f"a.{name}": tensor for name, tensor in tensors.items()}, config)
    assert_reads(tmp_path, "a.weight", expected)


@pytest.mark.parametrize(("kernels", "ordered"), [("torch", False), ("reference", True), ("auto", True)])
def test_a_model_of_compressed_tensors(kernels: str, ordered: bool, tmp_path: Path) -> None:
    """Asymmetric; with orders of columns, q, k and v are computed one by one."""
    torch.manual_seed(1)

    def pack(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        width = weight.shape[1]
        g_idx = torch.randperm(width) // 64 if ordered else torch.full((width,), -1)
        tensors, dense = compressed(weight, False, 64, g_idx if ordered else None)
        return {
            name + kind: tensor for kind, tensor in (tensors | {"weight_g_idx": g_idx.int()}).items()
        }, dense

    expected = quantized_model("Qwen2", tmp_path, pack, **packed_config(False, 64, actorder="group"))
    assert_computes(tmp_path, expected, kernels=kernels)


def test_mxfp4_matrices(tmp_path: Path) -> None:
    """compressed-tensors' own, and several matrices of gpt-oss one below the other."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import MXFP4PackedCompressor as Compressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(2)
    arguments = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    weights = QuantizationArgs(**arguments, scale_dtype=torch.uint8)
    kept = QuantizationScheme(targets=["Linear"], weights=weights)
    weight = torch.randn(5, 96)
    scale = torch.exp2(torch.randint(-9, 3, (5, 3)).float())
    made = Compressor.compress({"weight": weight, "weight_scale": scale}, kept)
    expected = Compressor.decompress(dict(made), kept)["weight"].float()
    config = scheme(**arguments) | {"format": "mxfp4-pack-quantized"}
    write_folder(tmp_path, {f"a.{name}": tensor for name, tensor in made.items()}, config)
    assert_reads(tmp_path, "a.weight", expected)
    stored = {"blocks": torch.cat([made["weight_packed"]] * 2).view(2, 5, 3, 16)}
    stored |= {"scales": torch.cat([made["weight_scale"]] * 2).view(2, 5, 3)}
    write_folder(tmp_path, stored, config)
    with Checkpoint.open(tmp_path) as checkpoint:
        matrix = Mxfp4.of(checkpoint.entry("blocks"), checkpoint.entry("scales"), first_row=5)
        read = DequantizedRows(matrix).read
        assert torch.equal(torch.cat([read(checkpoint, 0, 2), read(checkpoint, 2, 5)]), expected)


# ---- GPTQ


def words(codes: Tensor) -> Tensor:
    """Codes [8 n, columns] as int32 words [n, columns], the first in the lowest bits."""
    made = sum(codes[k::8].long() << (4 * k) for k in range(8))
    return torch.where(made < 2**31, made, made - 2**32).to(torch.int32)


def gptq(weight: Tensor, group_size: int, **kind: Any) -> tuple[Tensors, Tensor]:
    """A module as AutoGPTQ saves it, and w = (q - zero) * scale in float32. `kind` are keys of the config."""
    width = weight.shape[1]
    size = group_size if group_size > 0 else width
    g_idx = torch.arange(width) // size
    g_idx = g_idx[torch.randperm(width)] if kind.get("desc_act") else g_idx
    order = torch.argsort(g_idx, stable=True)
    groups = weight[:, order].unflatten(1, (-1, size))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    is_symmetric = kind.get("sym", True)
    scale = (groups.abs().amax(2) / 7 if is_symmetric else (high - low) / 15).half()
    zero = torch.full_like(low, 8) if is_symmetric else (-low / scale.float()).round().clamp(1, 15)
    per_input, zeros = scale.float()[:, g_idx], zero[:, g_idx]
    q = (weight / per_input + zeros).round().clamp(0, 15)
    stored_zero = zero if kind.get("checkpoint_format") == "gptq_v2" else zero - 1
    tensors = {"qweight": words(q.t().int()), "qzeros": words(stored_zero.int()).t(), "scales": scale.t()}
    tensors |= {"g_idx": g_idx.int(), "bias": torch.zeros(len(weight), dtype=torch.float16)}
    return tensors, (q - zeros) * per_input


def gptq_config(group_size: int, **kind: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": group_size} | kind


GPTQ_KINDS: list[dict[str, Any]] = [
    {"sym": True, "checkpoint_format": "gptq"},
    {"sym": False},
    {"sym": True, "checkpoint_format": "gptq_v2", "desc_act": True},
    {"sym": False, "checkpoint_format": "gptq_v2"},
    {"sym": False, "desc_act": True},
]


@pytest.mark.parametrize("kind", GPTQ_KINDS, ids=str)
@pytest.mark.parametrize(
    ("shape", "group_size"),
    [((8, 96), 32), ((24, 192), 64), ((16, 256), 128), ((8, 96), -1), ((8, 512), 256), ((32, 160), -1)],
)
def test_gptq_matrices(shape: tuple[int, int], group_size: int, kind: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(shape[1])
    tensors, expected = gptq(torch.randn(shape) + 0.3, group_size, **kind)
    config = gptq_config(group_size, **kind)
    write_folder(tmp_path, {f"a.{name}": tensor for name, tensor in tensors.items()}, config)
    assert_reads(tmp_path, "a.weight", expected)


@pytest.mark.parametrize(
    ("family", "kind"), [("Llama", GPTQ_KINDS[0]), ("Qwen2", GPTQ_KINDS[4] | {"lm_head": True})], ids=str
)
def test_a_model_of_gptq(family: str, kind: dict[str, Any], tmp_path: Path) -> None:
    """Zero biases beside modules that have none; a head with 4 bits."""

    def pack(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        tensors, dense = gptq(weight, 32, **kind)
        has_bias = family == "Qwen2" and name.rpartition(".")[0][-6] in "qkv"
        tensors.pop("bias") if has_bias else None
        return {name + of: tensor for of, tensor in tensors.items()}, dense

    expected = quantized_model(family, tmp_path, pack, **gptq_config(32, **kind))
    if not kind.get("lm_head"):
        expected.lm_head.weight.data = quantize(expected.lm_head.weight.data).dequantize()
    embedding = expected.model.embed_tokens
    embedding.weight.data = quantize(embedding.weight.data).dequantize()
    assert_computes(tmp_path, expected, is_rounded=True)


# ---- AWQ

#: The output that each of a word's codes belongs to, from the lowest bits (AutoAWQ's order_map).
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)


def awq_words(codes: Tensor) -> Tensor:
    """Codes [rows, 8 n] as int32 words [rows, n]."""
    ordered = codes.unflatten(1, (-1, 8))[:, :, list(AWQ_OUTPUTS)].flatten(1)
    return words(ordered.t()).t()


def awq(weight: Tensor, group_size: int) -> tuple[Tensors, Tensor]:
    """A module as AutoAWQ saves it, and w = (q - zero) * scale in float32."""
    size = group_size if group_size > 0 else weight.shape[1]
    groups = weight.unflatten(1, (-1, size))
    scale = ((groups.amax(2) - groups.amin(2)) / 15).half()
    zero = (-groups.amin(2) / scale.float()).round().clamp(0, 15)
    per_input, zeros = (part.repeat_interleave(size, 1) for part in (scale.float(), zero))
    q = (weight / per_input + zeros).round().clamp(0, 15)
    tensors = {"qweight": awq_words(q.t().int()), "qzeros": awq_words(zero.t().int()), "scales": scale.t()}
    return tensors, (q - zeros) * per_input


def awq_config(group_size: int, **changes: Any) -> dict[str, Any]:
    known = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
    return known | {"group_size": group_size} | changes


@pytest.mark.parametrize(
    ("shape", "group_size"), [((8, 96), 32), ((24, 192), 64), ((16, 256), 128), ((40, 96), -1)]
)
def test_awq_matrices(shape: tuple[int, int], group_size: int, tmp_path: Path) -> None:
    torch.manual_seed(shape[1])
    tensors, expected = awq(torch.randn(shape) + 0.3, group_size)
    assert int(tensors["qzeros"].unique().numel()) > 1
    names = {f"a.{name}": tensor for name, tensor in tensors.items()}
    write_folder(tmp_path, names, awq_config(group_size))
    assert_reads(tmp_path, "a.weight", expected)


def test_a_model_of_awq(tmp_path: Path) -> None:
    def pack(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        tensors, dense = awq(weight, 64)
        return {name + kind: tensor for kind, tensor in tensors.items()}, dense

    expected = quantized_model("Llama", tmp_path, pack, **awq_config(64))
    ids = torch.randint(3, 160, (2, 40), generator=torch.Generator().manual_seed(5))
    computed = UnquantizedModel(open_model(tmp_path)).forward(ids)
    with torch.inference_mode():
        torch.testing.assert_close(computed.logits, expected(ids).logits, atol=1e-4, rtol=1e-4)
    assert_computes(tmp_path, expected)


# ---- FP8


def fp8(weight: Tensor, rows: int, columns: int, dtype: Any = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """E4M3, scales of blocks, and their product in float32."""
    blocks = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    scale = (torch.rand(blocks) / 100 + 0.01).to(dtype)
    whole = scale.float().repeat_interleave(rows, 0)[: len(weight)].repeat_interleave(columns, 1)
    whole = whole[:, : weight.shape[1]]
    stored = (weight / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
    return stored, scale, stored.float() * whole


FP8_CONFIGS: dict[str, tuple[dict[str, Any], tuple[int, int], str]] = {
    "blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, (128, 128), "weight_scale_inv"),
    "uneven blocks": ({"quant_method": "fp8", "weight_block_size": [24, 100]}, (24, 100), "weight_scale_inv"),
    "tensor": ({"quant_method": "modelopt", "quant_algo": "FP8"}, (0, 0), "weight_scale"),
    "rows": ({"quant_method": "fbgemm_fp8"}, (1, 0), "weight_scale"),
    "compressed": (
        scheme(type="float") | {"format": "float-quantized"},
        (1, 0),
        "weight_scale",
    ),
}


@pytest.mark.parametrize("kind", FP8_CONFIGS)
def test_fp8_becomes_int8_in_groups(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, (rows, columns), ending = FP8_CONFIGS[kind]

    def pack(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        stored, scale, dense = fp8(weight, rows or len(weight), columns or weight.shape[1])
        scale = scale.view(()) if kind == "tensor" else scale
        return {f"{name}weight_e4m3": stored, name + ending: scale}, quantize(dense, 128).dequantize()

    expected = quantized_model("Llama", tmp_path, pack, **config)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.replace("_e4m3", ""): tensor for name, tensor in tensors.items()}
    tensors["model.layers.0.mlp.up_proj.input_scale"] = torch.ones(())
    save_file(tensors, tmp_path / "model.safetensors")
    with caplog.at_level(logging.INFO):
        layer = read_layer(open_model(tmp_path).store, 1)
    theirs = expected.model.layers[1]
    assert torch.equal(layer.matrix("down").dequantize(), theirs.mlp.down_proj.weight)
    qkv = [getattr(theirs.self_attn, f"{name}_proj").weight for name in "qkv"]
    assert torch.equal(layer.matrix("qkv").dequantize(), torch.cat(qkv))
    assert "has FP8 weights, which become INT8: quantized again, which loses 0.0" in caplog.text


def test_fp8_of_two_widths_is_converted_in_two_group_sizes(tmp_path: Path) -> None:
    """192 inputs are three groups of 64, and not whole groups of 128. The converted folder has the same
    integers, and its config.json alone says how many bytes each layer takes."""

    def pack(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        stored, scale, dense = fp8(weight, len(weight), weight.shape[1])
        return {f"{name}weight": stored, f"{name}weight_scale": scale.view(())}, dense

    source, target = tmp_path / "fp8", tmp_path / "int8"
    config = {"quant_method": "modelopt", "quant_algo": "FP8"}
    quantized_model("Llama", source, pack, **config, sizes={"hidden_size": 256, "intermediate_size": 192})
    opened = open_model(source)
    convert(opened.store, target)
    found = open_model(target)
    for key in opened.store.units:
        size = max(opened.store.units[key].num_bytes, found.store.units[key].num_bytes)
        buffers = torch.zeros(2, size, dtype=torch.uint8)
        opened.store.read_unit(key, buffers[0])
        found.store.read_unit(key, buffers[1])
        assert torch.equal(buffers[0], buffers[1])
    layer = read_layer(found.store, 1)
    assert [layer.matrix(name).scale.shape[1] for name in ("gate_up", "down")] == [2, 3]
    written = found.store.checkpoint.config
    planned = planned_tensors(found.family.model_tensors(found.spec), written, "int8", None)
    assert planned.units == found.store.tensors.units


# ---- what is refused, and files that make no sense

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "GPTQ, marlin": (gptq_config(128, is_marlin_format=True), "gptq with 4 bits, groups of 128, marlin"),
    "GPTQ, groups of 48": (gptq_config(48), "groups of 48"),
    "GPTQ, fewer than no inputs": (gptq_config(-128), "groups of -128"),
    "AWQ, fewer than no inputs": (awq_config(-64), "groups of -64"),
    "INT4, fewer than no inputs": (
        scheme(num_bits=4, strategy="group", group_size=-64) | {"format": "pack-quantized"},
        "4 bits int per group of -64",
    ),
    "AWQ, gemv": (awq_config(128, version="GEMV"), "awq with 4 bits, version gemv"),
    "AWQ, marlin": (awq_config(128, version="marlin"), "version marlin"),
    "AWQ, exllama": (awq_config(128, version="exllama"), "version exllama"),
    "AWQ, symmetric": (awq_config(128, zero_point=False), "without zero points"),
    "AWQ, llm-awq": (awq_config(128, backend="llm-awq"), "version llm-awq"),
    "groups of 16": (packed_config(True, 16), "4 bits int per group of 16"),
    "marlin-24": (packed_config(True, 128) | {"format": "marlin-24"}, "marlin-24"),
    "INT8 beside INT4": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "a": packed_config(True, 64)["config_groups"]["group_0"],
                "b": scheme()["config_groups"]["group_0"],
            },
        },
        "4 bits int per group of 64; 8 bits int per channel; pack-quantized",
    ),
    "NVFP4 in groups of 32": (
        scheme(num_bits=4, type="float", strategy="group", group_size=32)
        | {"format": "nvfp4-pack-quantized"},
        "nvfp4-pack-quantized",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_layouts_are_named(kind: str, tmp_path: Path) -> None:
    quantization, message = REFUSED[kind]
    write_folder(tmp_path, {"a.weight": torch.zeros(4, 32)}, quantization)
    with pytest.raises(UnsupportedModel, match=f"{message}.*Use the original, unquantized repository"):
        open_checkpoint(tmp_path)


def _gptq_fault(**changes: Tensor | None) -> tuple[Tensors, dict[str, Any]]:
    """Tensors of GPTQ, symmetric, with some of them replaced or left out."""
    torch.manual_seed(4)
    tensors, _ = gptq(torch.randn(16, 96), 32)
    tensors |= {name: tensor for name, tensor in changes.items() if tensor is not None}
    kept = {name: tensor for name, tensor in tensors.items() if changes.get(name, tensor) is not None}
    return kept, gptq_config(32, sym=True)


FAULTS: dict[str, tuple[dict[str, Tensor | None], type[CheckpointError], str]] = {
    "other zero points": ({"qzeros": torch.full((3, 2), 0x66666666).int()}, WrongTensor, '"sym" to false'),
    "zero point 15": ({"qzeros": torch.full((3, 2), -1).int()}, WrongTensor, "zero point 15.*gptq_v2"),
    "groups of other sizes": (
        {"g_idx": torch.tensor([0] * 31 + [1] * 33 + [2] * 32).int()},
        WrongTensor,
        "96 inputs into 3 groups of the same size",
    ),
    "8 bits": ({"g_idx": torch.zeros(48).int()}, WrongTensor, "g_idx.*belongs to 4 bits"),
    "float scales": ({"scales": torch.ones(3, 16).double()}, WrongTensor, "scales.*F64"),
    "no scales": ({"scales": None}, MissingTensor, "a.scales"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault: str, tmp_path: Path) -> None:
    changes, kind, message = FAULTS[fault]
    tensors, config = _gptq_fault(**changes)
    write_folder(tmp_path, {f"a.{name}": tensor for name, tensor in tensors.items()}, config)
    with pytest.raises(kind, match=message), open_checkpoint(tmp_path) as checkpoint:
        checkpoint.read("a.weight")


def test_groups_out_of_order_need_their_order(tmp_path: Path) -> None:
    """Where one group has all inputs, their order is of no importance."""
    for bits, groups, name in ((4, 3, "a"), (4, 1, "b"), (8, 3, "c"), (8, 1, "d")):
        shape = (96 * bits // 32, 16)
        tensors = {
            "a.qweight": torch.zeros(shape).int(),
            "a.scales": torch.ones(groups, 16).half(),
            "a.qzeros": torch.full((groups, 16 * bits // 32), 0x7F7F7F7F if bits == 8 else 0x77777777).int(),
        }
        write_folder(
            tmp_path / name,
            tensors,
            gptq_config(-1 if groups == 1 else 32, bits=bits, sym=True, desc_act=True),
        )
        if groups == 1:
            open_checkpoint(tmp_path / name).close()
            continue
        with pytest.raises(MissingTensor, match=r"a\.g_idx is missing.* set desc_act to false"):
            open_checkpoint(tmp_path / name)


def test_awq_knows_no_groups_of_inputs(tmp_path: Path) -> None:
    tensors, _ = awq(torch.randn(8, 96), 32)
    tensors["g_idx"] = torch.arange(96).flip(0).int() // 32
    write_folder(tmp_path, {f"a.{name}": tensor for name, tensor in tensors.items()}, awq_config(32))
    with pytest.raises(WrongTensor, match="a.g_idx .* which AWQ does not know"):
        open_checkpoint(tmp_path)


def test_a_block_that_is_larger_than_its_matrix(tmp_path: Path) -> None:
    """As many rows as a config claims are no reason to allocate them."""
    stored, scale, expected = fp8(torch.randn(16, 96), 16, 32)
    config = {"quant_method": "fp8", "weight_block_size": [2**50, 32]}
    write_folder(tmp_path, {"a.weight": stored, "a.weight_scale_inv": scale}, config)
    with open_checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read("a.weight"), expected)


@pytest.mark.parametrize("quantization", ["awq", {"quant_method": "awq", "bits": 4, "group_size": "many"}])
def test_a_plan_refuses_configs_without_sense(quantization: Any) -> None:
    family = find_family(config := find_shape("tinyllama-1.1b") | {"quantization_config": quantization})
    tensors = family.model_tensors(family.read_spec(config))
    with pytest.raises(InvalidConfig, match="the quantization_config of config.json makes no sense"):
        planned_tensors(tensors, config, "int8", None)


def good_files() -> Iterator[tuple[Tensors, dict[str, Any]]]:
    """A matrix in each format."""
    torch.manual_seed(6)
    weight = torch.randn(16, 96)
    g_idx = torch.arange(96)[torch.randperm(96)] // 32
    yield compressed(weight, True, 32)[0], packed_config(True, 32)
    yield compressed(weight, False, 32, g_idx)[0], packed_config(False, 32, actorder="group")
    yield gptq(weight, 32, desc_act=True, sym=False)[0], gptq_config(32, desc_act=True, sym=False)
    yield awq(weight, 32)[0], awq_config(32)
    stored, scale, _ = fp8(weight, 8, 32)
    block = {"quant_method": "fp8", "weight_block_size": [8, 32]}
    yield {"weight": stored, "weight_scale_inv": scale}, block
    codes, scales = torch.zeros(16, 48).byte(), torch.full((16, 3), 127).byte()
    kept = scheme(num_bits=4, type="float", strategy="group", group_size=32)
    yield {"weight_packed": codes, "weight_scale": scales}, kept | {"format": "mxfp4-pack-quantized"}
    planes = {"weight_upper": codes, "weight_lower": codes + 1, "weight_scale": torch.ones(16, 1)}
    yield planes, {"penstock": "planes", "version": 1, "group_size": 0}


#: Dtypes of the same size, and what configs hold where nobody expects it.
TWINS = [["I32", "F32", "U32"], ["F16", "BF16", "I16"], ["U8", "I8", "F8_E4M3", "F8_E5M2"], ["I64", "F64"]]
ODD_VALUES = [None, 0, -1, 7, 33, 2**40, "x", [], [0], {}, True, 0.5, [128, 128]]


def mutated(header: dict[str, Any], config: dict[str, Any], rng: random.Random) -> None:
    """Changes the header of a safetensors file, or a config, in place."""
    name, other = rng.choice(sorted(header)), rng.choice(sorted(header))
    entry, kind = header[name], rng.randrange(7)
    if kind == 0:
        entry["dtype"] = rng.choice(next((t for t in TWINS if entry["dtype"] in t), ["F32"]))
    elif kind == 1:
        entry["shape"] = rng.sample(entry["shape"], len(entry["shape"]))
    elif kind == 2:
        entry["shape"] = rng.choice([[math.prod(entry["shape"])], [1, *entry["shape"]], [*entry["shape"], 1]])
    elif kind == 3:
        header[name], header[other] = header[other], entry
    elif kind == 4:
        size = rng.choice([0, 1, 2, 3, 8, 2**40])
        entry["shape"] = [size, *entry["shape"][1:]]
        entry["data_offsets"][1] = entry["data_offsets"][0] if not size else entry["data_offsets"][1]
    elif kind == 5:
        del header[name]
    else:
        groups = config.get("config_groups")
        has_groups = isinstance(groups, dict) and len(groups) > 0
        target = rng.choice([config, groups["group_0"]["weights"]]) if has_groups else config
        target[rng.choice(sorted(target))] = rng.choice(ODD_VALUES)


def test_mutated_headers_are_read_or_refused(tmp_path: Path) -> None:
    results = outcomes(good_files(), tmp_path)
    assert results["read"] > 50 and results["WrongTensor"] > 50, results


def outcomes(files: Iterable[tuple[Tensors, dict[str, Any]]], tmp_path: Path) -> collections.Counter[str]:
    """What becomes of 100 mutations of each file: no other error than ours, and nothing that is larger than
    what the file's bytes can stand for."""
    results = collections.Counter[str]()
    for tensors, config in files:
        write_folder(tmp_path, {f"a.{name}": tensor for name, tensor in tensors.items()}, config)
        raw = (tmp_path / "model.safetensors").read_bytes()
        length = int.from_bytes(raw[:8], "little")
        for seed in range(100):
            header, changed = json.loads(raw[8 : 8 + length]), json.loads(json.dumps(config))
            rng = random.Random(seed)
            for _ in range(rng.choice((1, 1, 2))):
                mutated(header, changed, rng) if header else None
            content = json.dumps(header).encode()
            whole = len(content).to_bytes(8, "little") + content + raw[8 + length :]
            (tmp_path / "model.safetensors").write_bytes(whole)
            (tmp_path / "config.json").write_text(json.dumps({"quantization_config": changed}))
            results[outcome(tmp_path, len(raw))] += 1
    return results


def outcome(folder: Path, num_bytes: int) -> str:
    try:
        with open_checkpoint(folder) as checkpoint:
            for entry in checkpoint.entries.values():
                if entry.decode is not None:
                    assert math.prod(entry.shape) <= 2 * num_bytes
                    read_in_pieces(checkpoint, entry.name) if entry.shape[0] else None
    except CheckpointError as error:
        return type(error).__name__
    return "read"
