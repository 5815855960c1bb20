"""NativeMixture: layers with experts in one call of cpu.c, as far as their experts are in memory."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.clamp_notice import ClampNotice
from penstock.kernels.expert_records import token_scratch_bytes
from penstock.kernels.mixture.routing import Routed, Routing
from penstock.kernels.operands import GatedFunction, gated_code
from penstock.kernels.scratch import scratch
from penstock.kernels.sublayers.mixture_layer import (
    ExpertsForRun,
    GivenChoice,
    MixtureLayer,
    MixtureRun,
    Stop,
)
from penstock.kernels.sublayers.whole_layer import LayersStep

#: Notes of penstock_mixture_layers().
_ARE_THERE, _HAS_CLAMPED = 1, 2
_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Record(ctypes.Structure):
    """The mixture_sweep of cpu/sublayers/mixture_layers.h."""

    _fields_ = (
        ("layers", _P), ("given", _P), ("num_layers", _N), ("how", _P), ("step", _P), ("kind", _N),
        ("y", _P), ("chosen", _P), ("scores", _P), ("routing", _P), ("sharpness", _F), ("limit", _F),
        ("factor", _F),
    )  # fmt: skip


class _Coming(ctypes.Structure):
    """The coming_experts of the same file."""

    _fields_ = (("experts", _P), ("num_experts", _N), ("wait", _P), ("reads", _P))


class NativeMixture:
    """MixtureSweep"""

    def __init__(
        self,
        library: Any,
        layers: Sequence[MixtureLayer],
        given: Sequence[GivenChoice],
        step: LayersStep,
        how: tuple[Routing, GatedFunction],
        notice: ClampNotice,
    ) -> None:
        """`how`: routing, and what lies between an expert's products."""
        routing, function = how
        width, num_chosen = layers[0].first.input_norm.shape[0], routing.num_chosen
        kind, sharpness, limit = gated_code(function)
        self._library, self._notice, self._layers = library, notice, layers
        self._width, self._num_chosen = width, num_chosen
        self._y, self._scores = torch.empty(4, 1, width), torch.empty(1, num_chosen)
        self._chosen = torch.empty(len(layers) + 1, num_chosen, dtype=torch.int64)
        room = torch.empty(2 * routing.num_experts)
        numbers = array("q", [number for each in layers for number in each.numbers])
        choices = array("q", [number for each in given for number in _numbers_of(each)])
        self._record = _Record(
            numbers.buffer_info()[0], choices.buffer_info()[0] if given else None, len(layers),
            routing.native_address, step.address, kind, self._y.data_ptr(), self._chosen.data_ptr(),
            self._scores.data_ptr(), room.data_ptr(), sharpness, limit, layers[0].first.factor,
        )  # fmt: skip
        records = [each.shared.expert.native for each in layers if each.shared is not None]
        self._shared_row_bytes = max(
            (record.row_bytes for record in records if record is not None), default=0
        )
        self._address, self._notes = ctypes.addressof(self._record), ctypes.c_int()
        #: What the record points to.
        self._held = numbers, choices, given, room, step, routing

    def run(self, first: int, hidden: Tensor, experts: ExpertsForRun, is_begun: bool = False) -> MixtureRun:
        numbers = array("q", [number for each in experts.coming for number in each])
        coming = _Coming(numbers.buffer_info()[0], len(experts.coming), experts.wait, experts.reads)
        row_bytes = max(experts.row_bytes, self._shared_row_bytes)
        room, _held = scratch(token_scratch_bytes(self._num_chosen, row_bytes, self._width))
        end: int = self._library.penstock_mixture_layers(
            self._address, first, is_begun, hidden.data_ptr(), ctypes.addressof(coming), room,
            ctypes.addressof(self._notes),
        )  # fmt: skip
        notes, rows = self._notes.value, self._chosen[first : end + 2].tolist()
        if notes & _HAS_CLAMPED:
            self._notice.give()
        behind = self._y[0] if end > first else hidden
        if end == len(self._layers):
            return MixtureRun(end, behind, rows[is_begun : end - first], None)
        are_there = bool(notes & _ARE_THERE)
        guessed = rows[end - first + 1] if self._layers[end].following is not None else None
        routed = Routed(self._chosen[end : end + 1], self._scores)
        stop = Stop(self._y[1], self._y[2], routed, are_there, guessed)
        return MixtureRun(end, behind, rows[is_begun : end - first + are_there], stop)


def _numbers_of(given: GivenChoice) -> tuple[int, int, int]:
    """The given_choice of C."""
    return given.routed.experts.data_ptr(), given.routed.scores.data_ptr(), given.guessed.data_ptr()
