"""SparseMixer, a choice of experts that kernels don't have (kernels/mixture/routing.py has the others)."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels import Kernels, Routed
from penstock.kernels.mixture.routing import best_columns, sum_of_columns
from penstock.weights.layer_weights import LayerWeights


def sparse_mixer(
    kernels: Kernels, weights: LayerWeights, x: Tensor, num_chosen: int, tolerance: float
) -> Routed:
    """SparseMixer's choice (arXiv 2409.12136): the best expert, then the best of the others, and so on. The
    score of an expert is a softmax over the experts that come near: (best - logit) / max(|logit|, best) is at
    most `tolerance`. The softmax is relative to this expert: in a softmax over all experts it may be 0.
    Exponentials are computed in float64: their last bits depend on where in a tensor a number lies, and
    rounding to float32 removes them."""
    logits = kernels.router_scores(x, weights.vector("router"), weights.optional("router.bias"), "none")
    order, scores = best_columns(logits, num_chosen), []
    taken = torch.zeros_like(logits, dtype=torch.bool)
    for expert in torch.split(order, 1, dim=1):
        best = logits.gather(1, expert)
        is_far = (best - logits) / torch.maximum(logits.abs(), best) > tolerance
        near = (logits - best).double().exp().masked_fill(is_far | taken, 0.0)
        scores.append((1.0 / sum_of_columns(near)).float())
        taken = taken.scatter(1, expert, True)
    return Routed(order, torch.cat(scores, dim=1))
