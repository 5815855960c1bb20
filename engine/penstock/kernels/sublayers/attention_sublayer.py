"""AttentionSublayer: the attention of a layer with what lies around it, which some kernels compute in one
call."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from penstock.kernels.expert_records import MatrixRecord, token_bytes
from penstock.kernels.operands import AttentionSpec, LayerKV, Matrix, address

#: Cosines and sines of a step's tokens, each float32 [num_tokens, rotary_dim / 2]; None, None without rope.
Turns = tuple[Tensor, Tensor] | tuple[None, None]
_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class _Record(ctypes.Structure):
    """The attention_sublayer of cpu/sublayers/attention_sublayer.h."""

    _fields_ = (
        ("input_norm", _P), ("q_norm", _P), ("k_norm", _P), ("post_norm", _P), ("qkv", _P), ("o", _P),
        ("qkv_bias", _P), ("o_bias", _P), ("sinks", _P), ("num_heads", _N), ("window", _N), ("chunk", _N),
        ("eps", _F), ("offset", _F), ("head_offset", _F), ("scale", _F), ("softcap", _F), ("factor", _F),
        ("is_norm_after_rope", _I), ("is_norm_whole", _I), ("is_interleaved", _I), ("has_gate", _I),
    )  # fmt: skip


class NativeSublayer(NamedTuple):
    """A part of a layer in C's form. What C's form points to lives as long as this one."""

    address: int
    #: Floats of scratch memory for a token, and bytes for its activations in a product.
    token_floats: int
    product_bytes: int
    records: tuple[object, ...]


@dataclass(frozen=True, eq=False)
class AttentionSublayer:
    """The weights and numbers of one layer. All norms are rms norms with one `eps`.

    q, k, v = qkv input_norm(hidden), with all heads of q first, then those of k, then those of v
    summed = hidden + factor * o attention(rope(q_norm(q)), rope(k_norm(k)), v)
    normed = post_norm(summed)
    """

    qkv: Matrix
    o: Matrix
    qkv_bias: Tensor | None
    o_bias: Tensor | None
    input_norm: Tensor
    post_norm: Tensor
    #: Of each head, or of all heads of a token together; None: there are none.
    q_norm: Tensor | None
    k_norm: Tensor | None
    #: The norms of heads come after rope.
    is_norm_after_rope: bool
    is_norm_whole: bool
    eps: float
    #: What is added to the weights of norms, and to those of heads' norms.
    offset: float
    head_offset: float
    #: Without a bias by distance and without a latent.
    spec: AttentionSpec
    is_interleaved: bool
    factor: float = 1.0
    #: Each head of q has a gate of the same size after it in "qkv", whose sigmoid multiplies what attention
    #: gives. There are norms then, of each head alone and before rope.
    has_gate: bool = False

    @cached_property
    def native(self) -> NativeSublayer | None:
        """What compiled kernels of the host take; None: they don't know its matrices."""
        qkv: MatrixRecord | None = getattr(self.qkv, "record", None)
        o: MatrixRecord | None = getattr(self.o, "record", None)
        if qkv is None or o is None:
            return None
        spec, norms = self.spec, (self.input_norm, self.q_norm, self.k_norm, self.post_norm)
        record = _Record(
            *map(address, norms), ctypes.addressof(qkv), ctypes.addressof(o), address(self.qkv_bias),
            address(self.o_bias), address(spec.sinks), spec.num_heads, spec.window, spec.chunk, self.eps,
            self.offset, self.head_offset, spec.scale, spec.softcap, self.factor, self.is_norm_after_rope,
            self.is_norm_whole, self.is_interleaved, self.has_gate,
        )  # fmt: skip
        # The rows of qkv, the normed heads of q and k, attention's result, and two numbers of its tiles.
        token_floats = 2 * qkv.out_features + o.in_features + 2
        product_bytes = max(token_bytes(each.in_features, each.num_groups) for each in (qkv, o))
        return NativeSublayer(ctypes.addressof(record), token_floats, product_bytes, (record, qkv, o))

    def layer_numbers(self, mlp: int, kv: LayerKV, turns: Turns) -> tuple[int, ...]:
        """The whole_layer of cpu/sublayers/layers.h, number by number, with an mlp at this address."""
        known, (cos, sin) = self.native, turns
        assert known is not None
        half = 0 if cos is None else cos.shape[1]
        k, v, *sizes = kv.native
        return (known.address, 0, mlp, address(cos) or 0, address(sin) or 0, half, k, v or 0, *sizes, 0, 0)
