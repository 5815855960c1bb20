"""StackedMuon: torch's Muon for tensors of three axes, which hold a matrix of every expert of a layer. Each
matrix gets an orthogonal update of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

#: Coefficients of the quintic iteration, and its steps, as torch.optim.Muon has them.
COEFFICIENTS = (3.4445, -4.775, 2.0315)
STEPS = 5


class StackedMuon(torch.optim.Optimizer):
    """Muon with Nesterov's momentum; the learning rate is AdamW's (`adjust_lr_fn="match_rms_adamw"`)."""

    def __init__(
        self, stacks: Iterable[Tensor], lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        super().__init__(stacks, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for stack in group["params"]:
                self._update(stack, group["lr"], group["weight_decay"], group["momentum"])

    def _update(self, stack: Tensor, lr: float, weight_decay: float, momentum: float) -> None:
        mean = self.state[stack].setdefault("mean", torch.zeros_like(stack))
        assert stack.grad is not None
        mean.lerp_(stack.grad, 1 - momentum)
        update = orthogonal(stack.grad.lerp(mean, momentum))
        stack.mul_(1 - lr * weight_decay)
        stack.add_(update, alpha=-lr * 0.2 * math.sqrt(max(stack.shape[1:])))


def orthogonal(matrices: Tensor) -> Tensor:
    """Roughly the orthogonal matrix nearest to each of [num_matrices, rows, columns] (Newton and Schulz)."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    found = (matrices.mT if is_tall else matrices).bfloat16()
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = found @ found.mT
        found = a * found + (b * gram + c * gram @ gram) @ found
    made: Tensor = found.mT if is_tall else found
    return made
