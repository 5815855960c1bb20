"""Blocks of GGUF whose elements are 4-bit codes -> the arrays of Int4Tensor, without loss.

Blocks are uint8 [num_blocks, bytes]. In a byte, the low half belongs to an input of the first half of a
stretch (32 inputs, or 64 in K-quants), the high half to the input half a stretch behind. Int4Tensor has
neighbours in a byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.weights.checkpoints.quantized.mxfp4 import SCALES


def half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at a byte of each block: [num_blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def neighbours(stored: Tensor, stretch: int) -> Tensor:
    """Bytes with codes of inputs half a stretch apart -> bytes with codes of neighbours. [num_blocks, n]."""
    # Words of 16 bits are several times as fast as every second byte. A copy is aligned, one block alone may
    # not be.
    aligned = stored.clone(memory_format=torch.contiguous_format)
    pairs = aligned.view(torch.int16).view(len(stored), -1, stretch // 4)
    shifted = pairs >> 4
    first = (pairs & 15).bitwise_or_(shifted & 0xF0)
    second = (pairs >> 8).bitwise_and_(0xF0).bitwise_or_(shifted.bitwise_and_(15))
    return torch.cat((first.to(torch.uint8), second.to(torch.uint8)), dim=2).flatten(1)


def scales_and_minima(stored: Tensor) -> tuple[Tensor, Tensor]:
    """The 6-bit numbers of a block of Q4_K or Q5_K (12 bytes): two times uint8 [num_blocks, 8]. The first
    four of each lie in six bits of a byte; of the others, four bits lie in the last bytes and two above the
    first ones."""
    scales, minima, rest = stored[:, 0:4], stored[:, 4:8], stored[:, 8:12]
    return (
        torch.cat((scales & 63, (rest & 15) | (scales >> 2 & 0x30)), dim=1),
        torch.cat((minima & 63, (rest >> 4) | (minima >> 2 & 0x30)), dim=1),
    )


def q4_0(blocks: Tensor) -> dict[str, Tensor]:
    """Also IQ4_NL, whose codes have another table."""
    return {"codes": neighbours(blocks[:, 2:18], 32), "scale": half(blocks, 0)}


def q4_1(blocks: Tensor) -> dict[str, Tensor]:
    codes = neighbours(blocks[:, 4:20], 32)
    return {"codes": codes, "scale": half(blocks, 0), "minimum": -half(blocks, 2)}


def q4_k(blocks: Tensor) -> dict[str, Tensor]:
    scales, minima = scales_and_minima(blocks[:, 4:16])
    return {
        "codes": neighbours(blocks[:, 16:144], 64),
        "scale": half(blocks, 0),
        "minimum": half(blocks, 2),
        "sub_scale": scales.view(torch.int8),
        "sub_minimum": minima,
    }


def iq4_xs(blocks: Tensor) -> dict[str, Tensor]:
    """A group's integer has six bits, from which 32 is subtracted: two in the third and fourth byte, four in
    the next four."""
    high = torch.stack([blocks[:, 2 + byte] >> shift & 3 for byte in (0, 1) for shift in (0, 2, 4, 6)], dim=1)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=2).flatten(1)
    return {
        "codes": neighbours(blocks[:, 8:136], 32),
        "scale": half(blocks, 0),
        "sub_scale": (low | high << 4).view(torch.int8) - 32,
    }


def mxfp4(blocks: Tensor) -> dict[str, Tensor]:
    return {"codes": neighbours(blocks[:, 1:17], 32), "scale": SCALES[blocks[:, :1].int()]}
