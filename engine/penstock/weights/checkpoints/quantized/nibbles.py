"""Codes of 4 bits, two in a byte, and the order of a matrix's columns."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.config import GROUP_SIZES
from penstock.errors import WrongTensor
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.int4_form import Int4Form
from penstock.weights.checkpoints.tensor_entry import TensorEntry

#: Dtypes that scales may have. With 16 bits, a scale times a zero point is exact in float32.
SCALE_DTYPES = ("F16", "BF16", "F32")
EXACT_SCALE_DTYPES = ("F16", "BF16")


def unpack(stored: Tensor) -> Tensor:
    """uint8 [..., n] -> one code in each byte, the low half first: uint8 [..., 2 n]."""
    wide = stored.to(torch.int16)  # a little-endian machine has the low byte first
    return ((wide << 4) | wide).bitwise_and_(0x0F0F).view(torch.uint8)


def pack(codes: Tensor) -> Tensor:
    """uint8 [..., 2 n], one code in each byte -> uint8 [..., n], the first in the low half."""
    pairs = codes.contiguous().view(torch.int16)
    return ((pairs >> 4) | pairs).to(torch.uint8)


def pack_rows(codes: Tensor) -> Tensor:
    """uint8 [8 n, columns], one code in each byte -> int32 words of eight rows: [n, columns], the first row
    in the lowest bits."""
    by_column = codes.view(-1, 8, codes.shape[1]).transpose(1, 2)
    # A copy: a single column would count as contiguous, and torch would not view it as words.
    return pack(by_column.clone(memory_format=torch.contiguous_format)).view(torch.int32).squeeze(2)


def unpack_rows(words: Tensor) -> Tensor:
    """pack_rows() backwards."""
    by_column = unpack(words.contiguous().unsqueeze(2).view(torch.uint8))
    return by_column.transpose(1, 2).reshape(-1, words.shape[1])


def reorder(codes: Tensor, order: Tensor) -> Tensor:
    """Codes (uint8 [rows, in_features / 2]) with input order[i] in column i."""
    return pack(unpack(codes)[:, order.long()])


def in_groups(
    checkpoint: Checkpoint, codes: Tensor, g_idx: TensorEntry | None, num_groups: int
) -> dict[str, Tensor]:
    """`codes` (uint8 [rows, in_features / 2]) as Int4Tensor has them: the inputs of a group side by side, and
    their `order` where they lie apart, as `g_idx` says. Raises WrongTensor."""
    order = None if g_idx is None else column_order(checkpoint, g_idx, num_groups)
    return {"codes": codes} if order is None else {"codes": reorder(codes, order), "order": order}


def words_form(size: int, scale_dtype: str, has_zero_points: bool, is_permuted: bool = False) -> Int4Form:
    """The form of codes that words hold: with zero points of their own, or with 8 for all."""
    if has_zero_points:
        return Int4Form(size, scale_dtype, 1, "zero_points", "unsigned", is_permuted)
    return Int4Form(size, scale_dtype, is_permuted=is_permuted)


def shared_size(width: int, num_groups: int) -> int:
    """The size of groups in which the scales of `num_groups` groups of a row can be kept: the groups' own, or
    the largest of GROUP_SIZES that divides a larger group, whose scale is repeated. 0: there is none."""
    if not num_groups or not width or width % num_groups:
        return 0
    return next((size for size in reversed(GROUP_SIZES) if width // num_groups % size == 0), 0)


def column_order(checkpoint: Checkpoint, g_idx: TensorEntry, num_groups: int) -> Tensor | None:
    """The inputs of a matrix, group by group: int32 [in_features]. None if they lie so in the matrix.
    `g_idx` (I32 [in_features]) has the group of each input. Raises WrongTensor unless all groups have the
    same number of inputs."""
    groups = checkpoint.read_stored(g_idx, 0, g_idx.num_bytes).view(torch.int32)
    expected = torch.arange(num_groups, dtype=torch.int32).repeat_interleave(len(groups) // num_groups)
    if torch.equal(groups, expected):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], expected):
        raise WrongTensor(
            f"{g_idx.name} in {g_idx.file} does not divide {len(groups)} inputs into {num_groups} groups of "
            "the same size; download it again"
        )
    return order.int()
