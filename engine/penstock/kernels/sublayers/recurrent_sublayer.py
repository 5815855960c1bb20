"""RecurrentSublayer: the recurrence of a layer with what lies around it, as a part of several layers in one
call."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from penstock.kernels.operands import LayerKV, address
from penstock.kernels.sublayers.attention_sublayer import NativeSublayer, Turns
from penstock.kernels.sublayers.mixer import Mixer

_P, _F = ctypes.c_void_p, ctypes.c_float


class _Record(ctypes.Structure):
    """The recurrent_sublayer of cpu/sublayers/recurrent_sublayer.h."""

    _fields_ = (
        ("input_norm", _P), ("post_norm", _P), ("mixer", _P), ("eps", _F), ("offset", _F), ("factor", _F),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class RecurrentSublayer:
    """The weights and numbers of one layer. Both norms are rms norms with one `eps`.

    summed = hidden + factor * mixer(input_norm(hidden))
    normed = post_norm(summed)
    """

    mixer: Mixer
    input_norm: Tensor
    post_norm: Tensor
    eps: float
    #: What is added to the weights of norms.
    offset: float
    factor: float

    @cached_property
    def native(self) -> NativeSublayer | None:
        """What compiled kernels of the host take; None: they don't know its matrices."""
        mixer = self.mixer.native
        if mixer is None:
            return None
        norms = address(self.input_norm), address(self.post_norm)
        record = _Record(*norms, mixer.address, self.eps, self.offset, self.factor)
        return mixer._replace(address=ctypes.addressof(record), records=(record, *mixer.records))

    def layer_numbers(self, mlp: int, kv: LayerKV, turns: Turns) -> tuple[int, ...]:
        """The whole_layer of cpu/sublayers/layers.h, number by number, with an mlp at this address."""
        known = self.native
        assert known is not None
        return 0, known.address, mlp, *(0,) * 9, *kv.native_states
