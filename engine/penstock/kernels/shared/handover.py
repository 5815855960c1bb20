"""Handover: the way from a card to the processor and back, as kernels see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Handover(Protocol):
    """Hands work of the card over to the processor, and the result back. Nobody waits for it but the card."""

    def begin(self, x: Tensor, out_features: int, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Have the processor make compute(x on the host) of what x (float32 [num_tokens, in_features] on the
        card) is now. Returns at once; the result, float32 [num_tokens, out_features] on the card, is there
        for what is launched after join(). Raises HandoverError if an earlier `compute` has failed."""

    def join(self) -> None:
        """What is launched from now on waits for the results of begin()."""
