"""Merged experts: a tensor of three axes that holds a matrix of every expert of a layer, as transformers
keeps experts and as some checkpoints have them. Each expert's rows become a tensor of their own, which is
read without the other experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from penstock.errors import UnsupportedModel, WrongTensor
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.quantized.fp8 import Fp8Rows, TurnedFp8, fp8_group_size, fp8_scale
from penstock.weights.checkpoints.quantized.mxfp4 import Mxfp4
from penstock.weights.checkpoints.quantized.packed_int4 import int4_entry
from penstock.weights.checkpoints.quantized.quantization_config import FP8_DTYPE as FP8
from penstock.weights.checkpoints.quantized.quantization_config import REQUANTIZED, fp8_block
from penstock.weights.checkpoints.tensor_entry import DTYPES, TensorEntry


def separate_experts(
    checkpoint: Checkpoint, merged: str, expert: str, parts: Sequence[str], is_transposed: bool
) -> None:
    """Replace the tensor `merged` by tensors [out_features, in_features] named f"{expert}{number}.{part}".
    The parts lie one after the other on the axis of outputs, and have equal sizes. The tensor is
    [num_experts, out_features, in_features] or, if it is transposed, [num_experts, in_features,
    out_features]. Nothing happens if the checkpoint has no such tensor.

    Raises WrongTensor for a tensor with other axes, and UnsupportedModel for a quantized one.
    """
    whole = checkpoint.entries.get(merged)
    if whole is None:
        return
    if len(whole.shape) != 3 or whole.shape[2 if is_transposed else 1] % len(parts):
        raise WrongTensor(
            f"tensor {merged} in {whole.file} has shape {list(whole.shape)}, where a layer's experts are "
            "needed, with three axes; the config may belong to another model"
        )
    if whole.dtype == FP8:
        separate = _separate_turned_fp8 if is_transposed else _separate_fp8
        separate(checkpoint, whole, expert, parts)
        return
    if whole.decode is not None or whole.dtype not in DTYPES or whole.dtype == "I8":
        raise UnsupportedModel(
            f"tensor {merged} in {whole.file} holds a layer's experts in a quantized form ({whole.dtype}); "
            "Penstock reads FP8 so, and other quantized experts where each expert has tensors of its own: "
            "use the original, unquantized repository"
        )
    del checkpoint.entries[merged]
    split = _columns if is_transposed else _rows
    for number in range(whole.shape[0]):
        for index, part in enumerate(parts):
            entry = split(_slice(whole, number), index, len(parts))
            checkpoint.entries[f"{expert}{number}.{part}"] = replace(entry, name=f"{expert}{number}.{part}")


def _separate_fp8(checkpoint: Checkpoint, whole: TensorEntry, expert: str, parts: Sequence[str]) -> None:
    """The same for a tensor in FP8, whose scales are a tensor of three axes, too, or a number for each
    expert. Raises MissingTensor and WrongTensor."""
    scales = fp8_scale(checkpoint, whole)
    del checkpoint.entries[whole.name], checkpoint.entries[scales.name]
    if scales.shape[:1] != whole.shape[:1]:
        raise WrongTensor(
            f"tensor {scales.name} in {scales.file} has shape {list(scales.shape)}; {whole.name} "
            f"{list(whole.shape)} needs scales for each of its experts"
        )
    block, num_rows = fp8_block(checkpoint.config), whole.shape[1] // len(parts)
    for number in range(whole.shape[0]):
        matrix = Fp8Rows.with_scale(_slice(whole, number), _slice(scales, number), block)
        for index, part in enumerate(parts):
            rows = replace(matrix, first_row=index * num_rows)
            checkpoint.entries[f"{expert}{number}.{part}"] = rows.entry(f"{expert}{number}.{part}", num_rows)
    checkpoint.requantized = checkpoint.requantized or REQUANTIZED


def _separate_turned_fp8(
    checkpoint: Checkpoint, whole: TensorEntry, expert: str, parts: Sequence[str]
) -> None:
    """The same for FP8 with inputs first, as FBGEMM's Llama 4 has it: a scale for each output of each expert,
    [num_experts, out_features], with an axis of one number anywhere. Raises MissingTensor and WrongTensor."""
    scales = fp8_scale(checkpoint, whole)
    num_experts, inputs, outputs = whole.shape
    if [size for size in scales.shape if size > 1] != [n for n in (num_experts, outputs) if n > 1]:
        raise WrongTensor(
            f"tensor {scales.name} in {scales.file} has shape {list(scales.shape)}; {whole.name} "
            f"{list(whole.shape)} needs a scale for each output of each of its experts"
        )
    del checkpoint.entries[whole.name], checkpoint.entries[scales.name]
    flat, width = replace(scales, shape=(num_experts, outputs)), outputs // len(parts)
    for number in range(num_experts):
        for index, part in enumerate(parts):
            turned = TurnedFp8(_slice(whole, number), _slice(flat, number), index * width)
            name = f"{expert}{number}.{part}"
            checkpoint.entries[name] = replace(
                turned.stored, name=name, dtype="F32", shape=(width, inputs), num_bytes=width * inputs,
                decode=turned.read, group_size=fp8_group_size(inputs),
            )  # fmt: skip
    checkpoint.requantized = checkpoint.requantized or REQUANTIZED


def separate_mxfp4_experts(checkpoint: Checkpoint, merged: str, expert: str, part: str) -> None:
    """The same for a tensor in MXFP4, which lies in two, f"{merged}_blocks" and f"{merged}_scales". Raises
    MissingTensor and WrongTensor."""
    if f"{merged}_blocks" not in checkpoint.entries:
        return
    codes, scales = (checkpoint.entry(f"{merged}_{kind}") for kind in ("blocks", "scales"))
    whole = Mxfp4.of(codes, scales)
    num_experts, rows = scales.shape[0], whole.shape[0] // scales.shape[0]
    for name in (codes.name, scales.name):
        del checkpoint.entries[name]
    for number in range(num_experts):
        name, matrix = f"{expert}{number}.{part}", Mxfp4.of(codes, scales, number * rows)
        entry = int4_entry(name, codes, (rows, whole.shape[1]), matrix)
        checkpoint.entries[name] = replace(entry, num_bytes=codes.num_bytes // num_experts)


def rename(checkpoint: Checkpoint, name: str, usual: str) -> None:
    """Give a tensor its usual name, if the checkpoint has the tensor under another one and not under this."""
    found = checkpoint.entries.get(name)
    if found is not None and usual not in checkpoint.entries:
        del checkpoint.entries[name]
        checkpoint.entries[usual] = replace(found, name=usual)


def separate_biases(checkpoint: Checkpoint, merged: str, expert: str, part: str) -> None:
    """The same for the biases of a layer's experts, [num_experts, out_features]. Raises WrongTensor."""
    whole = checkpoint.entries.pop(merged, None)
    if whole is None:
        return
    if len(whole.shape) != 2 or whole.dtype not in DTYPES:
        raise WrongTensor(
            f"tensor {merged} in {whole.file} is {whole.dtype} {list(whole.shape)}, where the biases of a "
            "layer's experts are needed; the config may belong to another model"
        )
    for number in range(whole.shape[0]):
        name = f"{expert}{number}.{part}"
        checkpoint.entries[name] = replace(_slice(whole, number), name=name)


def _slice(whole: TensorEntry, number: int) -> TensorEntry:
    """One expert's matrix, or bias, as the file has it."""
    shape, num_bytes = whole.shape[1:], whole.num_bytes // whole.shape[0]
    return replace(whole, shape=shape, offset=whole.offset + number * num_bytes, num_bytes=num_bytes)


def _rows(matrix: TensorEntry, index: int, count: int) -> TensorEntry:
    """One of `count` equal parts of a matrix's rows."""
    rows, num_bytes = matrix.shape[0] // count, matrix.num_bytes // count
    shape = (rows, matrix.shape[1])
    return replace(matrix, shape=shape, offset=matrix.offset + index * num_bytes, num_bytes=num_bytes)


def _columns(matrix: TensorEntry, index: int, count: int) -> TensorEntry:
    """One of `count` equal parts of a matrix's columns, transposed."""
    item_bytes, width = DTYPES[matrix.dtype].itemsize, matrix.shape[1] // count
    first = index * width

    def decode(checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        columns = checkpoint.read_columns(matrix, (first + start) * item_bytes, (first + stop) * item_bytes)
        found: Tensor = columns.view(DTYPES[matrix.dtype]).t().contiguous()
        return found

    shape, num_bytes = (width, matrix.shape[0]), matrix.num_bytes // count
    return replace(matrix, shape=shape, num_bytes=num_bytes, decode=decode)
