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
from penstock.kernels.operands import BatchLayout, GatedFunction, address, gated_code
from penstock.kernels.scratch import scratch
from penstock.kernels.sublayers.mixture_layer import (
    ExpertsForRun,
    GivenChoice,
    MixtureLayer,
    MixtureRun,
    Stop,
)

#: Notes of penstock_mixture_layers().
_ARE_THERE, _HAS_CLAMPED = 1, 2
_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Record(ctypes.Structure):
    """The mixture_sweep of cpu/sublayers/mixture_layers.h."""

    _fields_ = (
        ("layers", _P), ("given", _P), ("num_layers", _N), ("how", _P), ("slot_mapping", _P),
        ("block_tables", _P), ("max_blocks", _N), ("query_start", _P), ("context_lens", _P),
        ("prefix_lens", _P), ("num_seqs", _N), ("kind", _N), ("activation_bits", _N), ("y", _P),
        ("chosen", _P), ("scores", _P), ("scratch", _P), ("routing", _P), ("partials", _P),
        ("sharpness", _F), ("limit", _F),
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
        batch: BatchLayout,
        how: tuple[Routing, GatedFunction, int],
        num_floats: tuple[int, int],
        notice: ClampNotice,
    ) -> None:
        """`how`: routing, what lies between an expert's products, and the bits of activations. `num_floats`
        of the scratch memory of attention, and of its partial results."""
        routing, function, bits = how
        width, num_chosen = layers[0].attention.input_norm.shape[0], routing.num_chosen
        kind, sharpness, limit = gated_code(function)
        self._library, self._notice, self._layers = library, notice, layers
        self._width, self._num_chosen = width, num_chosen
        self._y, self._scores = torch.empty(4, 1, width), torch.empty(1, num_chosen)
        self._chosen = torch.empty(len(layers) + 1, num_chosen, dtype=torch.int64)
        room = [torch.empty(number) for number in (num_floats[0], 2 * routing.num_experts, num_floats[1])]
        numbers = array("q", [number for each in layers for number in each.numbers])
        choices = array("q", [number for each in given for number in _numbers_of(each)])
        self._record = _Record(
            numbers.buffer_info()[0], choices.buffer_info()[0] if given else None, len(layers),
            routing.native_address, batch.slot_mapping.data_ptr(), *batch.native, kind, bits,
            self._y.data_ptr(), self._chosen.data_ptr(), self._scores.data_ptr(),
            room[0].data_ptr(), room[1].data_ptr(), address(room[2] if num_floats[1] else None),
            sharpness, limit,
        )  # fmt: skip
        records = [each.shared.expert.native for each in layers if each.shared is not None]
        self._shared_row_bytes = max(
            (record.row_bytes for record in records if record is not None), default=0
        )
        self._address, self._notes = ctypes.addressof(self._record), ctypes.c_int()
        #: What the record points to.
        self._held = numbers, choices, given, room, batch, routing

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
