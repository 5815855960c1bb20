"""Routing: which experts a token passes through, and how much each of them counts.

A token's routing must not depend on the other tokens of a step. Logits, softmax and sigmoid come from
Kernels.router_scores(), which computes row by row. Everything else here is one rounded operation for each
element, with sums that go column by column, or a stable sort: of equal scores, the expert with the lower
number wins."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels import Kernels, Routed, RouterFunction
from penstock.weights.layer_weights import LayerWeights


@dataclass(frozen=True)
class Routing:
    """What routers differ in. "Top-k, then softmax" is a softmax over all experts that is renormalized."""

    num_experts: int
    num_chosen: int
    #: What makes scores of the router's logits.
    function: RouterFunction = "softmax"
    #: The scores of a token's experts are divided by their sum, or by `least_sum` if the sum is smaller.
    is_renormalized: bool = False
    least_sum: float = 1e-20
    #: The scores are multiplied by this in the end.
    scaling: float = 1.0
    #: The vector "router.correction" is added to the scores where experts are chosen, and only there.
    has_correction: bool = False
    #: Experts lie in groups of one size. A token's experts come from its best groups. A group is worth the
    #: sum of its `num_counted` best scores.
    num_groups: int = 1
    num_chosen_groups: int = 1
    num_counted: int = 2


def route(kernels: Kernels, weights: LayerWeights, x: Tensor, routing: Routing) -> Routed:
    """The experts of x [num_tokens, hidden_size]. `weights` has "router" [num_experts, hidden_size], and
    perhaps "router.bias" and "router.correction"."""
    router, bias = weights.vector("router"), weights.optional("router.bias")
    scores = kernels.router_scores(x, router, bias, routing.function)
    ranked = scores
    if routing.has_correction:
        ranked = scores + weights.vector("router.correction")
    elif routing.function == "sigmoid":  # large logits have the same score, 1
        ranked = kernels.router_scores(x, router, bias, "none")
    if routing.num_groups > 1:
        ranked = _in_best_groups(ranked, routing)
    least_sum = routing.least_sum if routing.is_renormalized else None
    return kernels.experts.choose(scores, ranked, routing.num_chosen, least_sum, routing.scaling)


def sparse_mixer(
    kernels: Kernels, weights: LayerWeights, x: Tensor, num_chosen: int, tolerance: float
) -> Routed:
    """SparseMixer's choice (arXiv 2409.12136): the best expert, then the best of the others, and so on. The
    score of an expert is a softmax over the experts that come near: (best - logit) / max(|logit|, best) is at
    most `tolerance`. The softmax is relative to this expert: in a softmax over all experts it may be 0.
    Exponentials are computed in float64: their last bits depend on where in a tensor a number lies, and
    rounding to float32 removes them."""
    logits = kernels.router_scores(x, weights.vector("router"), weights.optional("router.bias"), "none")
    order, scores = _best(logits, num_chosen), []
    taken = torch.zeros_like(logits, dtype=torch.bool)
    for expert in torch.split(order, 1, dim=1):
        best = logits.gather(1, expert)
        is_far = (best - logits) / torch.maximum(logits.abs(), best) > tolerance
        near = (logits - best).double().exp().masked_fill(is_far | taken, 0.0)
        scores.append((1.0 / _sum_of_columns(near)).float())
        taken = taken.scatter(1, expert, True)
    return Routed(order, torch.cat(scores, dim=1))


def _best(scores: Tensor, number: int) -> Tensor:
    """The columns of the `number` largest scores of each row, int64 [num_tokens, number]."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :number]


def _in_best_groups(scores: Tensor, routing: Routing) -> Tensor:
    """The scores, with -infinity outside of each token's best groups."""
    groups = scores.view(len(scores), routing.num_groups, -1)
    counted = groups.sort(dim=-1, descending=True).values[..., : routing.num_counted]
    worth = _sum_of_columns(counted.flatten(0, 1)).view(len(scores), -1)
    kept = torch.zeros_like(worth, dtype=torch.bool)
    kept.scatter_(1, _best(worth, routing.num_chosen_groups), True)
    return groups.masked_fill(~kept[..., None], -torch.inf).view_as(scores)


def _sum_of_columns(x: Tensor) -> Tensor:
    """[num_rows, num_columns] -> [num_rows, 1], column after column. torch's own sum may split a row where
    there are few rows."""
    total, *others = x.unbind(1)
    for column in others:
        total = total + column
    return total[:, None]
