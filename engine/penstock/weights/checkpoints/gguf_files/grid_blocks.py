"""Blocks of GGUF's i-quants below 4 bits -> the arrays of Int4Tensor, without loss.

Blocks are uint8 [num_blocks, bytes] and have 256 inputs. A weight is a magnitude of a grid, with a sign; in a
code, three bits have the number of the magnitude, the fourth the sign. A group's scale is the block's, times
an odd number, times 1/8 or 1/4 in some types. Float32 holds such a part of any float16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.weights.checkpoints.gguf_files.coded_blocks import half
from penstock.weights.checkpoints.gguf_files.grids import even_signs, grid, signs


def iq2_xxs(blocks: Tensor) -> dict[str, Tensor]:
    """For 32 inputs four indices, four times seven signs, and four bits of the scale."""
    parts = blocks[:, 2:66].reshape(-1, 8, 8)
    words = _words(parts[:, :, 4:], torch.int32).view(-1, 8)
    return {
        "codes": _codes(grid("IQ2_XXS")[parts[:, :, :4].int()].flatten(1), _seven_signs(words)),
        "scale": half(blocks, 0).float() / 8,
        "sub_scale": _odd(words >> 28 & 15),
    }


def iq3_xxs(blocks: Tensor) -> dict[str, Tensor]:
    """As iq2_xxs(), with eight indices of four weights for 32 inputs."""
    words = _words(blocks[:, 66:98], torch.int32)
    return {
        "codes": _codes(_pairs(grid("IQ3_XXS")[blocks[:, 2:66].int()]), _seven_signs(words)),
        "scale": half(blocks, 0).float() / 4,
        "sub_scale": _odd(words >> 28 & 15),
    }


def iq3_s(blocks: Tensor) -> dict[str, Tensor]:
    """64 low bytes of indices and their ninth bits, a sign for each weight, four bits of scale per group."""
    index = blocks[:, 2:66].int() | _fields(blocks[:, 66:74], 1) << 8
    return {
        "codes": _codes(_pairs(grid("IQ3_S")[index]), signs()[blocks[:, 74:106].int()]),
        "scale": half(blocks, 0),
        "sub_scale": _odd(_fields(blocks[:, 106:110], 4)),
    }


def iq1_s(blocks: Tensor) -> dict[str, Tensor]:
    """Indices of 11 bits; for 32 inputs three bits of scale, and a bit for the sign of what is added."""
    high = _words(blocks[:, 34:50], torch.int16).int()
    upper = torch.stack([high >> shift & 7 for shift in (0, 3, 6, 9)], dim=2).flatten(1)
    minus = (high >> 15 & 1).repeat_interleave(4, 1) * 255
    return {
        "codes": _codes(grid("IQ1")[blocks[:, 2:34].int() | upper << 8], signs()[minus]),
        "scale": half(blocks, 0).float() / 8,
        "sub_scale": _odd(high >> 12 & 7),
    }


def iq1_m(blocks: Tensor) -> dict[str, Tensor]:
    """As iq1_s(), with a scale for 16 inputs and an addend for 8. The block's scale lies in the upper four
    bits of the four words of scales."""
    nibbles, words = _fields(blocks[:, 32:48], 4), _words(blocks[:, 48:56], torch.int16).int()
    upper = words >> 12 & 15
    bits = upper[:, 0] | upper[:, 1] << 4 | upper[:, 2] << 8 | upper[:, 3] << 12
    scale = bits.to(torch.int16).view(torch.float16)[:, None]
    steps = torch.stack([words >> shift & 7 for shift in (0, 3, 6, 9)], dim=2).flatten(1)
    index = blocks[:, :32].int() | (nibbles & 7) << 8
    return {
        "codes": _codes(grid("IQ1")[index], signs()[(nibbles >> 3) * 255]),
        "scale": scale.float() / 8,
        "sub_scale": _odd(steps),
    }


def iq2_xs(blocks: Tensor) -> dict[str, Tensor]:
    """Words with an index of nine bits and seven signs; four bits of scale for 16 inputs."""
    words = _words(blocks[:, 2:66], torch.int16).int()
    return {
        "codes": _codes(grid("IQ2_XS")[words & 511], even_signs()[words >> 9 & 127]),
        "scale": half(blocks, 0).float() / 8,
        "sub_scale": _odd(_fields(blocks[:, 66:74], 4)),
    }


def iq2_s(blocks: Tensor) -> dict[str, Tensor]:
    """32 low bytes of indices, a sign for each weight, two upper bits of each index, scales as iq2_xs()."""
    index = blocks[:, 2:34].int() | _fields(blocks[:, 66:74], 2) << 8
    return {
        "codes": _codes(grid("IQ2_S")[index], signs()[blocks[:, 34:66].int()]),
        "scale": half(blocks, 0).float() / 8,
        "sub_scale": _odd(_fields(blocks[:, 74:82], 4)),
    }


def _words(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as words. A copy is aligned."""
    return stored.clone(memory_format=torch.contiguous_format).view(dtype)


def _fields(stored: Tensor, width: int) -> Tensor:
    """Fields of so many bits, the lowest of each byte first: int32 [num_blocks, n]."""
    mask = (1 << width) - 1
    return torch.stack([stored.int() >> shift & mask for shift in range(0, 8, width)], dim=2).flatten(1)


def _odd(steps: Tensor) -> Tensor:
    return (2 * steps + 1).to(torch.int8)


def _pairs(words: Tensor) -> Tensor:
    """Words of four codes -> words of eight."""
    return words.contiguous().view(torch.int32)


def _seven_signs(words: Tensor) -> Tensor:
    """Signs for each 8 of 32 inputs: int32 [num_blocks, 32]."""
    return even_signs()[torch.stack([words >> shift & 127 for shift in (0, 7, 14, 21)], dim=2).flatten(1)]


def _codes(magnitudes: Tensor, negative: Tensor) -> Tensor:
    """uint8 [num_blocks, 128], neighbours in a byte."""
    return (magnitudes | negative).view(torch.uint8)
