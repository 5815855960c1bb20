"""NativeSublayers: parts of a layer in one call of cpu.c, for steps of a few tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.expert_records import padded_rows
from penstock.kernels.experts import ExpertKernels, GatedExpert
from penstock.kernels.kv.clamped import ClampNotice
from penstock.kernels.operands import BatchLayout, GatedFunction, LayerKV, address
from penstock.kernels.sublayers.attention_sublayer import AttentionSublayer, Turns
from penstock.kernels.sublayers.partial_results import MAX_HEAD_DIM, partial_bytes

#: With more tokens the single operations take so long that nothing is saved.
MOST_TOKENS = 16


class NativeSublayers:
    """cpu/sublayers/, called through ctypes."""

    def __init__(
        self, library: Any, activation_bits: int, experts: ExpertKernels, notice: ClampNotice
    ) -> None:
        """`experts` have the same library."""
        self._library = library
        self._activation_bits = activation_bits
        self._experts = experts
        self._notice = notice

    def attend(
        self, sublayer: AttentionSublayer, hidden: Tensor, kv: LayerKV, batch: BatchLayout, turns: Turns
    ) -> tuple[Tensor, Tensor] | None:
        known, (num_tokens, width) = sublayer.native, hidden.shape
        if known is None or num_tokens > MOST_TOKENS or kv.native[4] > MAX_HEAD_DIM:
            return None
        (cos, sin), (head_dim, block_size) = turns, kv.native[4:]
        y = torch.empty(2, num_tokens, width)
        num_floats = num_tokens * known.token_floats + padded_rows(num_tokens) * known.product_bytes // 4
        scratch = torch.empty(num_floats)
        num_rows, num_keys = num_tokens * sublayer.spec.num_heads, batch.native[1] * block_size
        num_partial_bytes = partial_bytes(num_rows, num_keys, head_dim)
        partials = torch.empty(num_partial_bytes // 4) if num_partial_bytes else None
        has_clamped = self._library.penstock_attention_sublayer(
            known.address, hidden.data_ptr(), num_tokens, address(cos), address(sin),
            0 if cos is None else cos.shape[1], batch.slot_mapping.data_ptr(), *kv.native, *batch.native,
            self._activation_bits, y.data_ptr(), scratch.data_ptr(), address(partials),
        )  # fmt: skip
        if has_clamped:
            self._notice.give()
        summed, normed = y.unbind()
        return summed, normed

    def gated_mlp(self, weights: GatedExpert, x: Tensor, function: GatedFunction) -> Tensor | None:
        num_tokens = len(x)
        if weights.native is None or num_tokens > MOST_TOKENS:
            return None
        y = torch.empty(num_tokens, weights.down.out_features)
        self._experts.compute(x, _rows(num_tokens), [(weights, 0, num_tokens)], function, y)
        return y


@cache
def _rows(num_tokens: int) -> Tensor:
    """All rows, in their order."""
    return torch.arange(num_tokens)
