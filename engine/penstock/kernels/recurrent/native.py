"""NativeRecurrences: the recurrences of cpu.c (cpu/recurrence.h), for the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.kernels.operands import BatchLayout, address
from penstock.kernels.recurrent.plain import NO_LIMITS, PlainRecurrences

#: Dimensions of a key that recurrence.h keeps on its stack.
MAX_KEY_DIM = 1024


class NativeRecurrences:
    """The part of NativeKernels that is Recurrences. All tensors are float32 on the CPU. The elements of a
    row of x, q, k and v are contiguous; other tensors are contiguous as a whole, but for a convolution's
    weights."""

    _library: Any

    def short_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: BatchLayout
    ) -> Tensor:
        y = torch.empty(x.shape)
        self._library.penstock_short_conv(
            x.data_ptr(), x.stride(0), x.shape[1], weight.data_ptr(), *weight.stride(), address(bias),
            len(weight), states.data_ptr(), y.data_ptr(), *batch.native_states,
        )  # fmt: skip
        return y

    def recurrence(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor | None,
        states: Tensor,
        batch: BatchLayout,
    ) -> Tensor:
        (_, num_key_heads, key_dim), (_, num_heads, value_dim) = k.shape, v.shape
        if key_dim > MAX_KEY_DIM:  # no model comes near
            return PlainRecurrences().recurrence(q, k, v, decay, beta, states, batch)
        y, decay_dim = torch.empty(v.shape), key_dim if decay.dim() == 3 else 1
        self._library.penstock_recurrence(
            q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0),
            decay.data_ptr(), address(beta), states.data_ptr(), y.data_ptr(),
            num_heads, num_key_heads, key_dim, value_dim, *batch.native_states, decay_dim,
        )  # fmt: skip
        return y

    def decays(
        self,
        x: Tensor,
        bias: Tensor | None,
        a_log: Tensor,
        limits: tuple[float, float] = NO_LIMITS,
        bound: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        steps, decays = torch.empty(x.shape), torch.empty(x.shape)
        num_heads = a_log.numel()
        self._library.penstock_decays(
            x.data_ptr(), x.stride(0), len(x), num_heads, x[0].numel() // num_heads, address(bias),
            a_log.data_ptr(), *limits, bound or 0.0, steps.data_ptr(), decays.data_ptr(),
        )  # fmt: skip
        return steps, decays

    def gates(self, x: Tensor, factor: float = 1.0) -> Tensor:
        y = torch.empty(x.shape)
        self._library.penstock_gates(x.data_ptr(), x.stride(0), *x.shape, factor, y.data_ptr())
        return y
