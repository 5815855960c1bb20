"""Executor: one sweep of the layers over a step's tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from penstock.generation.batch import ModelInputs
from penstock.kernels import LayerKV
from penstock.memory.kv_cache import KVCache
from penstock.model.family import Family
from penstock.weights.store import LayerWeights
from penstock.weights.streamer import LayerStreamer


class Cancelled(Exception):
    """The sweep was stopped between two layers because nobody wants its result any more."""


class Executor:
    """Holds what a sweep needs; decides nothing."""

    def __init__(
        self,
        family: Family,
        embedding: LayerWeights,
        head: LayerWeights,
        streamer: LayerStreamer,
        kv_cache: KVCache,
    ) -> None:
        self._family = family
        self._embedding = embedding
        self._head = head
        self._streamer = streamer
        self._kv_cache = kv_cache

    @torch.inference_mode()
    def forward(
        self,
        inputs: ModelInputs,
        is_cancelled: Callable[[], bool] = lambda: False,
        observe: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Logits float32 [num_sampled, vocab_size]; writes K and V of all the step's tokens.

        is_cancelled is asked before each layer; Cancelled is raised once it says yes. The KV cache then
        holds some layers of the step's tokens, which must be computed again. observe(index, hidden) is shown
        what each layer made of the step's tokens, float32 [num_tokens, hidden_size].
        """
        layout = inputs.layout
        hidden = self._family.embed(self._embedding, inputs.input_ids, layout.positions)
        with contextlib.closing(self._streamer.layers()) as sweep:
            for index, weights in enumerate(sweep):
                if is_cancelled():
                    raise Cancelled
                kv = LayerKV(*self._kv_cache.layer(index))
                hidden = self._family.layer(index, weights, hidden, kv, layout)
                if observe is not None:
                    observe(index, hidden)
        return self._family.head(self._head, self._embedding, hidden[inputs.logits_indices])
