"""Architecture: what the files of a model hold. config.json becomes numbers, and the tensors of embedding,
layers and head are declared by their names in a checkpoint. family.py computes with them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import replace
from typing import Any, ClassVar

from penstock.model.config_values import count, refuse, require
from penstock.model.rope import FULL, WINDOW
from penstock.spec import ModelSpec
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.own_head import HEAD
from penstock.weights.formats.weight_format import INT8
from penstock.weights.tensors import ModelTensors, Stack, TensorSpec, decoder_only

#: The tensor that every recurrent layer has, and no other: the weights of its convolution.
CONV = "conv"


class Architecture(ABC):
    """What a checkpoint of one architecture holds, without any arithmetic.

    A subclass declares tensors by their names in Hugging Face checkpoints and gives them our names: "qkv",
    "o", "gate_up" ("up"), "down", and "input_norm", "post_norm" for the norms.
    """

    #: Names in config.json's `architectures`.
    architectures: ClassVar[tuple[str, ...]]
    #: Prefix that checkpoints of the bare model leave out.
    optional_prefix: ClassVar[str] = "model."
    #: Regular expressions of tensors that a checkpoint may have and that nobody needs.
    unused_tensors: ClassVar[tuple[str, ...]] = ()
    #: Matrices of layers by which Family.project() does not multiply, so that adapters can't change them.
    unadapted: ClassVar[tuple[str, ...]] = ("kv_b",)

    @classmethod
    @abstractmethod
    def read_spec(cls, config: dict[str, Any]) -> ModelSpec:
        """config.json as numbers. Raises UnsupportedModel for a variant that we don't compute."""

    @classmethod
    def named_as(cls, spec: ModelSpec, names: Collection[str]) -> ModelSpec:
        """The spec for a checkpoint whose tensors have these names. Raises UnsupportedModel."""
        return spec

    @classmethod
    def may_have_mtp(cls, spec: ModelSpec) -> bool:
        """Whether there are checkpoints of the model with a head of multi-token prediction."""
        return False

    @classmethod
    def mtp_spec(cls, spec: ModelSpec, names: Collection[str] | None) -> ModelSpec | None:
        """The head of multi-token prediction that a checkpoint with tensors of these names holds, as a model
        of one layer; None if there is none. Without names: that config.json tells of."""
        return None

    @classmethod
    @abstractmethod
    def embedding_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        """The tensors of Family.embed(); "embedding" is the INT8 matrix [vocab_size, hidden_size]. It has
        more rows where the model has a soft prompt."""

    @classmethod
    @abstractmethod
    def layer_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        """The tensors of Family.layer(), in the order in which they are used."""

    @classmethod
    @abstractmethod
    def head_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        """The tensors of Family.head(). Without a matrix "head" the embedding's serves (tied)."""

    @classmethod
    def stacks(cls, spec: ModelSpec) -> tuple[Stack, ...]:
        """The layers. A family with more than one stack, or with experts, declares them here;
        Family.layer_of() says what a layer of another stack computes."""
        return decoder_only(tuple(cls.layer_tensors(spec, index) for index in range(spec.num_layers)))

    @classmethod
    def separate(cls, checkpoint: Checkpoint, spec: ModelSpec) -> Checkpoint:
        """The checkpoint, in whose `entries` tensors are put apart that hold several of those that the family
        declares."""
        return checkpoint

    @classmethod
    def embedding_matrix(cls, spec: ModelSpec) -> TensorSpec:
        """The tensor "embedding", without the other tensors of embed()."""
        return next(tensor for tensor in cls.embedding_tensors(spec) if tensor.name == "embedding")

    @classmethod
    def head_matrix(cls, spec: ModelSpec) -> TensorSpec:
        """The tensor "head" of a model that is not tied, whether `spec` is or not."""
        tensors = cls.head_tensors(replace(spec, is_tied=False))
        return next(tensor for tensor in tensors if tensor.name == "head")

    @classmethod
    def model_tensors(cls, spec: ModelSpec) -> ModelTensors:
        """All declared tensors."""
        # A tied model may have a head in its files. That this head is the embedding's matrix was found out
        # when the model was opened.
        heads = {cls.head_matrix(spec).parts[0], HEAD} if spec.is_tied else ()
        unused = tuple(rf"^{re.escape(name)}(_scale|_shape)?$" for name in sorted(heads))
        return ModelTensors(
            cls.embedding_tensors(spec),
            cls.stacks(spec),
            cls.head_tensors(spec),
            cls.optional_prefix,
            cls.unused_tensors + unused,
            spec.vocab_size if spec.soft_prompt else None,
        )


def linear_tensors(
    name: str,
    shape: tuple[int, int],
    parts: tuple[str, ...],
    has_bias: bool = True,
    is_transposed: bool = False,
) -> tuple[TensorSpec, ...]:
    """The INT8 matrix `name`, of `shape` (out_features, in_features), from the checkpoint modules `parts`;
    and its bias."""
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


def layer_kinds(config: dict[str, Any], num_layers: int, period: int = 0) -> tuple[str, ...]:
    """The kind of each layer. Where `layer_types` does not tell, every `period`-th layer is a full one and
    the others have a window; with a period of 0 all layers are full. Raises InvalidConfig, and
    UnsupportedModel for another kind."""
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(WINDOW if period and (index + 1) % period else FULL for index in range(num_layers))
    if not isinstance(kinds, list | tuple) or len(kinds) != num_layers:
        refuse("layer_types", kinds, f"a list with the kind of each of {num_layers} layers")
    for kind in kinds:
        require({"layer_types": kind, "model_type": config.get("model_type")}, "layer_types", FULL, WINDOW)
    return tuple(kinds)


def sliding_windows(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """The window of each layer, 0 for none; () if no layer has one. Newer configs name each layer's kind in
    `layer_types`; otherwise all layers have `sliding_window`. Raises InvalidConfig."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ()
    window = count(config, "sliding_window")
    if config.get("layer_types") is None:
        return (window,) * num_layers
    windows = tuple(window if kind == WINDOW else 0 for kind in layer_kinds(config, num_layers))
    return windows if any(windows) else ()
