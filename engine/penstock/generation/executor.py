"""Executor: one sweep of the layers over a step's tokens."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from penstock.cache.kv_cache import KVCache
from penstock.generation.layer_caches import KVSweep, layer_caches
from penstock.generation.model_inputs import EncodedInputs, ModelInputs
from penstock.kernels import BatchLayout
from penstock.memory.host_lane import PlainInlet
from penstock.memory.lane import Inlet
from penstock.model.family import Family
from penstock.weights.layer_weights import LayerWeights

if TYPE_CHECKING:
    from penstock.cache.spill.spilled_cache import SpilledKVCache
    from penstock.memory.planning.splits_in_ram import AttendsInRam


class Cancelled(Exception):
    """The sweep was stopped between two layers because nobody wants its result any more."""


class LayerSource(Protocol):
    """Brings the layers, one after the other, to the device that computes them: a LayerStreamer, or a test's
    own source."""

    @property
    def torch_device(self) -> torch.device: ...

    def begin_step(self, num_tokens: int) -> None:
        """The layers that are asked for next are for a step of so many tokens."""

    def runs(self, stack: str, most: int) -> Generator[list[LayerWeights], None, None]:
        """One sweep of a stack: layers that follow each other and are there at the same time, at most `most`,
        and then the next ones. They are valid until the next ones are asked for."""

    def synchronize(self) -> None: ...


class Executor:
    """Holds what a sweep needs; decides nothing."""

    def __init__(
        self,
        family: Family,
        embedding: LayerWeights,
        head: LayerWeights,
        streamer: LayerSource,
        kv_cache: KVCache | SpilledKVCache,
        max_rows: int = 64,
        places: Sequence[int] = (),
        inlet: Inlet | None = None,
        attends_in_ram: AttendsInRam | None = None,
    ) -> None:
        """`embedding` is on the host. Everything else is on the device to which the streamer brings the
        layers. `head` is complete (with_head()). `max_rows`: logits of at most so many tokens are in memory
        at a time. `places`: the places in the model of the layers that the streamer brings; (): it brings all
        layers, in their order. `inlet`: None copies tensor by tensor. `attends_in_ram`: how the processor
        attends to keys and values in RAM beside a card, if it does."""
        family.share(embedding)
        self._family = family
        self._embedding = embedding
        self._head = head
        self._streamer = streamer
        self._kv_cache = kv_cache
        self._inlet = inlet or PlainInlet(streamer.torch_device)
        self.caches = layer_caches(kv_cache, family.spec, self._inlet, attends_in_ram)
        self._max_rows = max_rows
        self._places = places

    @property
    def family(self) -> Family:
        """The model's code."""
        return self._family

    @property
    def ends(self) -> tuple[LayerWeights, LayerWeights]:
        """The weights of embedding and head."""
        return self._embedding, self._head

    def beside(self, streamer: LayerSource, family: Family) -> Executor:
        """The same model with the same keys and values, whose layers come from elsewhere and are computed by
        a family with other kernels."""
        return Executor(
            family, self._embedding, self._head, streamer, self._kv_cache, self._max_rows, self._places,
            self._inlet,
        )  # fmt: skip

    @property
    def kv_cache(self) -> KVCache | SpilledKVCache:
        """The keys and values."""
        return self._kv_cache

    def forward(
        self,
        inputs: ModelInputs,
        is_cancelled: Callable[[], bool] = lambda: False,
        observe: Callable[[int, Tensor], None] | None = None,
    ) -> Iterator[Tensor]:
        """Sweep, as sweep() says. Returns the logits of the wanted rows in order, on the host, in parts:
        float32 [at most max_rows, vocab_size]. A part is computed when the caller asks for it, and raises
        Cancelled if is_cancelled() says yes."""
        return self.logits(self.wanted(inputs, is_cancelled, observe), is_cancelled)

    @torch.inference_mode()
    def wanted(
        self,
        inputs: ModelInputs,
        is_cancelled: Callable[[], bool] = lambda: False,
        observe: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """The wanted rows of what sweep() returns."""
        hidden, rows = self._sweep_all(inputs, is_cancelled, observe, None)
        return hidden[rows]

    def logits(self, wanted: Tensor, is_cancelled: Callable[[], bool] = lambda: False) -> Iterator[Tensor]:
        """The logits of rows of what sweep() returned, as forward() gives them."""
        for first in range(0, len(wanted), self._max_rows):
            if is_cancelled():
                raise Cancelled
            yield self.head(wanted[first : first + self._max_rows])

    @torch.inference_mode()
    def sweep(
        self,
        inputs: ModelInputs,
        is_cancelled: Callable[[], bool] = lambda: False,
        observe: Callable[[int, Tensor], None] | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of the step's tokens after the last layer, float32 [num_tokens, hidden_size], on the
        compute device. K and V of the tokens are written. Inputs that have to be encoded are encoded before.

        is_cancelled() is called before each layer, or each call of the kernels for several layers. If
        is_cancelled() says yes, sweep() raises Cancelled. The KV cache then holds the step's tokens for some
        layers only, so the tokens must be computed again.
        observe(index, hidden) gets the hidden states after each layer. `hidden` is what the layers before the
        first one here made of the step's tokens; None: the tokens are embedded.
        """
        return self._sweep_all(inputs, is_cancelled, observe, hidden)[0]

    def _sweep_all(
        self,
        inputs: ModelInputs,
        is_cancelled: Callable[[], bool],
        observe: Callable[[int, Tensor], None] | None,
        hidden: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """What sweep() returns, and the wanted rows' numbers there."""
        self._streamer.begin_step(inputs.layout.num_tokens)
        family, encoded = self._family, inputs.encoded
        with self.caches.sweep(inputs) as kv:
            if encoded is not None:
                names = family.encoder_stack_names
                layout = encoded.layout.with_tensors(self._inlet.bring(encoded.layout.tensors()))
                self._sweep(names, encoded, layout, kv, is_cancelled, None)
            rows, *parts = self._inlet.bring([inputs.wanted_rows, *inputs.layout.tensors()])
            layout = inputs.layout.with_tensors(parts)
            return self._sweep(family.stack_names, inputs, layout, kv, is_cancelled, observe, hidden), rows

    def _sweep(
        self,
        stacks: tuple[str, ...],
        inputs: ModelInputs | EncodedInputs,
        layout: BatchLayout,
        kv: KVSweep,
        is_cancelled: Callable[[], bool],
        observe: Callable[[int, Tensor], None] | None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """`layout` is the inputs' own, where the layers are computed."""
        if hidden is None:
            positions = inputs.layout.positions
            hidden = self._family.embed(self._embedding, inputs.input_ids, positions, inputs.given)
        (hidden,) = self._inlet.bring([hidden])  # apart: it is gone after the first layer
        counter = iter(self._places) if self._places else itertools.count()
        # Layers come one by one where each one's result is seen, adapters add to it, or its cache has turns.
        is_alone = observe is not None or inputs.adapters is not None or kv.layers([]) is None
        most = 1 if is_alone else self._family.most_together
        for stack in stacks:
            compute = self._family.layer_of(stack)
            numbers = itertools.count()
            with contextlib.closing(self._streamer.runs(stack, most)) as sweep:
                for run in sweep:
                    indices = list(itertools.islice(counter, len(run)))
                    if is_cancelled():
                        raise Cancelled
                    together = self._together(stack, indices, run, hidden, kv, layout, is_cancelled)
                    if together is not None:
                        hidden = together
                        continue
                    for weights, index in zip(run, indices, strict=True):
                        if is_cancelled():
                            raise Cancelled
                        if inputs.adapters is not None:
                            weights = inputs.adapters.onto(weights, stack, next(numbers))
                        with kv.layer(self._family.kv_layer(stack, index), layout) as (own, rows):
                            hidden = compute(index, weights, hidden, own, rows)
                        if observe is not None:
                            observe(index, hidden)
        return hidden

    def _together(
        self,
        stack: str,
        indices: Sequence[int],
        run: Sequence[LayerWeights],
        hidden: Tensor,
        kv: KVSweep,
        layout: BatchLayout,
        is_cancelled: Callable[[], bool],
    ) -> Tensor | None:
        """What several layers make of the hidden states together. None: they are computed one by one."""
        if len(run) == 1:
            return None

        def go_on() -> None:
            if is_cancelled():
                raise Cancelled

        caches = kv.layers([self._family.kv_layer(stack, index) for index in indices])
        return None if caches is None else self._family.layers(indices, run, hidden, caches, layout, go_on)

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Logits float32 [num_rows, vocab_size], on the host, of rows of what sweep() returned."""
        logits = self._family.head(self._head, hidden).to("cpu")
        self._streamer.synchronize()
        return logits

    @torch.inference_mode()
    def norm_final(self, hidden: Tensor) -> Tensor:
        """What the head's matrix gets of rows of what sweep() returned, on the host."""
        return self._family.norm_final(self._head, hidden).to("cpu")
