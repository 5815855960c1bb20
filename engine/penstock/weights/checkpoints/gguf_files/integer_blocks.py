"""Blocks of GGUF that are integers of at most 8 bits times a scale -> integers (int8 [num_blocks, inputs of a
block]) and scales (floating [num_blocks, groups of a block]), without loss. Blocks are uint8 [num_blocks,
bytes]."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.weights.checkpoints.gguf_files.coded_blocks import half


def q8_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """A scale and 32 signed bytes."""
    return blocks[:, 2:].view(torch.int8), half(blocks, 0)


def q5_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """A scale, the fifth bits of 32 elements, and their other bits. 16 is subtracted."""
    return five_bits(blocks[:, 6:22], blocks[:, 2:6]).view(torch.int8) - 16, half(blocks, 0)


def halves(stored: Tensor, count: int) -> Tensor:
    """For each `count` bytes the low halves, then the high halves: uint8 [num_blocks, 2 n]."""
    parts = stored.reshape(len(stored), -1, count)
    return torch.stack((parts & 15, parts >> 4), dim=2).flatten(1)


def five_bits(stored: Tensor, fifth: Tensor) -> Tensor:
    """32 elements of each block, uint8: four bits as in Q4_0, and a bit of each in four bytes."""
    bits = torch.stack([fifth >> bit & 1 for bit in range(8)], dim=2).flatten(1)
    return halves(stored, 16) | bits << 4
