"""WholeLayer: a layer with everything that it computes with in one step, so that some kernels compute several
layers in one call; and what all these layers share."""

from __future__ import annotations

import ctypes
from array import array
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from penstock.kernels.experts import GatedExpert
from penstock.kernels.operands import BatchLayout, LayerKV, address
from penstock.kernels.sublayers.attention_sublayer import AttentionSublayer, Turns

if TYPE_CHECKING:
    from penstock.kernels.sublayers.recurrent_sublayer import RecurrentSublayer

#: A layer up to the input of its mlp.
FirstHalf: TypeAlias = "AttentionSublayer | RecurrentSublayer"
_P, _N = ctypes.c_void_p, ctypes.c_int64


class WholeLayer(NamedTuple):
    """summed, normed = first(hidden); the layer's result is summed + factor * mlp(normed)."""

    first: FirstHalf
    mlp: GatedExpert
    kv: LayerKV
    turns: Turns

    @property
    def numbers(self) -> tuple[int, ...]:
        """The whole_layer of cpu/sublayers/layers.h, number by number. Its matrices are those that compiled
        kernels of the host know."""
        assert self.mlp.native is not None
        return self.first.layer_numbers(self.mlp.native.address, self.kv, self.turns)


class _Record(ctypes.Structure):
    """The layers_step of cpu/sublayers/layers.h."""

    _fields_ = (
        ("slot_mapping", _P), ("block_tables", _P), ("max_blocks", _N), ("query_start", _P),
        ("context_lens", _P), ("prefix_lens", _P), ("num_seqs", _N), ("states", _P), ("num_tokens", _N),
        ("activation_bits", _N), ("scratch", _P), ("partials", _P),
    )  # fmt: skip


class LayersStep:
    """What all layers of a step share, in C's form."""

    def __init__(
        self, batch: BatchLayout, num_tokens: int, activation_bits: int, num_floats: tuple[int, int]
    ) -> None:
        """`num_floats` of the scratch memory, and of attention's partial results."""
        sequences = array("q", batch.native_states) if batch.states is not None else array("q")
        room, partials = torch.empty(num_floats[0]), torch.empty(num_floats[1]) if num_floats[1] else None
        self._record = _Record(
            batch.slot_mapping.data_ptr(), *batch.native, sequences.buffer_info()[0] if sequences else None,
            num_tokens, activation_bits, room.data_ptr(), address(partials),
        )  # fmt: skip
        self.address = ctypes.addressof(self._record)
        #: What the record points to.
        self._held: tuple[BatchLayout, array[int], Tensor, Tensor | None] = batch, sequences, room, partials
