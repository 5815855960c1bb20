"""RecurrentForm: what a layer computes in place of attention, or beside it, with a recurrent state of each
sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.kernels import BatchLayout, LayerKV
from penstock.model.architecture import CONV
from penstock.model.family import Family
from penstock.spec import ModelSpec
from penstock.state_layout import StateLayout
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec

if TYPE_CHECKING:
    from penstock.kernels.sublayers.mixer import Mixer


class RecurrentForm(Protocol):
    """The sizes of a recurrence. Tokens of a sequence are computed one after the other, so a chunk of a
    prompt goes on where the last one ended, and its bits don't depend on the chunks."""

    @property
    def layout(self) -> StateLayout:
        """The state of a sequence in one layer."""

    def tensors(self, spec: ModelSpec, prefix: str) -> tuple[TensorSpec, ...]:
        """The tensors of mix(), whose names in a checkpoint begin with `prefix`, that of the layer."""

    def mix(
        self, family: Family, weights: LayerWeights, x: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        """What the recurrence makes of normed x [num_tokens, hidden_size], with the output projection."""

    def mixer(self, spec: ModelSpec, weights: LayerWeights) -> Mixer:
        """The same for kernels that compute it in one call."""


def conv_tensors(channels: int, width: int, part: str, has_bias: bool) -> tuple[TensorSpec, ...]:
    """The weights of a short convolution, and its bias."""
    weight = TensorSpec(CONV, (channels, 1, width), (f"{part}.weight",))
    bias = TensorSpec(f"{CONV}.bias", (channels,), (f"{part}.bias",))
    return (weight, bias) if has_bias else (weight,)


def convolve(family: Family, weights: LayerWeights, x: Tensor, kv: LayerKV, batch: BatchLayout) -> Tensor:
    """The short convolution of x [num_tokens, channels], whose state is the layer's first."""
    weight, bias = weights.vector(CONV)[:, 0].t(), weights.optional(f"{CONV}.bias")

    def compute(fed: Sequence[Tensor], states: Tensor, layout: BatchLayout) -> Tensor:
        return family.kernels.short_conv(fed[0], weight, bias, states, layout)

    return in_order((x,), 0, kv, batch, compute)


class Fed(NamedTuple):
    """What a recurrence gets of each token: Recurrences.recurrence()."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor | None = None


def recur(family: Family, fed: Fed, kv: LayerKV, batch: BatchLayout) -> Tensor:
    """The recurrence of a step's tokens, whose state is the layer's second: [num_tokens, num_heads,
    value_dim]."""
    changing = [each for each in fed[1:] if each is not None]

    def compute(rows: Sequence[Tensor], states: Tensor, layout: BatchLayout) -> Tensor:
        k, v, decay, *beta, q = rows
        return family.kernels.recurrence(q, k, v, decay, beta[0] if beta else None, states, layout)

    return in_order((*changing, fed.q), 1, kv, batch, compute)


def in_order(
    fed: Sequence[Tensor],
    part: int,
    kv: LayerKV,
    batch: BatchLayout,
    compute: Callable[[Sequence[Tensor], Tensor, BatchLayout], Tensor],
) -> Tensor:
    """compute() of what a step's tokens bring to a part of the layer's state, in the order that
    BatchLayout.guessed tells. The first tensors of `fed` are those that are kept of guesses."""
    guessed, states, kept = batch.guessed, kv.states[part], kv.kept[part] if kv.kept else ()
    if guessed is None:
        return compute(fed, states, batch)
    certain = [guessed.certain(x, own) for x, own in zip_longest(fed, kept)]
    y = compute(certain, states, guessed.layout)
    paths = guessed.paths
    if paths is None:
        return y[guessed.places]
    for x, own in zip(fed, kept, strict=False):
        own[paths.kept] = x[paths.guesses]
    ahead = kv.ahead[part][: len(paths.slots)]
    torch.index_select(states, 0, paths.slots, out=ahead)
    guesses = compute([x[paths.rows] for x in fed], ahead, paths.layout)
    return torch.cat((y, guesses))[guessed.places]
