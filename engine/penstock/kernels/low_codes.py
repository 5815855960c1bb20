"""How codes of 3 and 2 bits lie in bytes. cpu/linear/low_codes.h reads the same.

A row is blocks of 256 inputs in 96 bytes (3 bits) or of 128 inputs in 32 bytes (2 bits). Each 64 inputs of a
block are a pair of slots, first the even inputs, then the odd ones, 32 codes each. With 3 bits the bytes are
three vectors a, b, c of 32: slots 0 to 5 are bits 0 to 2 and 3 to 5 of a, b and c, slot 6 has bits 6 and 7 of
a below bit 6 of b, slot 7 those of c below bit 7 of b. With 2 bits slot i is the bits 2 i and 2 i + 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Bits of the codes of a codebook that has fewer than 4.
CODE_BITS = {"int3": 3, "int2": 2}
#: The largest step by which a group's codes are multiplied, by their bits: a product fits INT8.
MOST_STEPS = {3: 31, 2: 63}
#: Inputs of a block.
BLOCKS = {3: 256, 2: 128}


def row_bytes(in_features: int, bits: int) -> int:
    """Bytes of a row's codes: whole blocks."""
    return -(-in_features // BLOCKS[bits]) * BLOCKS[bits] * bits // 8


def pack_low(codes: Tensor, bits: int) -> Tensor:
    """Codes (uint8 [rows, in_features], a multiple of 32 inputs) -> uint8 [rows, row_bytes()]. What is
    missing of the last block is 0."""
    rows, width = codes.shape
    whole = torch.nn.functional.pad(codes, (0, -width % BLOCKS[bits]))
    slots = whole.view(rows, -1, BLOCKS[bits] // 64, 32, 2).transpose(3, 4).flatten(2, 3)
    each = slots.unbind(2)
    if bits == 2:
        return (each[0] | each[1] << 2 | each[2] << 4 | each[3] << 6).flatten(1)
    a = each[0] | each[1] << 3 | (each[6] & 3) << 6
    b = each[2] | each[3] << 3 | (each[6] & 4) << 4 | (each[7] & 4) << 5
    c = each[4] | each[5] << 3 | (each[7] & 3) << 6
    return torch.stack((a, b, c), 2).flatten(1)


def unpack_low(stored: Tensor, bits: int, in_features: int) -> Tensor:
    """pack_low() backwards: uint8 [rows, in_features]."""
    rows = stored.shape[0]
    if bits == 2:
        slots = [stored.view(rows, -1, 32) >> shift & 3 for shift in (0, 2, 4, 6)]
    else:
        a, b, c = stored.view(rows, -1, 3, 32).unbind(2)
        slots = [each >> shift & 7 for each in (a, b, c) for shift in (0, 3)]
        slots += [a >> 6 | b >> 4 & 4, c >> 6 | b >> 5 & 4]
    pairs = torch.stack(slots, 2).view(rows, -1, len(slots) // 2, 2, 32).transpose(3, 4)
    return pairs.reshape(rows, -1)[:, :in_features]
