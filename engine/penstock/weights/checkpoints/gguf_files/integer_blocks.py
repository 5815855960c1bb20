"""Blocks of GGUF that are integers of at most 8 bits times a scale -> integers (int8 [num_blocks, inputs of a
block]) and scales (floating [num_blocks, groups of a block]), without loss. Blocks are uint8 [num_blocks,
bytes]."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.int4_tensor import CODEBOOKS
from penstock.weights.checkpoints.gguf_files.coded_blocks import half
from penstock.weights.checkpoints.gguf_files.ternary_blocks import GROUP_OF_256, two_bits


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


def q3_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Two bits of each of 256 elements and a third one, which subtracts 4 where it is clear; for each 16
    elements an integer of six bits, from which 32 is subtracted. Both integers together are from -124 to 128.
    So the scale's sign is changed, and with it theirs."""
    bits = torch.stack([blocks[:, 0:32] >> bit & 1 for bit in range(8)], dim=1).flatten(1)
    elements = two_bits(blocks[:, 32:96]).to(torch.int16) + 4 * bits.to(torch.int16) - 4
    low = torch.cat((blocks[:, 96:104] & 15, blocks[:, 96:104] >> 4), dim=1)
    high = torch.cat([blocks[:, 104:108] >> shift & 3 for shift in (0, 2, 4, 6)], dim=1)
    steps = (low | high << 4).to(torch.int16) - 32
    integers = elements.view(-1, 16, 16) * -steps[..., None]
    return integers.flatten(1).to(torch.int8), -half(blocks, 108).expand(-1, 256 // GROUP_OF_256)


def nvfp4(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """E2M1 times 2, and for each 16 of 64 elements E4M3 without a sign; half of that is their scale. NaN
    (127) stands for 0."""
    codes = halves(blocks[:, 4:36], 8)
    table = torch.tensor(CODEBOOKS["mxfp4"], dtype=torch.int8)
    exponent, mantissa = (blocks[:, 0:4] >> 3 & 15).int(), (blocks[:, 0:4] & 7).float()
    fraction = torch.where(exponent > 0, 8 + mantissa, mantissa)
    scales = torch.ldexp(fraction, exponent.clamp(min=1) - 11)  # bias 7, three bits of mantissa, half
    return table[codes.int()], torch.where(blocks[:, 0:4] == 127, 0.0, scales)
