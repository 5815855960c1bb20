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


def two_bits(stored: Tensor) -> Tensor:
    """uint8 [num_blocks, 4 n]: for each 32 bytes the lowest bits of all, then the next."""
    parts = stored.reshape(len(stored), -1, 32)
    return torch.stack([parts >> shift & 3 for shift in (0, 2, 4, 6)], dim=2).flatten(1)


def paired(codes: Tensor) -> Tensor:
    """Codes [num_blocks, n] as pairs in a byte."""
    pairs = codes.view(len(codes), -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


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


def q2_k(blocks: Tensor) -> dict[str, Tensor]:
    """Two bits of each of 256 elements; for each 16 a byte, whose lower half multiplies the scale, and the
    upper half the minimum, which is subtracted."""
    return {
        "codes": paired(two_bits(blocks[:, 16:80])),
        "scale": half(blocks, 80),
        "minimum": half(blocks, 82),
        "sub_scale": (blocks[:, 0:16] & 15).view(torch.int8),
        "sub_minimum": blocks[:, 0:16] >> 4,
    }


def q3_k(blocks: Tensor) -> dict[str, Tensor]:
    """Two bits of each of 256 elements and a third one, which subtracts 4 where it is clear; for each 16
    elements an integer of six bits, from which 32 is subtracted."""
    bits = torch.stack([blocks[:, 0:32] >> bit & 1 for bit in range(8)], dim=1).flatten(1)
    low = torch.cat((blocks[:, 96:104] & 15, blocks[:, 96:104] >> 4), dim=1)
    high = torch.cat([blocks[:, 104:108] >> shift & 3 for shift in (0, 2, 4, 6)], dim=1)
    return {
        "codes": paired(two_bits(blocks[:, 32:96]) + 4 * bits + 4),  # -4 to 3, with 8 added
        "scale": half(blocks, 108),
        "sub_scale": (low | high << 4).view(torch.int8) - 32,
    }


def nvfp4(blocks: Tensor) -> dict[str, Tensor]:
    """E2M1, and for each 16 of 64 elements E4M3 without a sign. Codes stand for twice E2M1, so that the scale
    is half of it. NaN (127) stands for 0."""
    exponent, mantissa = (blocks[:, 0:4] >> 3 & 15).int(), (blocks[:, 0:4] & 7).float()
    fraction = torch.where(exponent > 0, 8 + mantissa, mantissa)
    scales = torch.ldexp(fraction, exponent.clamp(min=1) - 11)  # bias 7, three bits of mantissa, half
    scales = torch.where(blocks[:, 0:4] == 127, 0.0, scales).half()
    return {"codes": neighbours(blocks[:, 4:36], 16), "scale": scales}
