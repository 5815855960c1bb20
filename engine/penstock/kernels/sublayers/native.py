"""NativeSublayers: parts of a layer, and layers, in one call of cpu.c, for steps of a few tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.kernels.clamp_notice import ClampNotice
from penstock.kernels.expert_records import padded_rows, scratch_bytes
from penstock.kernels.experts import ExpertKernels, GatedExpert
from penstock.kernels.mixture.routing import Routing
from penstock.kernels.operands import BatchLayout, GatedFunction, LayerKV, address, gated_code
from penstock.kernels.scratch import scratch
from penstock.kernels.sublayers.attention_sublayer import AttentionSublayer, NativeSublayer, Turns
from penstock.kernels.sublayers.mixture_layer import GivenChoice, MixtureLayer
from penstock.kernels.sublayers.native_mixture import NativeMixture
from penstock.kernels.sublayers.partial_results import MAX_HEAD_DIM, SPLIT_KEYS, partial_bytes
from penstock.kernels.sublayers.whole_layer import LayersStep, WholeLayer

if TYPE_CHECKING:
    from penstock.kernels.sublayers.mixer import Mixer

#: With more tokens the single operations take so long that nothing is saved.
MOST_TOKENS = 16
#: Bytes (experts.h).
ALIGNED = 64


class NativeSublayers:
    """cpu/sublayers/, called through ctypes."""

    def __init__(
        self, library: Any, activation_bits: int, experts: ExpertKernels, notice: ClampNotice
    ) -> None:
        """`experts` have the same library."""
        self._library = library
        self._activation_bits = activation_bits
        self._experts = experts
        self._notice = notice

    def attend(
        self, sublayer: AttentionSublayer, hidden: Tensor, kv: LayerKV, batch: BatchLayout, turns: Turns
    ) -> tuple[Tensor, Tensor] | None:
        known, (num_tokens, width) = sublayer.native, hidden.shape
        if known is None or num_tokens > MOST_TOKENS or kv.native[4] > MAX_HEAD_DIM:
            return None
        cos, sin = turns
        summed, normed = torch.empty(num_tokens, width), torch.empty(num_tokens, width)
        room, _held = scratch(4 * _scratch_floats(known, num_tokens))
        num_bytes = _partial_bytes(sublayer, kv, batch, num_tokens)
        partials = torch.empty(num_bytes // 4) if num_bytes else None
        has_clamped = self._library.penstock_attention_sublayer(
            known.address, hidden.data_ptr(), num_tokens, address(cos), address(sin),
            0 if cos is None else cos.shape[1], batch.slot_mapping.data_ptr(), *kv.native, *batch.native,
            self._activation_bits, summed.data_ptr(), normed.data_ptr(), room, address(partials),
        )  # fmt: skip
        if has_clamped:
            self._notice.give()
        return summed, normed

    def gated_mlp(self, weights: GatedExpert, x: Tensor, function: GatedFunction) -> Tensor | None:
        num_tokens = len(x)
        if weights.native is None or num_tokens > MOST_TOKENS:
            return None
        y = torch.empty(num_tokens, weights.down.out_features)
        self._experts.compute(x, _rows(num_tokens), [(weights, 0, num_tokens)], function, y)
        return y

    def mix(self, mixer: Mixer, x: Tensor, kv: LayerKV, batch: BatchLayout) -> Tensor | None:
        known = mixer.native
        if known is None or batch.states is None:
            return None
        (num_tokens, _), states = x.shape, array("q", batch.native_states)
        y = torch.empty(num_tokens, mixer.out.out_features)
        room, _held = scratch(4 * _scratch_floats(known, num_tokens))
        self._library.penstock_mix(
            known.address, x.data_ptr(), num_tokens, *kv.native_states, states.buffer_info()[0],
            self._activation_bits, y.data_ptr(), room,
        )  # fmt: skip
        return y

    def layers(
        self, layers: Sequence[WholeLayer], hidden: Tensor, batch: BatchLayout, function: GatedFunction
    ) -> Tensor | None:
        num_tokens, width = hidden.shape
        num_floats = self._num_floats(layers, batch, num_tokens)
        mlps = [mlp for each in layers if (mlp := each.mlp.native) is not None]
        if num_floats is None or len(mlps) < len(layers) or num_tokens > MOST_TOKENS:
            return None
        step = LayersStep(batch, num_tokens, self._activation_bits, num_floats)
        numbers = array("q", [number for each in layers for number in each.numbers])
        y = torch.empty(4, num_tokens, width)
        row_bytes = max(mlp.row_bytes for mlp in mlps)
        mlp_scratch = torch.empty(scratch_bytes(1, padded_rows(num_tokens), row_bytes) // 4)
        has_clamped = self._library.penstock_layers(
            numbers.buffer_info()[0], len(layers), step.address, hidden.data_ptr(),
            _rows(num_tokens).data_ptr(), *gated_code(function), layers[0].first.factor, y.data_ptr(),
            mlp_scratch.data_ptr(),
        )  # fmt: skip
        if has_clamped:
            self._notice.give()
        return y[0]

    def mixture(
        self,
        layers: Sequence[MixtureLayer],
        batch: BatchLayout,
        routing: Routing,
        function: GatedFunction,
        given: Sequence[GivenChoice] = (),
    ) -> NativeMixture | None:
        num_floats = self._num_floats(layers, batch, 1)
        is_known = all(each.shared is None or each.shared.expert.native is not None for each in layers)
        if num_floats is None or not is_known or batch.num_tokens != 1:
            return None
        step = LayersStep(batch, 1, self._activation_bits, num_floats)
        return NativeMixture(self._library, layers, given, step, (routing, function), self._notice)

    def _num_floats(
        self, layers: Sequence[WholeLayer | MixtureLayer], batch: BatchLayout, num_tokens: int
    ) -> tuple[int, int] | None:
        """Of the scratch memory of layers, and of attention's partial results, for the layer that needs most.
        None: a layer is not known, or its states are not at hand."""
        most, partials = 0, set[int]()
        for each in layers:
            known = each.first.native
            if known is None:
                return None
            most = max(most, _scratch_floats(known, num_tokens))
            if isinstance(each.first, AttentionSublayer):
                partials.add(_partial_bytes(each.first, each.kv, batch, num_tokens))
            elif batch.states is None:
                return None
        if (len(partials) > 1 and 0 in partials) or any(_is_wide(each) for each in layers):
            return None
        return most, max(partials, default=0) // 4


def _is_wide(layer: WholeLayer | MixtureLayer) -> bool:
    """Whether heads of attention are wider than these kernels have them."""
    return isinstance(layer.first, AttentionSublayer) and layer.kv.native[4] > MAX_HEAD_DIM


def _scratch_floats(known: NativeSublayer, num_tokens: int) -> int:
    """For penstock_attention_sublayer. The products' part begins at a multiple of ALIGNED."""
    return num_tokens * known.token_floats + (padded_rows(num_tokens) * known.product_bytes + ALIGNED) // 4


def _partial_bytes(sublayer: AttentionSublayer, kv: LayerKV, batch: BatchLayout, num_tokens: int) -> int:
    """Of partial results, where threads share sequences; else 0."""
    num_keys = batch.native[1] * kv.native[5]
    if num_keys <= SPLIT_KEYS:
        return 0
    return partial_bytes(num_tokens * sublayer.spec.num_heads, num_keys, kv.native[4])


@cache
def _rows(num_tokens: int) -> Tensor:
    """All rows, in their order."""
    return torch.arange(num_tokens)
