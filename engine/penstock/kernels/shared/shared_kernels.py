"""SharedKernels: a card's kernels that leave the output channels that lie in RAM to the processor's kernels.

Sums of integers are exact and round once for each output, so that the bits do not depend on who computes an
output. Norms, attention and activations stay on the card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial

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
        self._write_products: Callable[[Tensor, Sequence[Matrix], Tensor], None] = getattr(
            first, "write_products", partial(_write_products, first)
        )
        #: The card's, if it has one.
        self.fetch: Callable[[int, Tensor], None] | None = getattr(first, "fetch", None)
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
        in_ram, on_card = weight.in_ram, weight.on_card
        if in_ram is None and len(on_card) == 1:
            return self._kernels.linear(x, on_card[0], bias)
        y = x.new_empty(x.shape[0], weight.out_features)
        if in_ram is not None:
            self.num_shared += 1
            num_theirs = in_ram.out_features
            self._handover.begin(
                x,
                num_theirs,
                lambda rows: self._second.linear(rows, in_ram),
                self._handed(in_ram),
                self.fetch,
                y.narrow(1, weight.out_features - num_theirs, num_theirs),
            )
        if on_card:
            self._write_products(x, on_card, y)
        if in_ram is not None:
            self._handover.join()
        return y if bias is None else y.add_(bias)


def _write_products(kernels: Kernels, x: Tensor, weights: Sequence[Matrix], y: Tensor) -> None:
    """CudaKernels.write_products() with kernels that have none."""
    column = 0
    for each in weights:
        end = column + each.out_features
        y[:, column:end] = kernels.linear(x, each)
        column = end
