"""Mixer: the matrices and numbers of a recurrent layer's form, which some kernels compute in one call."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from penstock.kernels.expert_records import MatrixRecord, token_bytes
from penstock.kernels.operands import Matrix, address
from penstock.kernels.recurrent.plain import NO_LIMITS
from penstock.kernels.sublayers.attention_sublayer import NativeSublayer

MixerKind = Literal["delta net", "kimi delta", "mamba2", "short conv"]
#: Numbers by which compiled kernels know them.
_CODES: dict[MixerKind, int] = {"delta net": 0, "kimi delta": 1, "mamba2": 2, "short conv": 3}
_P, _N, _F, _D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_double


class _Record(ctypes.Structure):
    """The mixer of cpu/sublayers/mixer.h."""

    _fields_ = (
        ("in", _P), ("gate_in", _P), ("gate", _P), ("step", _P), ("out", _P), ("in_bias", _P),
        ("out_bias", _P), ("gates", _P), ("decay", _P), ("conv", _P), ("conv_bias", _P), ("dt_bias", _P),
        ("a_log", _P),
        ("skip", _P), ("norm", _P), ("lengths", _P), ("factors", _P), ("kind", _N), ("num_heads", _N),
        ("num_key_heads", _N), ("key_dim", _N), ("value_dim", _N), ("width", _N), ("is_grouped", _N),
        ("is_norm_before", _N), ("least_step", _D), ("most_step", _D), ("bound", _D), ("beta_factor", _D),
        ("norm_eps", _F), ("length_eps", _F),
    )  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class Mixer:
    """The weights and numbers of one layer. The forms of penstock.model.recurrent say what is computed with
    them, and which of them a kind has."""

    kind: MixerKind
    #: The first product and the last one.
    into: Matrix
    out: Matrix
    in_bias: Tensor | None = None
    out_bias: Tensor | None = None
    #: The product of the output's gate, after a narrow one of Kimi's.
    gate: Matrix | None = None
    gate_in: Matrix | None = None
    #: The product of the decays' steps, where Kimi's has a matrix of weights like the others.
    step: Matrix | None = None
    #: Float32 matrices: of beta and the decay, or of beta and what Kimi's second one makes a decay of.
    gates: Tensor | None = None
    decay: Tensor | None = None
    conv: Tensor  # [channels, 1, width]
    conv_bias: Tensor | None = None
    dt_bias: Tensor | None = None
    a_log: Tensor | None = None
    skip: Tensor | None = None
    #: Of the norm after the recurrence.
    norm: Tensor | None = None
    norm_eps: float = 0.0
    is_norm_before: bool = False
    num_heads: int = 0
    num_key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    is_grouped: bool = False
    step_limits: tuple[float, float] = NO_LIMITS
    #: KimiDeltaAttention.lower_bound
    bound: float | None = None
    beta_factor: float = 1.0
    #: How long q and k are made, and the eps of that.
    lengths: tuple[float, float] = (1.0, 1.0)
    length_eps: float = 0.0
    #: As Mamba2.in_factors.
    factors: tuple[float, ...] = ()

    @cached_property
    def native(self) -> NativeSublayer | None:
        """What compiled kernels of the host take; None: they don't know its matrices."""
        matrices = (self.into, self.gate_in, self.gate, self.step, self.out)
        records = [None if each is None else getattr(each, "record", None) for each in matrices]
        if any((each is None) != (record is None) for each, record in zip(matrices, records, strict=True)):
            return None
        known: list[MatrixRecord] = [each for each in records if each is not None]
        addresses = (None if each is None else ctypes.addressof(each) for each in records)
        vectors = (
            self.in_bias, self.out_bias, self.gates, self.decay, self.conv, self.conv_bias, self.dt_bias,
            self.a_log, self.skip, self.norm,
        )  # fmt: skip
        lengths = torch.tensor([self.lengths] * max(1, self.key_dim)).t().contiguous()
        factors = torch.tensor(self.factors) if self.factors else None
        record = _Record(
            *addresses, *map(address, vectors), address(lengths), address(factors), _CODES[self.kind],
            self.num_heads, self.num_key_heads, self.key_dim, self.value_dim, self.conv.shape[-1],
            self.is_grouped, self.is_norm_before, *self.step_limits, self.bound or 0.0,
            self.beta_factor, self.norm_eps, self.length_eps,
        )  # fmt: skip
        product_bytes = max(token_bytes(each.in_features, each.num_groups) for each in known)
        held = (record, lengths, factors, *known)
        return NativeSublayer(ctypes.addressof(record), self._token_floats(known), product_bytes, held)

    def _token_floats(self, known: list[MatrixRecord]) -> int:
        """plan_mixing() of mixer.h."""
        into, out, channels = known[0], known[-1], len(self.conv)
        values: int = out.in_features
        floats: int = into.out_features + channels * (1 + self.is_grouped) + max(values, into.in_features)
        if self.kind == "short conv":
            return floats
        decays = self.num_heads * (self.key_dim if self.kind == "kimi delta" else 1)
        return floats + values + 2 * self.num_heads + max(self.num_heads, self.value_dim) + 2 * decays
