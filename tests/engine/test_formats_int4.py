"""Checkpoints with 4-bit codes that others wrote: bit for bit the numbers of their own packages or of a plain
twin, whole models against transformers, and clear refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_formats_in import SIZES, assert_computes, edit_config, scheme
from tiny_models import build
from torch import Tensor

from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.formats import open_checkpoint

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
    model with the weights that the tensors stand for. `pack` takes and returns [out_features, in_features]."""
    model = build(kind, folder, **SIZES)
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
    """What compressed-tensors makes of a matrix, and what its decompression makes of this in float32. Codes lie
    in the inputs' own order; g_idx says which group's scale each input has."""
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


@pytest.mark.parametrize(("kernels", "ordered"), [("torch", False), ("reference", True), ("torch", True)])
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
