"""Recurrences in plain torch: what each token of a sequence makes of the state that the token before it left.

The rows of a sequence are computed one after the other, each in the same way, whatever the chunk is. The
parallel forms that transformers uses for prompts add in an order that depends on the chunk, so they would
give other bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.operands import BatchLayout

#: Of the steps of decays.
NO_LIMITS = (0.0, math.inf)


class Run(NamedTuple):
    """The rows of a sequence in a step."""

    rows: range
    #: Where the sequence's state lies.
    slot: int
    #: The sequence's tokens before these rows. Without any, the state before the rows is zero.
    past: int
    #: Row -> the slots that get a copy of the state after the row.
    saves: dict[int, int]

    def state(self, states: Tensor) -> Tensor:
        """The state before the first row."""
        return torch.zeros_like(states[self.slot]) if not self.past else states[self.slot].clone()


def state_runs(batch: BatchLayout) -> Iterator[Run]:
    """The rows of each sequence of a step, with the place of its state."""
    states = batch.states
    assert states is not None, "the step's sequences have no states"
    starts, lengths = batch.query_start.tolist(), batch.context_lens.tolist()
    slots, first_saves = states.slots.tolist(), states.save_start.tolist()
    saves = list(zip(states.save_rows.tolist(), states.save_slots.tolist(), strict=True))
    for seq, slot in enumerate(slots):
        rows = range(starts[seq], starts[seq + 1])
        own = dict(saves[first_saves[seq] : first_saves[seq + 1]])
        yield Run(rows, slot, lengths[seq] - len(rows), own)


class PlainRecurrences:
    """The recurrences of all sets of kernels in plain torch."""

    def short_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: BatchLayout
    ) -> Tensor:
        """Kernels.short_conv(). A state is the last rows of x."""
        y, width = torch.empty(x.shape, device=x.device), len(weight)
        for run in state_runs(batch):
            start, number = run.rows.start, len(run.rows)
            known = torch.cat((run.state(states), x[start : run.rows.stop]))
            total = known[:number] * weight[0]
            for place in range(1, width):
                total = total + known[place : place + number] * weight[place]
            y[start : run.rows.stop] = total if bias is None else total + bias
            for row, slot in run.saves.items():
                states[slot] = known[row - start + 1 : row - start + width]
            states[run.slot] = known[number:]
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
        """Kernels.recurrence()"""
        y, repeats = torch.empty(v.shape, device=v.device), v.shape[1] // k.shape[1]
        for run in state_runs(batch):
            state = run.state(states)
            for row in run.rows:
                key, query = (each[row].repeat_interleave(repeats, 0)[..., None] for each in (k, q))
                factor, new = decay[row][:, None], v[row]
                if decay.dim() == 3:  # a factor for each row of the state
                    state, factor = state * decay[row][..., None], decay.new_ones(v.shape[1], 1)
                if beta is not None:
                    new = (new - factor * (state * key).sum(1)) * beta[row][:, None]
                state = state * factor[..., None] + key * new[:, None]
                y[row] = (state * query).sum(1)
                if row in run.saves:
                    states[run.saves[row]] = state
            states[run.slot] = state
        return y

    def decays(
        self,
        x: Tensor,
        bias: Tensor | None,
        a_log: Tensor,
        limits: tuple[float, float] = NO_LIMITS,
        bound: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Kernels.decays()"""
        own = x.double() if bias is None else x.double() + bias.view(x.shape[1:])
        rates = a_log.double().exp().view(-1, *(1 for _ in x.shape[2:]))
        if bound is not None:
            return x, (bound * torch.sigmoid(rates * own)).exp().float()
        steps = torch.nn.functional.softplus(own).clamp(*limits)
        return steps.float(), (-rates * steps).exp().float()

    def gates(self, x: Tensor, factor: float = 1.0) -> Tensor:
        """Kernels.gates()"""
        return (factor * torch.sigmoid(x.double())).float()
