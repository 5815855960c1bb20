"""MXFP6 (OCP Microscaling Formats 1.0) as compressed-tensors packs it: codes of E2M3, four in three bytes,
the first in the lowest bits, and a power of two for each 32 inputs. Eight times an E2M3 is an integer of at
most 60, so that the matrix is INT8 in groups without loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from penstock.errors import WrongTensor
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.quantized.fp8 import POWERS
from penstock.weights.checkpoints.quantized.kept_int8 import corrupt_scales, int8_entry
from penstock.weights.checkpoints.tensor_entry import TensorEntry

#: Inputs that share a scale.
GROUP = 32
#: The exponent that stands for NaN.
NAN = 255
#: Eight times each code: sign, two bits of exponent (bias 1), three of mantissa.
_MAGNITUDES = [*range(8), *((8 + m) << e for e in range(3) for m in range(8))]
INTEGERS = torch.tensor(_MAGNITUDES + [-number for number in _MAGNITUDES], dtype=torch.int8)


@dataclass(frozen=True)
class Mxfp6:
    """weight[o, i] = E2M3(codes[o, i]) * 2 ** (scale[o, i // 32] - 127)."""

    codes: TensorEntry  # U8 [out_features, in_features * 3 / 4]
    scale: TensorEntry  # U8 [out_features, in_features / 32]
    group_size: ClassVar[int] = GROUP

    @classmethod
    def of(cls, codes: TensorEntry, scale: TensorEntry) -> Mxfp6:
        """Raises WrongTensor."""
        if not is_mxfp6(codes, scale):
            raise WrongTensor(
                f"tensors {codes.name} ({codes.dtype} {list(codes.shape)}) and {scale.name} ({scale.dtype} "
                f"{list(scale.shape)}) in {codes.file} are not MXFP6: 24 bytes and a scale for each {GROUP} "
                "inputs"
            )
        return cls(codes, scale)

    def entry(self, name: str) -> TensorEntry:
        """The matrix under this name."""
        return int8_entry(name, self.codes, (self.codes.shape[0], self.codes.shape[1] // 3 * 4), self)

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> tuple[Tensor, Tensor]:
        width, groups = self.codes.shape[1], self.scale.shape[1]
        stored = checkpoint.read_stored(self.codes, start * width, stop * width).view(-1, 3).int()
        words = stored[:, 0] | stored[:, 1] << 8 | stored[:, 2] << 16
        codes = torch.stack([words >> shift & 63 for shift in (0, 6, 12, 18)], dim=1)
        exponents = checkpoint.read_stored(self.scale, start * groups, stop * groups).view(-1, groups).int()
        if bool((exponents == NAN).any()):
            raise corrupt_scales(self.codes, self.scale)
        return INTEGERS[codes].view(stop - start, -1), POWERS[exponents] / 8


def is_mxfp6(codes: TensorEntry, scale: TensorEntry) -> bool:
    """Whether the shapes of the arrays are those of MXFP6."""
    fits = codes.dtype == scale.dtype == "U8" and len(codes.shape) == len(scale.shape) == 2
    bytes_of_group = GROUP * 3 // 4
    return fits and 0 not in scale.shape and codes.shape == (scale.shape[0], bytes_of_group * scale.shape[1])
