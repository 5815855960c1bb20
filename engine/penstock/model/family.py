"""The frame of every model family: config.json -> spec, the tensors of each layer, and what embed, layer
and head compute. Families are code and hold no weights: those are handed in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.errors import InvalidConfig
from penstock.kernels import AttentionSpec, BatchLayout, Kernels, LayerKV
from penstock.model.config_values import count, refuse
from penstock.model.rope import RopeTable
from penstock.spec import ModelSpec, RopeSpec
from penstock.weights.checkpoints.formats import MALFORMED
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import ModelTensors, Stack, TensorSpec, decoder_only
from penstock.weights.weight_format import INT8

#: (index, weights, hidden, kv, batch) -> hidden, as Family.layer() has it.
LayerFunction = Callable[[int, LayerWeights, Tensor, LayerKV, BatchLayout], Tensor]


class Family(ABC):
    """One architecture, computed with one set of kernels.

    A subclass declares tensors by their names in Hugging Face checkpoints and computes with them by our
    names: "qkv", "o", "gate_up" ("up"), "down", and "input_norm", "post_norm" for the norms.
    """

    #: Names in config.json's `architectures`.
    architectures: ClassVar[tuple[str, ...]]
    #: Prefix that checkpoints of the bare model leave out.
    optional_prefix: ClassVar[str] = "model."
    #: Regular expressions of tensors that may stand in a checkpoint without being needed.
    unused_tensors: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, spec: ModelSpec, kernels: Kernels, max_model_len: int, device: torch.device | None = None
    ) -> None:
        """`device` is where layers and head are computed (None: the host); embed() always on the host."""
        self.spec = spec
        self.kernels = kernels
        self.device = device or torch.device("cpu")
        #: Of the stacks that a step sweeps, in this order.
        self.stack_names = tuple(stack.name for stack in self.stacks(spec))
        self.rope_table = _rope_table(spec.rope, max_model_len, device) if spec.rope else None
        everywhere = self.attention_spec()
        #: Of each layer.
        self.attentions = [
            replace(everywhere, window=spec.sliding_window(index)) for index in range(spec.num_layers)
        ]

    def attention_spec(self) -> AttentionSpec:
        """What attention computes in every layer, apart from its window."""
        return AttentionSpec(self.spec.num_heads, self.spec.head_dim**-0.5)

    @classmethod
    @abstractmethod
    def read_spec(cls, config: dict[str, Any]) -> ModelSpec:
        """config.json as numbers. Raises UnsupportedModel for a variant that we don't compute."""

    @classmethod
    @abstractmethod
    def embedding_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        """What embed() needs; "embedding" is the INT8 matrix [vocab_size, hidden_size]."""

    @classmethod
    @abstractmethod
    def layer_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        """What layer() needs, in the order in which it is used."""

    @classmethod
    @abstractmethod
    def head_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        """What head() needs. Without a matrix "head" the embedding's serves (tied)."""

    @classmethod
    def embedding_matrix(cls, spec: ModelSpec) -> TensorSpec:
        """The tensor "embedding", without what else embed() needs."""
        return next(tensor for tensor in cls.embedding_tensors(spec) if tensor.name == "embedding")

    @classmethod
    def head_matrix(cls, spec: ModelSpec) -> TensorSpec:
        """The tensor "head" of a model that is not tied, whether `spec` is or not."""
        tensors = cls.head_tensors(replace(spec, is_tied=False))
        return next(tensor for tensor in tensors if tensor.name == "head")

    @classmethod
    def model_tensors(cls, spec: ModelSpec) -> ModelTensors:
        """All of the above."""
        # A head that is the embedding's matrix; any other was found when the model was opened.
        unused = cls.unused_tensors + (
            (r"^(lm_head|embed_out)\.weight(_scale|_shape)?$",) if spec.is_tied else ()
        )
        return ModelTensors(
            cls.embedding_tensors(spec),
            cls.stacks(spec),
            cls.head_tensors(spec),
            cls.optional_prefix,
            unused,
        )

    @classmethod
    def stacks(cls, spec: ModelSpec) -> tuple[Stack, ...]:
        """The layers. A family with more than one stack, or with experts, declares them here, and what a
        layer of another stack computes in layer_of()."""
        return decoder_only(tuple(cls.layer_tensors(spec, index) for index in range(spec.num_layers)))

    def layer_of(self, stack: str) -> LayerFunction:
        """What computes the layers of a stack, told a layer's index as all stacks together count: layer()."""
        return self.layer

    def project(self, weights: LayerWeights, name: str, x: Tensor) -> Tensor:
        """x float32 [num_tokens, in_features] times the matrix `name`, with the bias that it may have ->
        float32 [num_tokens, out_features]."""
        return self.kernels.linear(x, weights.matrix(name), weights.optional(f"{name}.bias"))

    def embed(self, weights: LayerWeights, input_ids: Tensor, positions: Tensor) -> Tensor:
        """int64 [num_tokens] -> hidden float32 [num_tokens, hidden_size]."""
        return weights.matrix("embedding").look_up(input_ids)

    @abstractmethod
    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        """hidden [num_tokens, hidden_size] -> the same shape; writes the tokens' K and V."""

    @abstractmethod
    def norm_final(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        """The norm before the head."""

    def layer_norm(self, name: str, weights: LayerWeights, x: Tensor) -> Tensor:
        """The layer norm that layer_norm_tensors() declared."""
        bias = weights.optional(f"{name}.bias")
        return self.kernels.layer_norm(x, weights.vector(name), bias, self.spec.norm_eps)

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


def linear_tensors(
    name: str,
    shape: tuple[int, int],
    parts: tuple[str, ...],
    has_bias: bool = True,
    is_transposed: bool = False,
) -> tuple[TensorSpec, ...]:
    """The INT8 matrix `name` (out_features, in_features) of checkpoint modules `parts`, and its bias."""
    weights, biases = tuple(f"{part}.weight" for part in parts), tuple(f"{part}.bias" for part in parts)
    matrix = TensorSpec(name, shape, weights, INT8, is_transposed)
    bias = TensorSpec(f"{name}.bias", shape[:1], biases)
    return (matrix, bias) if has_bias else (matrix,)


def layer_norm_tensors(name: str, width: int, part: str) -> tuple[TensorSpec, TensorSpec]:
    """Weight and bias of a layer norm."""
    return (
        TensorSpec(name, (width,), (f"{part}.weight",)),
        TensorSpec(f"{name}.bias", (width,), (f"{part}.bias",)),
    )


def sliding_windows(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Per layer, from `layer_types` (newer configs) or `sliding_window` for all; () if there are none.
    Raises InvalidConfig."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ()
    window, types = count(config, "sliding_window"), config.get("layer_types")
    if types is None:
        return (window,) * num_layers
    if not isinstance(types, list) or len(types) != num_layers:
        refuse("layer_types", types, f"a list with the kind of each of {num_layers} layers")
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in types)
    return windows if any(windows) else ()
