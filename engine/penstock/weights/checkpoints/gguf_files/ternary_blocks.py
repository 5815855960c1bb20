"""Blocks of GGUF with codes of one or two bits, and one scale -> the arrays of Int4Tensor, without loss.
Blocks are uint8 [num_blocks, bytes]. Codes of "signed" tables have 8 added."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.weights.checkpoints.gguf_files.coded_blocks import half, paired, two_bits

#: The integer 0 as a code.
ZERO = 8
#: Inputs of a group of a block of 256, whose scale each of its groups has.
GROUP_OF_256 = 128


def tq1_0(blocks: Tensor) -> dict[str, Tensor]:
    """Digits of base 3: five in each of 48 bytes, four in each of 4. A byte is a fraction of 256, so that
    multiplying by 3 gives the next digit. Digits of one place lie side by side."""
    digits = [_digits(blocks[:, 0:32], 5), _digits(blocks[:, 32:48], 5), _digits(blocks[:, 48:52], 4)]
    return _signed(torch.cat(digits, dim=1), blocks, 52)


def tq2_0(blocks: Tensor) -> dict[str, Tensor]:
    """Two bits of four times 32 inputs in 32 bytes."""
    return _signed(two_bits(blocks[:, 0:64]), blocks, 64)


def q1_0(blocks: Tensor) -> dict[str, Tensor]:
    """A bit for each of 128 inputs: set is 1, clear is -1."""
    bits = torch.stack([blocks[:, 2:18] >> bit & 1 for bit in range(8)], dim=2).flatten(1)
    return {"codes": _packed(2 * bits), "scale": half(blocks, 0)}


def q2_0(blocks: Tensor) -> dict[str, Tensor]:
    """Two bits for each of 64 inputs, neighbours in a byte."""
    pairs = torch.stack([blocks[:, 2:18] >> shift & 3 for shift in (0, 2, 4, 6)], dim=2).flatten(1)
    return {"codes": _packed(pairs), "scale": half(blocks, 0)}


def _digits(stored: Tensor, count: int) -> Tensor:
    powers = [(stored.int() * 3**place & 255) * 3 >> 8 for place in range(count)]
    return torch.cat(powers, dim=1).to(torch.uint8)


def _signed(codes: Tensor, blocks: Tensor, at: int) -> dict[str, Tensor]:
    scale = half(blocks, at).expand(-1, codes.shape[1] // GROUP_OF_256)
    return {"codes": _packed(codes), "scale": scale}


def _packed(codes: Tensor) -> Tensor:
    """Codes that stand for their number minus 1, as pairs in a byte."""
    return paired(codes + (ZERO - 1))
