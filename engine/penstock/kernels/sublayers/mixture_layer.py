"""MixtureLayer: a layer with experts and everything that it computes with in a step of one token, so that
some kernels compute several layers in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from torch import Tensor

from penstock.kernels.experts import GatedExpert
from penstock.kernels.mixture.routing import Routed, Router
from penstock.kernels.operands import LayerKV, address
from penstock.kernels.sublayers.attention_sublayer import Turns
from penstock.kernels.sublayers.whole_layer import FirstHalf

_P = ctypes.c_void_p


class _Record(ctypes.Structure):
    """The expert_router of cpu/sublayers/mixture_layers.h."""

    _fields_ = (("weight", _P), ("bias", _P), ("correction", _P), ("experts", _P))


@dataclass(frozen=True, eq=False)
class ExpertRouter:
    """A layer's router, and the experts that are in memory."""

    router: Router
    #: Where the addresses of the experts' records (ExpertRecord) lie, by their numbers; 0: not in memory.
    #: They change from one call to the next.
    experts: int
    #: What keeps that memory.
    table: object

    @cached_property
    def record(self) -> ctypes.Structure:
        """For compiled kernels of the host."""
        return _Record(*self.router.native, self.experts)

    @cached_property
    def address(self) -> int:
        """Where the record lies."""
        return ctypes.addressof(self.record)


class SharedExpert(NamedTuple):
    """An expert through which every token passes."""

    expert: GatedExpert
    #: The weights of the sigmoid that multiplies what the expert gives, float32 [1, hidden_size]; None:
    #: nothing does.
    gate: Tensor | None


class MixtureLayer(NamedTuple):
    """summed, normed = first(hidden); the layer's result is summed + factor * the blend of the experts that
    `router` chooses for normed, and of the shared expert where there is one."""

    first: FirstHalf
    kv: LayerKV
    turns: Turns
    router: ExpertRouter
    shared: SharedExpert | None
    #: The router of the next layer, which is asked with the same `normed`: a guess. None: nothing is guessed.
    following: ExpertRouter | None

    @property
    def numbers(self) -> tuple[int, ...]:
        """The mixture_layer of C, number by number. Its matrices are those that compiled kernels of the host
        know."""
        following = 0 if self.following is None else self.following.address
        expert, gate = (None, None) if self.shared is None else self.shared
        record = None if expert is None else expert.native
        return (
            *self.first.layer_numbers(0 if record is None else record.address, self.kv, self.turns),
            address(gate) or 0,
            self.router.address,
            following,
        )


class GivenChoice(NamedTuple):
    """What a layer takes in place of what its router chooses, and of what it guesses."""

    routed: Routed
    guessed: Tensor  # int64 [1, num_chosen]


class Stop(NamedTuple):
    """A layer that was begun."""

    summed: Tensor  # [1, hidden_size], as `normed` is
    normed: Tensor
    routed: Routed
    #: Whether its experts are in memory. Otherwise it can't be resumed.
    are_there: bool
    #: Experts of the next layer, best first; None: nothing was guessed.
    guessed: list[int] | None


class MixtureRun(NamedTuple):
    """Some layers that were computed."""

    #: The layer after them.
    end: int
    hidden: Tensor  # [1, hidden_size]
    #: The experts of each layer that has chosen in this call and has them in memory, best first: not those of
    #: a layer that an earlier call had begun.
    chosen: list[list[int]]
    #: None: all were computed.
    stop: Stop | None


class ExpertsForRun(NamedTuple):
    """What kernels have to know of a sweep's experts beside their addresses."""

    #: The most of all experts' ExpertRecord.row_bytes.
    row_bytes: int
    #: Experts that are being read: the address of the layer's table (ExpertRouter.experts), the expert's
    #: number, the address of its record, and the number of its read for `wait`.
    coming: Sequence[tuple[int, int, int, int]] = ()
    #: As Arriving has them.
    wait: int = 0
    reads: int = 0


class MixtureSweep(Protocol):
    """Layers that follow each other, in a step of one token."""

    def run(self, first: int, hidden: Tensor, experts: ExpertsForRun, is_begun: bool = False) -> MixtureRun:
        """Computes layers, from layer `first` with hidden [1, hidden_size] on, up to one whose experts, or
        those that it guesses for the next layer, are not all in memory. K and V of these and of that one are
        written. Experts that were coming and have arrived are put into their tables. `is_begun`: the first
        layer is the one at which the last call stopped. What was returned before is valid no more."""
