"""Family: what embed, layer and head of a model compute. The tensors that they compute with are declared as
architecture.py says. A family is code and holds no weights: weights are handed in."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from penstock.errors import MALFORMED, InvalidConfig
from penstock.kernels import AttentionSpec, BatchLayout, Kernels, LayerKV
from penstock.model.architecture import Architecture
from penstock.model.pooling.pooling_spec import PoolingSpec
from penstock.model.rope import RopeTable
from penstock.spec import KVLayout, ModelSpec, RopeSpec
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import ModelTensors

#: (index, weights, hidden, kv, batch) -> hidden, as Family.layer() has it.
LayerFunction = Callable[[int, LayerWeights, Tensor, LayerKV, BatchLayout], Tensor]


class GivenRows(NamedTuple):
    """Vectors that a caller gives in place of tokens."""

    rows: Tensor  # int64 [num_given]: which of the step's tokens these are
    vectors: Tensor  # float32 [num_given, hidden_size]


class Family(Architecture):
    """One architecture, computed with one set of kernels. Each family of models is one subclass: the subclass
    overrides what is abstract here and in Architecture, and every method that the family does differently."""

    #: How vectors or scores are made, in a PooledFamily. None: the model writes text.
    pooling: ClassVar[PoolingSpec | None] = None
    #: The modules of the layers that make scores of the first token: tanh stands after all but the last.
    #: (): one layer scores the last token.
    score_parts: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        spec: ModelSpec,
        kernels: Kernels,
        max_model_len: int,
        device: torch.device | None = None,
        host_kernels: Kernels | None = None,
    ) -> None:
        """Layers and head are computed on `device` (None: the host); embed() always runs on the host, and
        computes with `host_kernels` where `kernels` are a card's."""
        self.spec = spec
        self.kernels = kernels
        self.host_kernels = host_kernels or kernels
        self.device = device or torch.device("cpu")
        stacks = self.stacks(spec)
        #: The stacks that a step sweeps, in this order.
        self.stack_names = tuple(stack.name for stack in stacks if not stack.is_encoder)
        #: The stacks that are swept once for each request.
        self.encoder_stack_names = tuple(stack.name for stack in stacks if stack.is_encoder)
        tables = [(rope, _rope_table(rope, max_model_len, device)) for rope in spec.ropes]
        #: The rope of each layer; None for a layer without.
        self.ropes = [
            next((table for rope, table in tables if rope == spec.rope_of(index)), None)
            for index in range(spec.num_layers)
        ]
        everywhere = self.attention_spec()
        head_counts = spec.head_counts or (everywhere.num_heads,) * spec.num_layers
        #: What attention computes in each layer.
        self.attentions = [
            replace(
                everywhere,
                num_heads=head_counts[index],
                window=spec.sliding_window(index),
                chunk=spec.attention_chunk(index),
            )
            for index in range(spec.num_layers)
        ]

    def with_kernels(self, kernels: Kernels) -> Family:
        """The same family, which computes with other kernels."""
        twin = copy.copy(self)
        if twin.host_kernels is twin.kernels:
            twin.host_kernels = kernels
        twin.kernels = kernels
        return twin

    def is_invariant(self, tensors: ModelTensors, kv_layout: KVLayout) -> bool:
        """Whether a request gets the same bits in any company. Our own families promise it, and tests show
        it."""
        return True

    def attention_spec(self) -> AttentionSpec:
        """What attention computes in every layer, apart from its window."""
        return AttentionSpec(self.spec.num_heads, self.spec.head_dim**-0.5)

    def layer_of(self, stack: str) -> LayerFunction:
        """The function that computes the layers of a stack, which is layer() by default. The index that this
        function gets counts the layers of all stacks that are swept together."""
        return self.layer

    #: How many layers are lent at once, at most, if they stay in memory. layers() is asked for all of them.
    most_together = 1

    def layers(
        self,
        indices: Sequence[int],
        weights: Sequence[LayerWeights],
        hidden: Tensor,
        caches: Sequence[LayerKV],
        batch: BatchLayout,
        go_on: Callable[[], object],
    ) -> Tensor | None:
        """What layer() makes of the hidden states in layers that follow each other. None: this was not done,
        and layer() has to do it. go_on() is called where several calls of the kernels are needed, between
        two of them; what it raises ends the step."""
        return None

    def kv_layer(self, stack: str, index: int) -> int:
        """The layer of the KV cache that a layer reads and writes."""
        return index

    def share(self, embedding: LayerWeights) -> None:
        """Take what all layers share from the embedding's unit. Whoever sweeps calls this once before."""

    def project(self, weights: LayerWeights, name: str, x: Tensor) -> Tensor:
        """x float32 [num_tokens, in_features] times the matrix `name`, plus the bias if there is one ->
        float32 [num_tokens, out_features]. Adapters add their shares."""
        y = self.kernels.linear(x, weights.matrix(name), weights.optional(f"{name}.bias"))
        if weights.adapted is not None:
            weights.adapted.add(self.kernels, name, x, y)
        return y

    def embed(
        self, weights: LayerWeights, input_ids: Tensor, positions: Tensor, given: GivenRows | None = None
    ) -> Tensor:
        """int64 [num_tokens] -> hidden float32 [num_tokens, hidden_size], or more numbers for the layers
        (ModelSpec.row_size). The ids of `given` rows don't count."""
        vectors = self.scale_tokens(weights.matrix("embedding").look_up(input_ids))
        if given is not None:
            vectors[given.rows] = given.vectors
        return self.place(weights, vectors, positions)

    def scale_tokens(self, vectors: Tensor) -> Tensor:
        """What the model makes of the embedding's rows, and not of vectors that a caller gives in their
        place."""
        return vectors

    def place(self, weights: LayerWeights, vectors: Tensor, positions: Tensor) -> Tensor:
        """What the first layer gets of embedded tokens [num_tokens, hidden_size] at their positions."""
        return vectors

    @abstractmethod
    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        """hidden [num_tokens, hidden_size] -> the same shape; writes the tokens' K and V."""

    @abstractmethod
    def norm_final(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        """The norm before the head."""

    def head(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] -> logits float32 [num_rows, vocab_size]. The matrix "head" of
        `weights` is the embedding's where the two are tied (with_head())."""
        return self.project(weights, "head", self.norm_final(weights, hidden))


def _rope_table(rope: RopeSpec, max_model_len: int, device: torch.device | None) -> RopeTable:
    """Raises UnsupportedModel and, for parameters that are no numbers or too few, InvalidConfig."""
    try:
        return RopeTable(rope, max_model_len, device)
    except torch.OutOfMemoryError:  # a RuntimeError, and not the folder's fault
        raise
    except (*MALFORMED, RuntimeError) as error:
        raise InvalidConfig(
            f"the parameters that config.json gives to {rope.scaling} rope make no sense ({error}); download "
            "it again"
        ) from error
