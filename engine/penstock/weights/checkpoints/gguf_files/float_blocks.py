"""Blocks of GGUF whose elements are no codes of ours -> float32 [num_blocks, inputs of a block]. Blocks are
uint8 [num_blocks, bytes]."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.weights.checkpoints.gguf_files import integer_blocks
from penstock.weights.checkpoints.gguf_files.coded_blocks import half, scales_and_minima


def q5_1(blocks: Tensor) -> Tensor:
    """As integer_blocks.q5_0(), with a minimum that is added."""
    elements = integer_blocks.five_bits(blocks[:, 8:24], blocks[:, 4:8]).float()
    return elements.mul_(half(blocks, 0).float()).add_(half(blocks, 2).float())


def q5_k(blocks: Tensor) -> Tensor:
    """For each 32 of 256 elements a scale and a minimum as in Q4_K; bit i of 32 bytes is the fifth bit of the
    elements of group i."""
    scales, minima = (part.float() for part in scales_and_minima(blocks[:, 4:16]))
    fifth = torch.stack([blocks[:, 16:48] >> group & 1 for group in range(8)], dim=1)
    elements = (integer_blocks.halves(blocks[:, 48:176], 32).view(-1, 8, 32) | fifth << 4).float()
    elements.mul_((half(blocks, 0).float() * scales)[..., None])
    return elements.sub_((half(blocks, 2).float() * minima)[..., None]).flatten(1)


def q6_k(blocks: Tensor) -> Tensor:
    """For each 16 of 256 elements a signed byte, which multiplies the scale; four bits and two of each
    element."""
    scales = half(blocks, 208).float() * blocks[:, 192:208].view(torch.int8).float()
    high = torch.stack([blocks[:, 128:192].reshape(-1, 2, 32) >> shift & 3 for shift in (0, 2, 4, 6)], dim=2)
    elements = (integer_blocks.halves(blocks[:, :128], 64) | high.flatten(1) << 4).float() - 32
    return elements.view(-1, 16, 16).mul_(scales[..., None]).flatten(1)
