"""NVFP4: codes of E2M1, two in a byte, the first in the low half; a scale in E4M3 for each 16 inputs; and a
number in float32 for the whole matrix. ModelOpt has `weight`, `weight_scale` and `weight_scale_2`, by which
it multiplies; compressed-tensors has `weight_packed`, `weight_scale` and `weight_global_scale`, by which it
divides. The codes are kept, in groups of 16 inputs with a scale in float32: that of E2M1 times the number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from penstock.errors import WrongTensor
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.int4_form import Int4Form
from penstock.weights.checkpoints.quantized.compressed_schemes import GLOBAL_SCALE
from penstock.weights.checkpoints.quantized.kept_int8 import corrupt_scales
from penstock.weights.checkpoints.quantized.packed_int4 import int4_entry
from penstock.weights.checkpoints.tensor_entry import TensorEntry

#: Inputs that share a scale.
GROUP = 16
#: What follows a matrix's name in the name of its number: of ModelOpt, of compressed-tensors.
MULTIPLIES, DIVIDES = "_scale_2", GLOBAL_SCALE


@dataclass(frozen=True)
class Nvfp4:
    """weight[o, i] = E2M1(codes[o, i]) * scale[o, i // 16] * number, or divided by the number."""

    codes: TensorEntry  # U8 [out_features, in_features / 2]
    scale: TensorEntry  # F8_E4M3 [out_features, in_features / 16]
    #: F32 of one element; None: it is 1.
    number: TensorEntry | None
    form: ClassVar[Int4Form] = Int4Form(GROUP, "F32", codebook="mxfp4")

    @classmethod
    def of(cls, codes: TensorEntry, scale: TensorEntry, number: TensorEntry | None) -> Nvfp4:
        """Raises WrongTensor."""
        fits = len(codes.shape) == 2 and 0 not in codes.shape and codes.dtype == "U8"
        expected = (*scale.shape[:-1], GROUP // 2 * scale.shape[-1]) if scale.shape else ()
        if not fits or scale.dtype != "F8_E4M3" or codes.shape != expected:
            raise WrongTensor(
                f"tensors {codes.name} ({codes.dtype} {list(codes.shape)}) and {scale.name} ({scale.dtype} "
                f"{list(scale.shape)}) in {codes.file} are not NVFP4: 8 bytes (U8) and a scale (F8_E4M3) for "
                f"each {GROUP} inputs"
            )
        if number is not None and (number.dtype != "F32" or math.prod(number.shape) != 1):
            raise WrongTensor(
                f"tensor {number.name} in {number.file} is {number.dtype} {list(number.shape)}; a matrix of "
                "NVFP4 has one number in float32"
            )
        return cls(codes, scale, number)

    def entry(self, name: str) -> TensorEntry:
        """The matrix under this name."""
        rows, width = self.codes.shape
        return int4_entry(name, self.codes, (rows, 2 * width), self)

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> dict[str, Tensor]:
        width, groups = self.codes.shape[1], self.scale.shape[1]
        codes = checkpoint.read_stored(self.codes, start * width, stop * width).view(-1, width)
        found = checkpoint.read_stored(self.scale, start * groups, stop * groups).view(torch.float8_e4m3fn)
        scales = found.view(-1, groups).float()
        if self.number is not None:
            number = checkpoint.read_stored(self.number, 0, 4).view(torch.float32)
            scales = scales / number if self.number.name.endswith(DIVIDES) else scales * number
        if not bool(torch.isfinite(scales).all()):
            raise corrupt_scales(self.codes, self.scale)
        return {"codes": codes, "scale": scales / 2}  # the table has twice the values of E2M1
