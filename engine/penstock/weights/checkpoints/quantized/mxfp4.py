"""MXFP4 (OCP Microscaling Formats 1.0): codes of E2M1, two in a byte, the first in the low half, and a power
of two for each 32 inputs. gpt-oss has `*_blocks` and `*_scales`, compressed-tensors `weight_packed` and
`weight_scale`: the bytes are the same."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from penstock.errors import WrongTensor
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.int4_form import Int4Form
from penstock.weights.checkpoints.tensor_entry import TensorEntry

#: Inputs that share a scale.
GROUP = 32
#: The scale of each exponent, for twice the values of E2M1. bfloat16 holds all of them.
SCALES = torch.ldexp(torch.ones(256), torch.arange(256) - 128).bfloat16()


@dataclass(frozen=True)
class Mxfp4:
    """A matrix, or one of several that lie one below the other (the experts of a layer)."""

    codes: TensorEntry  # U8 [..., out_features, in_features / 32, 16] or [out_features, in_features / 2]
    scales: TensorEntry  # U8 [..., out_features, in_features / 32]
    first_row: int = 0
    form: ClassVar[Int4Form] = Int4Form(GROUP, "BF16", codebook="mxfp4")

    @classmethod
    def of(cls, codes: TensorEntry, scales: TensorEntry, first_row: int = 0) -> Mxfp4:
        """Raises WrongTensor."""
        found, groups = codes.shape, scales.shape
        fits = len(groups) > 1 and math.prod(groups) > 0 and codes.dtype == scales.dtype == "U8"
        if not fits or found not in ((*groups, GROUP // 2), (*groups[:-1], groups[-1] * (GROUP // 2))):
            raise WrongTensor(
                f"tensors {codes.name} ({codes.dtype} {list(found)}) and {scales.name} ({scales.dtype} "
                f"{list(groups)}) in {codes.file} are not MXFP4: 16 bytes and a scale for each 32 inputs"
            )
        return cls(codes, scales, first_row)

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features of all matrices, in_features)."""
        return math.prod(self.scales.shape[:-1]), GROUP * self.scales.shape[-1]

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> dict[str, Tensor]:
        groups, first, last = self.scales.shape[-1], self.first_row + start, self.first_row + stop
        width = groups * GROUP // 2
        codes = checkpoint.read_stored(self.codes, first * width, last * width).view(-1, width)
        exponents = checkpoint.read_stored(self.scales, first * groups, last * groups).view(-1, groups)
        return {"codes": codes, "scale": SCALES[exponents.int()]}
