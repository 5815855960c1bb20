"""Int4Form: how a matrix of codes of 4 bits, or of 3 or 2, lies in arrays. Readers of checkpoints (packed
files of several tools) give these arrays, whatever form their files have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from penstock.kernels.low_codes import CODE_BITS

if TYPE_CHECKING:
    from penstock.weights.checkpoints.checkpoint import Checkpoint

#: How a group's minimum is kept: there is none; as a zero point (uint8), so that the minimum is scale * zero
#: point; or as numbers of their own.
Minima = Literal["none", "zero_points", "numbers"]


@dataclass(frozen=True)
class Int4Form:
    """Equal forms have the same arrays. Int4Tensor (penstock.kernels) says what the arrays mean."""

    group_size: int
    #: The dtype of scales and minima, as safetensors names it: F32, F16 or BF16.
    scale_dtype: str = "BF16"
    #: Groups that share a number in `scale`. With more than one, each group has a sub-scale (int8), and a
    #: sub-minimum (uint8) where there are minima.
    block_groups: int = 1
    minima: Minima = "none"
    codebook: str = "signed"
    #: The columns have an order of their own, so that the inputs of a group lie side by side.
    is_permuted: bool = False
    #: A row is one block: `scale` has its unit, and the sub-scales are steps (quantize_int4.py).
    has_steps: bool = False

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return CODE_BITS.get(self.codebook, 4)

    @property
    def has_scales_for_others(self) -> bool:
        """Whether files have the scales a second time, for other tools."""
        return self.has_steps and self.bits == 4

    @property
    def has_sub_scale(self) -> bool:
        return self.block_groups > 1 or self.has_steps

    @property
    def has_sub_minimum(self) -> bool:
        return self.minima == "zero_points" or (self.minima == "numbers" and self.block_groups > 1)


class Int4Source(Protocol):
    """A matrix of a checkpoint that can be had as codes, without loss."""

    @property
    def form(self) -> Int4Form: ...

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> dict[str, Tensor]:
        """Rows start:stop of each array of the form, by the field's name in Int4Tensor; `order` is whole.
        `codes` are uint8 [rows, in_features / 2]. Raises CorruptFile and WrongTensor."""
