"""Handover: the way from a card to the processor and back, as kernels see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.kernels.shared.crossing import Crossing


class CrossingProduct(Protocol):
    """What the processor computes without the interpreter when it crosses by flags."""

    def open_crossing(self, driver: Any, memory: Tensor, device: torch.device) -> Crossing | None:
        """The quick way, through pinned memory that the card sees; None where the driver does not have it."""

    def cross(self, crossing: Crossing, x: Tensor) -> bool:
        """Begin this product with x on the card; False if it has to go the other way."""


class HostProduct(CrossingProduct, Protocol):
    """What a thread of the driver computes without the interpreter, too: `function(address of a record)`."""

    @property
    def function(self) -> Any: ...

    def record(self, x: Tensor, y: Tensor) -> Any:
        """What the function takes for x and y on the host."""


class Handover(Protocol):
    """Hands work of the card over to the processor, and the result back. Nobody waits for it but the card."""

    def begin(
        self,
        x: Tensor,
        out_features: int,
        compute: Callable[[Tensor], Tensor],
        product: CrossingProduct | HostProduct | None = None,
        fetch: Callable[[int, Tensor], None] | None = None,
        y: Tensor | None = None,
    ) -> Tensor:
        """Have the processor make compute(x on the host) of what x (float32 [num_tokens, in_features] on the
        card) is now. Returns at once; the result, float32 [num_tokens, out_features] on the card, is there
        for what is launched after join(). It lies in y, whose rows may have gaps between them, if y is given.
        `product` computes the same as `compute`, and takes its place if it is given and can: a
        CrossingProduct where the card has a `fetch` and few rows, a HostProduct always. Raises HandoverError
        if an earlier `compute` has failed."""

    def join(self) -> None:
        """What is launched from now on waits for the results of begin()."""
