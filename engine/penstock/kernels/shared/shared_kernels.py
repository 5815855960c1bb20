"""SharedKernels: a card's kernels that leave the output channels that lie in RAM to the processor's kernels.

Sums of integers are exact and round once for each output, so that the bits do not depend on who computes an
output. Norms, attention and activations stay on the card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from penstock.kernels.operands import Matrix
from penstock.kernels.protocol import ForwardingKernels, Kernels, KernelTraits
from penstock.kernels.shared.handover import Handover, HostProduct
from penstock.kernels.shared.shared_experts import SharedExperts
from penstock.kernels.shared.split_matrix import SplitMatrix


class SharedKernels(ForwardingKernels):
    """`first` computes on a card, `second` on the processor."""

    def __init__(self, first: Kernels, second: Kernels, handover: Handover) -> None:
        super().__init__(first)
        self._second, self._handover = second, handover
        self._handed: Callable[[Matrix], HostProduct | None] = getattr(second, "handed", lambda weight: None)
        self._linear_parts: Callable[[Tensor, Sequence[Matrix]], list[Tensor]] = getattr(
            first, "linear_parts", lambda x, weights: [first.linear(x, each) for each in weights]
        )
        self._fetch: Callable[[int, Tensor], None] | None = getattr(first, "fetch", None)
        self.experts = SharedExperts(first, second, handover)
        #: Products of which the processor computed a share.
        self.num_shared = 0

    @cached_property
    def _traits(self) -> KernelTraits:
        first = self._kernels.traits
        return replace(first, matrices=(*first.matrices, SplitMatrix))

    @property
    def traits(self) -> KernelTraits:
        return self._traits

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if not isinstance(weight, SplitMatrix):
            return self._kernels.linear(x, weight, bias)
        in_ram, parts = weight.in_ram, list[Tensor]()
        if in_ram is None and len(weight.on_card) == 1:
            return self._kernels.linear(x, weight.on_card[0], bias)
        if in_ram is not None:
            self.num_shared += 1
            theirs = self._handover.begin(
                x,
                in_ram.out_features,
                lambda rows: self._second.linear(rows, in_ram),
                self._handed(in_ram),
                self._fetch,
            )
        if weight.on_card:
            parts += self._linear_parts(x, weight.on_card)
        if in_ram is not None:
            self._handover.join()
            parts.append(theirs)
        y = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        return y if bias is None else y.add_(bias)
