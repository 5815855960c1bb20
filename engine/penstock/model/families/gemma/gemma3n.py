"""The text part of Gemma 3n. A token has several hidden states, of which a layer computes one and corrects
the others by it (AltUp, arXiv 2301.13310). A low-rank product stands beside attention (LAuReL, arXiv
2411.07501), and the gates of some mlps are kept only where they are far above their mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from penstock.kernels import BatchLayout, LayerKV
from penstock.model.architecture import layer_kinds, linear_tensors, sliding_windows
from penstock.model.config_values import count, flag, num_layers_of, number, refuse
from penstock.model.families.gemma.later_gemma import LaterGemma, LaterGemmaSpec, kv_sources, mean_square
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.norms import RMS
from penstock.model.rope import FULL, WINDOW, read_layer_ropes
from penstock.spec import ModelSpec
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec

#: The mean square of a hidden state counts as at least this where another is scaled to its size.
LEAST_MEAN_SQUARE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Gemma3nSpec(LaterGemmaSpec):
    """The hidden states of a token, and what a layer does with them."""

    #: The hidden states of a token, and which of them a layer computes.
    num_states: int
    active: int
    #: What the corrected state gives to the layer's input has factors of its own.
    scales_active: bool
    laurel_rank: int
    #: Per layer: the share of the mlp's gates that is 0; 0: gates stay as they are.
    sparsities: tuple[float, ...]

    @property
    def state_width(self) -> int:
        return self.num_states * self.hidden_size


class Gemma3n(LaterGemma):
    """A row has the hidden states of a token, one after the other, then the inputs of layers to come."""

    architectures = ("Gemma3nForCausalLM",)
    spec: Gemma3nSpec

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        num_layers = num_layers_of(config, "num_hidden_layers")
        config = {"num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512} | config
        config = {"final_logit_softcapping": 30.0} | config  # null is none
        kinds = layer_kinds(config, num_layers, period=5)
        thetas = {
            FULL: number(config, "rope_theta", 1e6),
            WINDOW: number(config, "rope_local_base_freq", 1e4),
        }
        ropes = read_layer_ropes(config, count(config, "head_dim"), (*kinds, FULL), thetas)
        sizes = _for_layers(config, "intermediate_size", 16384, num_layers)
        sources = kv_sources(kinds, int(number(config, "num_kv_shared_layers", 15)))
        differences = cls._later(
            config,
            rope=ropes[-1],
            layer_ropes=ropes[:-1],
            sliding_windows=sliding_windows(config | {"layer_types": list(kinds)}, num_layers),
            layers_without_kv=frozenset(index for index, each in enumerate(sources) if each != index),
            logits_softcap=number(config, "final_logit_softcapping", 0.0),
            embedding_factor=math.sqrt(count(config, "hidden_size")),
        )
        spec = cls._spec(config | {"intermediate_size": int(max(sizes))}, **differences)
        num_states = count(config, "altup_num_inputs", default=4)
        active = int(number(config, "altup_active_idx", 0))
        if active >= num_states:
            refuse("altup_active_idx", active, f"less than altup_num_inputs, {num_states}")
        num_sparse = 10 if num_layers > 10 else 0
        usual = [0.95] * num_sparse + [0.0] * (num_layers - num_sparse)
        return Gemma3nSpec(
            **vars(spec),
            kv_sources=sources,
            mlp_sizes=tuple(map(int, sizes)),
            input_size=count(config, "hidden_size_per_layer_input", default=256),
            input_vocab=count(config, "vocab_size_per_layer_input", default=262144),
            num_states=num_states,
            active=active,
            scales_active=flag(config, "altup_correct_scale", True),
            laurel_rank=count(config, "laurel_rank", default=64),
            sparsities=_for_layers(config, "activation_sparsity_pattern", usual, num_layers),
        )

    @classmethod
    def embedding_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        return *super().embedding_tensors(spec), *_projections(spec, "altup_projections")

    @classmethod
    def head_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        return *_projections(spec, "altup_unembed_projections"), *super().head_tensors(spec)

    @classmethod
    def layer_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, Gemma3nSpec)
        altup, laurel = f"model.layers.{index}.altup.", f"model.layers.{index}.laurel."
        hidden, num_states, rank = spec.hidden_size, spec.num_states, spec.laurel_rank
        left, right = f"{laurel}linear_left", f"{laurel}linear_right"
        return (
            TensorSpec("altup.router", (num_states, hidden), (f"{altup}modality_router.weight",)),
            *RMS.tensors("altup.router_norm", (hidden,), f"{altup}router_norm"),
            TensorSpec("altup.predict", (num_states**2, num_states), (f"{altup}prediction_coefs.weight",)),
            TensorSpec("altup.correct", (num_states, num_states), (f"{altup}correction_coefs.weight",)),
            TensorSpec("altup.scale", (hidden,), (f"{altup}correct_output_scale",)),
            *linear_tensors("laurel.left", (rank, hidden), (left,), has_bias=False),
            *linear_tensors("laurel.right", (hidden, rank), (right,), has_bias=False),
            *RMS.tensors("laurel.norm", (hidden,), f"{laurel}post_laurel_norm"),
            *super().layer_tensors(spec, index),
        )

    def spread(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        size, states = mean_square(hidden).sqrt(), [hidden]
        for other in range(self.spec.num_states - 1):
            found = self.host_kernels.linear(hidden, weights.matrix(f"altup_projections.{other}"))
            states.append(_of_size(found, size))
        return torch.cat(states, dim=1)

    def norm_final(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        states = _states(hidden[:, : self.spec.state_width], self.spec.hidden_size)
        total, size = states[0], mean_square(states[0]).sqrt()
        for other, state in enumerate(states[1:]):
            found = self.project(weights, f"altup_unembed_projections.{other}", state)
            total = total + _of_size(found, size)
        return super().norm_final(weights, total / self.spec.num_states)

    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        row, inputs, later = self.parted(hidden)
        predicted = self._predicted(weights, _states(row, self.spec.hidden_size))
        active = predicted[self.spec.active]
        x = self._norm("input_norm", weights, active)
        attended = self._norm("attention_out_norm", weights, self.attention(index, weights, x, kv, batch))
        both = (active + attended + self._laurel(weights, x)) / math.sqrt(2)
        x = self.mlp(index, weights, self._norm("post_norm", weights, both))
        corrected = self._corrected(weights, predicted, both + self._norm("mlp_out_norm", weights, x))
        first = corrected[self.spec.active]
        first = first * weights.vector("altup.scale") if self.spec.scales_active else first
        added = self.take_input(weights, first, inputs)
        return torch.cat((corrected[0], *(each + added for each in corrected[1:]), later), dim=1)

    def mlp(self, index: int, weights: LayerWeights, x: Tensor) -> Tensor:
        gate_up, share = self.project(weights, "gate_up", x), self.spec.sparsities[index]
        if share:
            gate = gate_up[:, : gate_up.shape[1] // 2]
            gate.copy_((gate - _cutoff(gate, share)).relu())
        return self.project(weights, "down", self.kernels.gated_activation(gate_up, self.spec.activation))

    def _laurel(self, weights: LayerWeights, x: Tensor) -> Tensor:
        low = self.project(weights, "laurel.left", x)
        return x + self._norm("laurel.norm", weights, self.project(weights, "laurel.right", low))

    def _predicted(self, weights: LayerWeights, states: list[Tensor]) -> list[Tensor]:
        """The states that a layer begins with: each is a mixture of all, and itself."""
        active, num_states = states[self.spec.active], self.spec.num_states
        parts = self.kernels.router_scores(
            self._modalities(weights, active), weights.vector("altup.predict"), None, "none"
        ).view(-1, num_states, num_states, 1)
        predicted = []
        for to, own in enumerate(states):
            mixed = states[0] * parts[:, to, 0]
            for source in range(1, num_states):
                mixed = mixed + states[source] * parts[:, to, source]
            predicted.append(mixed + own)
        return predicted

    def _corrected(self, weights: LayerWeights, predicted: list[Tensor], computed: Tensor) -> list[Tensor]:
        """The states after a layer: what it computed beyond the prediction, added in part to each."""
        parts = self.kernels.router_scores(
            self._modalities(weights, computed), weights.vector("altup.correct"), None, "none"
        )
        news = computed - predicted[self.spec.active]
        return [each + news * (parts[:, i, None] + 1.0) for i, each in enumerate(predicted)]

    def _modalities(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """[num_tokens, num_states]. tanh runs in float64, as in Llama.head()."""
        x = self._norm("altup.router_norm", weights, x) * self.spec.hidden_size**-1.0
        logits = self.kernels.router_scores(x, weights.vector("altup.router"), None, "none")
        return logits.double().tanh().float()


def _projections(spec: ModelSpec, name: str) -> tuple[TensorSpec, ...]:
    """The matrices [hidden_size, hidden_size] that make the other states of the first, or merge them."""
    assert isinstance(spec, Gemma3nSpec)
    shape = (spec.hidden_size, spec.hidden_size)
    each = (f"{name}.{index}" for index in range(spec.num_states - 1))
    return tuple(
        tensor for one in each for tensor in linear_tensors(one, shape, (f"model.{one}",), has_bias=False)
    )


def _of_size(x: Tensor, size: Tensor) -> Tensor:
    """x with root mean squares [num_tokens, 1]."""
    return x * size / mean_square(x).clamp_min(LEAST_MEAN_SQUARE).sqrt()


def _cutoff(gate: Tensor, share: float) -> Tensor:
    """The value below which this share of a token's gates would lie if they were normally distributed."""
    mean = gate.double().mean(-1, keepdim=True)
    spread = (gate.double() - mean).square().mean(-1, keepdim=True).sqrt()
    return (mean + spread * NormalDist().inv_cdf(share)).float()


def _for_layers(config: dict[str, Any], name: str, usual: Any, num_layers: int) -> tuple[float, ...]:
    """A number for each layer. Raises InvalidConfig."""
    values = usual if config.get(name) is None else config[name]
    values = values if isinstance(values, list) else [values] * num_layers
    if len(values) != num_layers or not all(isinstance(each, int | float) and each >= 0 for each in values):
        refuse(name, values, f"a number from 0 on, or a list of {num_layers} of them")
    return tuple(values)


def _states(row: Tensor, hidden_size: int) -> list[Tensor]:
    """The hidden states of each token, each [num_tokens, hidden_size]."""
    return [state.contiguous() for state in torch.split(row, hidden_size, dim=1)]
