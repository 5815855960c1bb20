"""8-bit integers packed into int32 words: four to a word, the first in the lowest byte, each with 128 added.
compressed-tensors' `pack-quantized` packs along the rows of [out_features, in_features], so a little-endian
file has rows of bytes. AutoGPTQ's files (GPTQ: arXiv 2210.17323) are packed along the columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import MissingTensor, WrongTensor
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.quantized.quantization_config import check_quantization, is_second
from penstock.weights.checkpoints.tensor_entry import DTYPES, TensorEntry

#: The bit to flip in an unsigned byte to subtract 128; the result is read as a signed byte.
SIGN_BIT = 0x80


def check_words(entry: TensorEntry) -> None:
    """Raises WrongTensor if a tensor does not hold int32 words in rows."""
    if entry.dtype != "I32" or len(entry.shape) != 2:
        raise WrongTensor(
            f"tensor {entry.name} in {entry.file} has dtype {entry.dtype} and shape {list(entry.shape)}; "
            "packed integers are rows of I32"
        )


def unpacked_entry(entry: TensorEntry) -> TensorEntry:
    """`weight` (INT8 [out_features, in_features]) in place of `weight_packed`. Raises WrongTensor."""
    check_words(entry)
    name, shape = entry.name.removesuffix("_packed"), (entry.shape[0], 4 * entry.shape[1])
    return TensorEntry(name, entry.file, entry.offset, "I8", shape, entry.num_bytes, PackedRows(entry).read)


@dataclass(frozen=True)
class PackedRows:
    """A matrix that is packed along its rows."""

    stored: TensorEntry

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """int8 [stop - start, in_features]."""
        width = 4 * self.stored.shape[1]
        row_bytes = checkpoint.read_stored(self.stored, start * width, stop * width)
        return row_bytes.bitwise_xor_(SIGN_BIT).view(torch.int8).view(stop - start, width)


def check_order(module: str, g_idx: TensorEntry | None, num_groups: int, is_reordered: bool) -> None:
    """Raises MissingTensor if inputs were put into groups out of order (`is_reordered`: config.json says
    desc_act = true), and no tensor says which input is in which of several groups."""
    if is_reordered and g_idx is None and num_groups > 1:
        raise MissingTensor(
            f"{module}g_idx is missing, which says in which group each input is: config.json says desc_act = "
            "true. Download the model again. If its inputs really lie in order, set desc_act to false"
        )


def gptq_entries(checkpoint: Checkpoint) -> Iterator[TensorEntry]:
    """The checkpoint's tensors, with `weight` and `weight_scale` in place of `qweight`, `qzeros`, `scales`
    and `g_idx`; or with a float32 `weight` where the integers can't be kept. Raises MissingTensor and
    WrongTensor."""
    keeps_integers = check_quantization(checkpoint.config) is not None
    quantization = checkpoint.config["quantization_config"]
    # The byte of a zero point of 128: the first version of the format stores each zero point minus one.
    zero = 128 if is_second(quantization) else 127
    is_reordered = bool(quantization.get("desc_act"))
    modules = {name.removesuffix("qweight") for name in checkpoint.entries if name.endswith(".qweight")}
    for module in modules:
        matrix = GptqMatrix.of(checkpoint, module, zero)
        check_order(module, matrix.g_idx, matrix.scales.shape[0], is_reordered)
        stored, scales, shape = matrix.qweight, matrix.scales, matrix.shape
        name, size = f"{module}weight", stored.num_bytes
        if keeps_integers:
            yield TensorEntry(name, stored.file, stored.offset, "I8", shape, size, matrix.read_integers)
            name, by_row, size = f"{name}_scale", scales.shape[::-1], scales.num_bytes
            yield TensorEntry(
                name, scales.file, scales.offset, scales.dtype, by_row, size, matrix.read_scales
            )
        else:
            yield TensorEntry(name, stored.file, stored.offset, "F32", shape, size, matrix.read_floats, True)
    for entry in checkpoint.entries.values():
        module, _, kind = entry.name.rpartition(".")
        if f"{module}." not in modules or kind not in ("qweight", "qzeros", "scales", "g_idx"):
            yield entry


@dataclass(frozen=True)
class GptqMatrix:
    """weight[o, i] = (q[i, o] - zero[g, o]) * scales[g, o] where g = g_idx[i], and zero is 128 everywhere."""

    qweight: TensorEntry  # I32 [in_features / 4, out_features]
    scales: TensorEntry  # floating [num_groups, out_features]
    qzeros: TensorEntry  # I32 [num_groups, out_features / 4]
    g_idx: TensorEntry | None  # I32 [in_features]; None: in order
    zero: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, module: str, zero: int) -> GptqMatrix:
        """Raises MissingTensor and WrongTensor."""
        qweight, scales, qzeros = (
            checkpoint.entry(module + kind) for kind in ("qweight", "scales", "qzeros")
        )
        check_words(qweight)
        check_words(qzeros)
        g_idx = checkpoint.entries.get(f"{module}g_idx")
        num_inputs, num_outputs, num_groups = 4 * qweight.shape[0], qweight.shape[1], qzeros.shape[0]
        expected: list[tuple[TensorEntry, tuple[int, ...]]]
        expected = [(scales, (num_groups, num_outputs)), (qzeros, (num_groups, num_outputs // 4))]
        expected += [(g_idx, (num_inputs,))] if g_idx is not None else []
        is_known = scales.dtype in DTYPES and num_groups > 0 and (g_idx is None or g_idx.dtype == "I32")
        for entry, shape in expected:
            if not is_known or entry.shape != shape or num_inputs % num_groups:
                raise WrongTensor(
                    f"tensor {entry.name} in {entry.file} is {entry.dtype} {list(entry.shape)}, but "
                    f"{list(shape)} belongs to 8 bits and a qweight of {list(qweight.shape)}"
                )
        return cls(qweight, scales, qzeros, g_idx, zero)

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.qweight.shape[1], 4 * self.qweight.shape[0]

    def read_integers(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """int8 [stop - start, in_features]."""
        words = checkpoint.read_columns(self.qweight, 4 * start, 4 * stop).view(torch.int32)
        row_bytes = words.t().contiguous().view(torch.uint8)
        return row_bytes.bitwise_xor_(SIGN_BIT).view(torch.int8)

    def read_scales(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """[stop - start, num_groups] in the dtype of the file. Raises WrongTensor if groups are out of
        order."""
        num_groups, groups = self.scales.shape[0], self._groups(checkpoint)
        if not torch.equal(groups, torch.arange(num_groups).repeat_interleave(self.shape[1] // num_groups)):
            raise WrongTensor(
                f"{self.qweight.name} in {self.qweight.file} has its inputs in groups out of order, though "
                "config.json says desc_act = false; set desc_act to true, and the weights are quantized again"
            )
        return self._scale_rows(checkpoint, start, stop)

    def read_floats(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """float32 [stop - start, in_features]."""
        scales = self._scale_rows(checkpoint, start, stop).float()[:, self._groups(checkpoint)]
        return scales.mul_(self.read_integers(checkpoint, start, stop))

    def _scale_rows(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        zeros = checkpoint.read_stored(self.qzeros, 0, self.qzeros.num_bytes)
        if bool((zeros != self.zero).any()):
            raise WrongTensor(
                f"{self.qzeros.name} in {self.qzeros.file} holds other zero points than 128, so the weights "
                "are not symmetric as config.json says; use the original, unquantized repository"
            )
        dtype = DTYPES[self.scales.dtype]
        stored = checkpoint.read_columns(self.scales, start * dtype.itemsize, stop * dtype.itemsize)
        return stored.view(dtype).t().contiguous()

    def _groups(self, checkpoint: Checkpoint) -> Tensor:
        """The group of each input, int64 [in_features]."""
        num_groups = self.scales.shape[0]
        if self.g_idx is None:
            return torch.arange(num_groups).repeat_interleave(self.shape[1] // num_groups)
        groups = checkpoint.read_stored(self.g_idx, 0, self.g_idx.num_bytes).view(torch.int32).long()
        if bool(((groups < 0) | (groups >= num_groups)).any()):
            raise WrongTensor(
                f"{self.g_idx.name} in {self.g_idx.file} names groups that have no scales; download it again"
            )
        return groups
