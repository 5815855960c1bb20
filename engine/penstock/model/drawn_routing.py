"""DrawnRouters: kernels whose routers choose by chance, with a given popularity of experts. The weights of a
benchmark are random, and what their routers would choose says nothing about a trained model."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels import ForwardingKernels, Kernels, RouterFunction


class DrawnRouters(ForwardingKernels):
    """A token's logits are the logarithms of the experts' weights, plus noise of Gumbel's distribution. The
    largest of them are then drawn one after the other, in proportion to the weights of those that are left.
    Expert 0 of each layer has the first weight. The routers' own products are computed, too, for their
    time."""

    def __init__(self, kernels: Kernels, weights: tuple[float, ...], seed: int = 0) -> None:
        super().__init__(kernels)
        self._logits = torch.tensor(weights).log()
        self._generator = torch.Generator().manual_seed(seed)

    def router_scores(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, function: RouterFunction
    ) -> Tensor:
        own = super().router_scores(x, weight, bias, function)
        noise = -torch.empty(own.shape).exponential_(generator=self._generator).log()
        logits = (self._logits + noise).to(own.device)
        if function == "softmax":
            return logits.softmax(-1)
        return torch.sigmoid(logits) if function == "sigmoid" else logits
