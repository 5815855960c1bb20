"""MixtureFamily: Llama's frame with experts in place of the mlp, in some layers or in all."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from penstock.model.config_values import count, num_experts_of, refuse
from penstock.model.families.llama import Llama
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.heads.mtp import MTPHead
from penstock.model.layer_run import LayerRun, LayersCall
from penstock.model.mixture.mixture import Mixture, mixture_mlp
from penstock.model.mixture.mixture_calls import MixtureCalls
from penstock.spec import DECODER, ModelSpec
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import ModelTensors, Stack, TensorSpec


@dataclass(frozen=True, kw_only=True)
class MixtureSpec(LlamaSpec):
    """A model in Llama's frame, with experts."""

    mixture: Mixture


class MixtureFamily(Llama):
    """Llama with experts in the layers that Mixture names."""

    spec: MixtureSpec

    @classmethod
    def stacks(cls, spec: ModelSpec) -> tuple[Stack, ...]:
        assert isinstance(spec, MixtureSpec)
        layers = range(spec.num_layers)
        dense = tuple(cls.layer_tensors(spec, index) for index in layers)
        return (Stack(DECODER, dense, spec.mixture.all_experts(spec.num_layers)),)

    @classmethod
    def mlp_tensors(cls, spec: LlamaSpec, index: int, prefix: str) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, MixtureSpec)
        if index in spec.mixture.layers:
            return spec.mixture.layer_tensors(index)
        return super().mlp_tensors(spec, index, prefix)

    @classmethod
    def model_tensors(cls, spec: ModelSpec) -> ModelTensors:
        assert isinstance(spec, MixtureSpec)
        tensors, first = super().model_tensors(spec), spec.num_layers
        extra = tuple(rf"^model\.layers\.{first + index}\." for index in range(spec.num_extra_layers))
        return replace(tensors, unused=tensors.unused + extra)

    @classmethod
    def mtp_head(cls, spec: LlamaSpec) -> MTPHead | None:
        own = super().mtp_head(spec)
        return MTPHead.of_deepseek(spec.num_layers) if own is None and spec.num_extra_layers else own

    @classmethod
    def _as_head(cls, spec: LlamaSpec, head: MTPHead) -> LlamaSpec:
        found = super()._as_head(spec, head)
        assert isinstance(found, MixtureSpec)
        mixture = replace(found.mixture, layers=frozenset((0,)), prefix=head.layer, limits=())
        return replace(found, mixture=mixture, num_extra_layers=0)

    @classmethod
    def separate(cls, checkpoint: Checkpoint, spec: ModelSpec) -> Checkpoint:
        assert isinstance(spec, MixtureSpec)
        spec.mixture.separate(checkpoint)
        return checkpoint

    @cached_property
    def _mixtures(self) -> tuple[Mixture, ...]:
        """Of each layer."""
        return tuple(self.spec.mixture.in_layer(index) for index in range(self.spec.num_layers))

    @cached_property
    def _calls_layers(self) -> bool:
        """Of the layers without experts."""
        own, plain = type(self), MixtureFamily
        return own.mlp is plain.mlp and own.mlp_onto is plain.mlp_onto and self._has_plain_layer

    @cached_property
    def _calls_mixtures(self) -> MixtureCalls | None:
        """None: the family's layers are computed one by one."""
        own, mixture, calls = type(self), self.spec.mixture, self._sublayers
        is_plain = own.layer is Llama.layer and own.mlp is MixtureFamily.mlp
        if calls is None or not is_plain or own.mlp_onto is not MixtureFamily.mlp_onto:
            return None
        return MixtureCalls(calls) if mixture.is_plain else None

    def _call_of(self, index: int, weights: LayerWeights) -> LayersCall | None:
        calls = self._calls_mixtures
        if "router" not in weights or weights.expert_run is None or calls is None:
            return None if "router" in weights else super()._call_of(index, weights)
        known = calls.first_half(self, index, weights)
        return None if known is None or known.native is None else self._call_mixtures

    def _call_mixtures(self, run: LayerRun, hidden: Tensor) -> Tensor | None:
        calls = self._calls_mixtures
        return None if calls is None else calls.layers(self, self.spec.mixture, run, hidden)

    def mlp(self, index: int, weights: LayerWeights, x: Tensor) -> Tensor:
        if "router" in weights:
            return mixture_mlp(self, weights, x, self._mixtures[index])
        return super().mlp(index, weights, x)

    def mlp_onto(self, hidden: Tensor, index: int, weights: LayerWeights, x: Tensor) -> Tensor:
        is_summed = self.spec.branch_factor == 1.0 and type(self).mlp is MixtureFamily.mlp
        if "router" in weights and is_summed:
            return mixture_mlp(self, weights, x, self._mixtures[index], hidden)
        return super().mlp_onto(hidden, index, weights, x)


def with_mixture(spec: LlamaSpec, mixture: Mixture, **others: Any) -> MixtureSpec:
    """A model in Llama's frame with these experts."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    values["num_experts_per_token"] = mixture.routing.num_chosen
    return MixtureSpec(**(values | others), mixture=replace(mixture, activation=spec.activation))


def has_turned_experts(spec: ModelSpec) -> bool:
    """Whether merged tensors of a model's experts are [num_experts, in_features, out_features]."""
    return isinstance(spec, MixtureSpec) and spec.mixture.is_merged_transposed


def chosen_of(config: dict[str, Any], num_experts: int, name: str = "num_experts_per_tok") -> int:
    """The number of experts of a token. Raises InvalidConfig if it is more than there are."""
    return count(config, name, most=num_experts_of({"num_experts": num_experts}, "num_experts"))


def all_layers(spec: LlamaSpec) -> frozenset[int]:
    """For models with experts in every layer."""
    return frozenset(range(spec.num_layers))


def sparse_layers(config: dict[str, Any], num_layers: int) -> frozenset[int]:
    """The layers with experts: every `decoder_sparse_step`-th one, but for those of `mlp_only_layers`."""
    step, dense = count(config, "decoder_sparse_step", default=1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        refuse("mlp_only_layers", dense, "a list of layers")
    return frozenset(index for index in range(num_layers) if (index + 1) % step == 0) - frozenset(dense)


def typed_layers(config: dict[str, Any], num_layers: int, num_dense: int) -> frozenset[int]:
    """The layers with experts: those that `mlp_layer_types` calls sparse or, where config.json has no such
    list, all but the first `num_dense`."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return frozenset(range(num_dense, num_layers))
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not {*map(str, kinds)} <= {"dense", "sparse"}
    ):
        refuse("mlp_layer_types", kinds, f"a list with dense or sparse for each of {num_layers} layers")
    return frozenset(index for index, kind in enumerate(kinds) if kind == "sparse")
