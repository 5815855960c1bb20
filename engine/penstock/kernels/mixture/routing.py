"""Routing: which experts a token passes through, and how much each of them counts. plain_route() is the
definition; Kernels.route() of C is tested against it.

A token's routing must not depend on the other tokens of a step. Logits, softmax and sigmoid come from
Kernels.router_scores(), which computes row by row. Everything else here is one rounded operation for each
element, with sums that go column by column, or a stable sort: of equal scores, the expert with the lower
number wins, and NaN is the largest number."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.kernels.operands import ROUTER_CODES, RouterFunction, address

_N, _I, _F = ctypes.c_int64, ctypes.c_int, ctypes.c_float


class _Record(ctypes.Structure):
    """The routing of cpu/router.h."""

    _fields_ = (
        ("num_experts", _N), ("num_chosen", _N), ("num_groups", _N), ("num_chosen_groups", _N),
        ("num_counted", _N), ("function", _I), ("is_renormalized", _I), ("least_sum", _F), ("scaling", _F),
    )  # fmt: skip


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
    #: Routers have a correction.
    has_correction: bool = False
    #: Experts lie in groups of one size. A token's experts come from its best groups. A group is worth the
    #: sum of its `num_counted` best scores.
    num_groups: int = 1
    num_chosen_groups: int = 1
    num_counted: int = 2

    def __post_init__(self) -> None:
        """Compiled kernels rely on this. Families refuse a config.json before, and say what is wrong."""
        assert self.num_experts % self.num_groups == 0, "groups of different sizes"
        assert 0 < self.num_chosen_groups <= self.num_groups and 0 < self.num_chosen <= self.num_experts

    @cached_property
    def native(self) -> ctypes.Structure:
        """The same for compiled kernels of the host."""
        return _Record(
            self.num_experts, self.num_chosen, self.num_groups, self.num_chosen_groups, self.num_counted,
            ROUTER_CODES[self.function], self.is_renormalized, self.least_sum, self.scaling,
        )  # fmt: skip

    @cached_property
    def native_address(self) -> int:
        return ctypes.addressof(self.native)


@dataclass(frozen=True, eq=False)
class Router:
    """A layer's router."""

    weight: Tensor  # float32 [num_experts, in_features]
    bias: Tensor | None = None  # float32 [num_experts]
    #: Added to the scores where experts are chosen, and only there: float32 [num_experts].
    correction: Tensor | None = None

    @cached_property
    def native(self) -> tuple[int, int | None, int | None]:
        """The addresses of the three, for compiled kernels of the host."""
        return self.weight.data_ptr(), address(self.bias), address(self.correction)


class Routed(NamedTuple):
    """The experts of each token, best first."""

    experts: Tensor  # int64 [num_tokens, num_chosen]
    scores: Tensor  # float32 [num_tokens, num_chosen]


class _Scores(Protocol):
    """Kernels."""

    def router_scores(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, function: RouterFunction
    ) -> Tensor: ...


def plain_route(kernels: _Scores, x: Tensor, router: Router, routing: Routing) -> Routed:
    """Kernels.route(), operation by operation."""
    scores = kernels.router_scores(x, router.weight, router.bias, routing.function)
    ranked = scores
    if router.correction is not None:
        ranked = scores + router.correction
    elif routing.function == "sigmoid":  # large logits have the same score, 1
        ranked = kernels.router_scores(x, router.weight, router.bias, "none")
    return choose(scores, ranked, routing)


def choose(scores: Tensor, ranked: Tensor, routing: Routing) -> Routed:
    """The experts with the largest numbers in each row of `ranked` and their `scores`, both float32
    [num_tokens, num_experts]."""
    if routing.num_groups > 1:
        ranked = _in_best_groups(ranked, routing)
    experts = best_columns(ranked, routing.num_chosen)
    chosen = scores.gather(1, experts)
    if routing.is_renormalized:
        chosen = chosen / sum_of_columns(chosen).clamp_min(routing.least_sum)
    return Routed(experts, chosen * routing.scaling if routing.scaling != 1 else chosen)


def best_columns(scores: Tensor, number: int) -> Tensor:
    """The columns of the `number` largest scores of each row, int64 [num_tokens, number]."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :number]


def sum_of_columns(x: Tensor) -> Tensor:
    """[num_rows, num_columns] -> [num_rows, 1], column after column. torch's own sum may split a row where
    there are few rows."""
    total, *others = x.unbind(1)
    for column in others:
        total = total + column
    return total[:, None]


def _in_best_groups(scores: Tensor, routing: Routing) -> Tensor:
    """The scores, with -infinity outside of each token's best groups."""
    groups = scores.view(len(scores), routing.num_groups, -1)
    counted = groups.sort(dim=-1, descending=True).values[..., : routing.num_counted]
    worth = sum_of_columns(counted.flatten(0, 1)).view(len(scores), -1)
    kept = torch.zeros_like(worth, dtype=torch.bool)
    kept.scatter_(1, best_columns(worth, routing.num_chosen_groups), True)
    return groups.masked_fill(~kept[..., None], -torch.inf).view_as(scores)
