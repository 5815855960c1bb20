"""ThroughTransformers: the family of every causal model that transformers computes and no family of ours
does. transformers' modules compute each layer, with our products, norms and attention in them."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils._pytree import tree_map

from penstock.errors import PenstockError, UnsupportedModel
from penstock.kernels import AttentionSpec, BatchLayout, Kernels, LayerKV
from penstock.model.family import Family, GivenRows
from penstock.model.through_transformers import attention, guard
from penstock.model.through_transformers.auto_model import auto_config
from penstock.model.through_transformers.desk import Desk, LayerStep
from penstock.model.through_transformers.experts import separate
from penstock.model.through_transformers.names import named_as
from penstock.model.through_transformers.outline import Given, Passed
from penstock.model.through_transformers.skeleton import build, read
from penstock.model.through_transformers.transformers_spec import TransformersSpec
from penstock.spec import DECODER, KVLayout, ModelSpec
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import ModelTensors, Stack, TensorSpec


class ThroughTransformers(Family):
    """Layers are transformers' own modules, as functions of weights. What forward() passes to the layers is
    the same for all layers of a step, and is computed once for each step."""

    architectures = ()
    optional_prefix = ""
    spec: TransformersSpec

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> TransformersSpec:
        return read(config)

    @classmethod
    def named_as(cls, spec: ModelSpec, names: Collection[str]) -> TransformersSpec:
        return named_as(_own(spec), names)

    @classmethod
    def separate(cls, checkpoint: Checkpoint, spec: ModelSpec) -> Checkpoint:
        own = _own(spec)
        separate(checkpoint, own.experts, own.has_transposed_experts)
        return checkpoint

    @classmethod
    def model_tensors(cls, spec: ModelSpec) -> ModelTensors:
        tensors = super().model_tensors(spec)
        idle = tuple(rf"^{re.escape(name)}$" for name in _own(spec).idle)
        return replace(tensors, unused=tensors.unused + idle)

    @classmethod
    def embedding_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        return _own(spec).embedding

    @classmethod
    def layer_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        return _own(spec).layers[index]

    @classmethod
    def stacks(cls, spec: ModelSpec) -> tuple[Stack, ...]:
        own = _own(spec)
        return (Stack(DECODER, own.layers, own.experts if any(own.experts) else ()),)

    @classmethod
    def head_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        return tuple(each for each in _own(spec).head if not (spec.is_tied and each.name == "head"))

    def __init__(
        self,
        spec: ModelSpec,
        kernels: Kernels,
        max_model_len: int,
        device: torch.device | None = None,
        host_kernels: Kernels | None = None,
    ) -> None:
        super().__init__(spec, kernels, max_model_len, device, host_kernels)
        self.desk = Desk(kernels, self.project, spec.head_dim, spec.num_kv_heads)
        self.skeleton = build(auto_config(self.spec.config), self.desk)
        self.skeleton.outline.num_returned = self.spec.num_returned
        self.attentions = [
            AttentionSpec(each.num_heads, each.scale, each.window, each.softcap)
            for each in self.spec.attentions
        ]
        #: What forward() passed to the layers of the last step, and the positions of that step.
        self._passed: tuple[Tensor | None, list[Passed]] = None, []
        self._before = _Outer(self, self.spec.embedding)
        self._after = _Outer(self, self.spec.head)

    def is_invariant(self, tensors: ModelTensors, kv_layout: KVLayout) -> bool:
        try:
            return guard.is_invariant(self, tensors, kv_layout)
        except PenstockError:
            raise
        except Exception as error:  # other people's code, which raises what it likes
            raise UnsupportedModel(
                f"{self.spec.architecture} fails with random weights ({type(error).__name__}: {error})"
            ) from error

    def embed(
        self, weights: LayerWeights, input_ids: Tensor, positions: Tensor, given: GivenRows | None = None
    ) -> Tensor:
        def put_in(vectors: Tensor) -> Tensor:
            assert given is not None
            vectors = vectors.clone()
            vectors[0, given.rows] = given.vectors
            return vectors

        rows = weights.matrix("embedding").look_up(input_ids)
        step = Given(rows, positions, input_ids, put_in if given is not None else None)
        hidden, passed = self.skeleton.outline.before(step, self._before.lay(weights))
        self._passed = positions, passed
        return hidden

    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        parts, desk = self.skeleton.layers[index], self.desk
        passed = self._passed_at(batch)[index]
        desk.weights, desk.absent = weights, {}
        desk.step = LayerStep(kv, batch, self.spec.attentions[index], self.attentions[index])
        args, kwargs = passed.with_hidden(hidden.unsqueeze(0))
        own = desk.own(parts.own)
        with desk.functions:
            result = (
                functional_call(parts.module, own, args, kwargs) if own else parts.module(*args, **kwargs)
            )
        found: Tensor = result[0] if isinstance(result, tuple) else result
        return found[0]

    def layer_with_own_attention(self, index: int, weights: LayerWeights, hidden: Tensor) -> Tensor:
        """layer() of one text from its beginning, with attention as transformers computes it. For guard.py,
        which compares the two."""
        outline, parts = self.skeleton.outline, self.skeleton.layers[index]
        config = outline.model.config
        rows = torch.zeros(()).expand(len(hidden), self.spec.embedding[0].shape[1])
        try:
            config._attn_implementation = "eager"
            _, passed = outline.before(Given(rows, torch.arange(len(hidden))), self._before.lay_zeros())
            self.desk.weights, self.desk.absent = weights, {}
            args, kwargs = tree_map(self._on_device, passed[index]).with_hidden(hidden.unsqueeze(0))
            result = functional_call(parts.module, self.desk.own(parts.own), args, kwargs)
        finally:
            config._attn_implementation = attention.NAME
        found: Tensor = result[0] if isinstance(result, tuple) else result
        return found[0]

    def _passed_at(self, batch: BatchLayout) -> list[Passed]:
        """What forward() passes to the layers at a step's positions."""
        positions, passed = self._passed
        if positions is not batch.positions:
            rows = torch.zeros(()).expand(batch.num_tokens, self.spec.embedding[0].shape[1])
            step = Given(rows, batch.positions.to("cpu"))
            _, on_host = self.skeleton.outline.before(step, self._before.lay_zeros())
            passed = [tree_map(self._on_device, each) for each in on_host]
            self._passed = batch.positions, passed
        return passed

    def _on_device(self, value: Any) -> Any:
        return value.to(self.device) if isinstance(value, Tensor) else value

    def norm_final(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        """The norm is part of head()."""
        return hidden

    def head(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        num_rows, width = hidden.shape[0], self.spec.embedding[0].shape[1]
        rows = torch.zeros((), device=hidden.device).expand(num_rows, width)
        positions = torch.arange(num_rows, device=hidden.device)
        return self.skeleton.outline.after(Given(rows, positions), hidden, self._after.lay(weights))


class _Outer:
    """The tensors outside of layers, of which one side has weights: those before the layers, or those after
    them. The modules of the other side get zeros, since nobody asks for what they compute."""

    def __init__(self, family: ThroughTransformers, present: tuple[TensorSpec, ...]) -> None:
        skeleton, names = family.skeleton, {tensor.name for tensor in present}
        absent = [tensor for tensor in skeleton.outer.tensors if tensor.name not in names]
        self._desk, self._own = family.desk, tuple(skeleton.outer.own)
        self._widths = {tensor.name: tensor.shape[0] for tensor in absent if tensor.is_matrix}
        widths = {tensor.name: tensor.shape[0] for tensor in present if tensor.is_matrix}
        self._all_widths = self._widths | widths
        self._shapes = {tensor.name: tensor.shape for tensor in absent if not tensor.is_matrix}
        self._nothing = LayerWeights(
            {tensor.name: torch.zeros(()).expand(tensor.shape) for tensor in present if not tensor.is_matrix}
        )
        self._last: tuple[LayerWeights | None, LayerWeights] = None, self._nothing

    def lay(self, weights: LayerWeights) -> dict[str, Tensor]:
        """Lay `weights` on the desk; returns what transformers' own modules take of them."""
        if self._last[0] is not weights:
            self._last = weights, self._completed(weights)
        self._desk.weights, self._desk.absent = self._last[1], self._widths
        return self._desk.own(self._own)

    def lay_zeros(self) -> dict[str, Tensor]:
        """The same where nobody asks for hidden states."""
        own = self.lay(self._nothing)
        self._desk.absent = self._all_widths
        return own

    def _completed(self, weights: LayerWeights) -> LayerWeights:
        device = next((each.device for _, each in weights.items() if isinstance(each, Tensor)), None)
        zeros = {name: torch.zeros((), device=device).expand(shape) for name, shape in self._shapes.items()}
        return LayerWeights({**dict(weights.items()), **zeros})


def _own(spec: ModelSpec) -> TransformersSpec:
    assert isinstance(spec, TransformersSpec)
    return spec
