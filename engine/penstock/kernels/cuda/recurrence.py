"""CudaRecurrences: the recurrences of recurrence.cu on a GPU."""

from __future__ import annotations

from torch import Tensor

from penstock.kernels.cuda.launcher import THREADS, Launcher, ceil_div
from penstock.kernels.operands import BatchLayout
from penstock.kernels.recurrent.plain import NO_LIMITS, PlainRecurrences

#: Dimensions of a key whose half a thread's registers hold; and those with a decay for each of them.
_IN_REGISTERS, _CHANNELS_IN_REGISTERS = (64, 128, 256), (128,)
#: Dimensions of a key that a block's shared memory holds.
_MAX_KEY_DIM = 1024
#: Columns of a state whose threads are a warp.
_WARP_COLUMNS = 16


class CudaRecurrences:
    """The part of CudaKernels that is Recurrences. All tensors are float32 on the device. The elements of a
    row of x, q, k and v are contiguous; other tensors are contiguous as a whole."""

    _launcher: Launcher

    def short_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: BatchLayout
    ) -> Tensor:
        y, channels = x.new_empty(x.shape), x.shape[1]
        self._launcher.launch(
            "short_conv", (ceil_div(channels, THREADS), batch.num_seqs), THREADS,
            x, x.stride(0), channels, weight.contiguous(), bias, len(weight), states, y, *_sequences(batch),
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
        if key_dim > _MAX_KEY_DIM:  # no model comes near
            return PlainRecurrences().recurrence(q, k, v, decay, beta, states, batch)
        y = v.new_empty(v.shape)
        has_channels = decay.dim() == 3
        known = _CHANNELS_IN_REGISTERS if has_channels else _IN_REGISTERS
        kind = f"{'channels_' if has_channels else ''}{key_dim if key_dim in known else 'any'}"
        columns = min(THREADS // 2, ceil_div(value_dim, _WARP_COLUMNS) * _WARP_COLUMNS)
        self._launcher.launch(
            f"recurrence_{kind}",
            (batch.num_seqs * num_heads, ceil_div(value_dim, columns)), 2 * columns,
            q, q.stride(0), k, k.stride(0), v, v.stride(0), decay, beta, states, y,
            num_heads, num_key_heads, key_dim, value_dim, *_sequences(batch),
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
        return PlainRecurrences().decays(x, bias, a_log, limits, bound)

    def gates(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return PlainRecurrences().gates(x, factor)


def _sequences(batch: BatchLayout) -> tuple[Tensor, ...]:
    """What recurrence.cu calls `sequences`."""
    states = batch.states
    assert states is not None, "the step's sequences have no states"
    return (
        batch.query_start, batch.context_lens, states.slots, states.save_start, states.save_rows,
        states.save_slots,
    )  # fmt: skip
