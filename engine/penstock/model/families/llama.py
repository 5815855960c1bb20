"""Llama 1-3 (arXiv 2302.13971) and the families that share its layer: Mistral, Qwen2, Qwen3. They differ in
biases, in norms on the heads of q and k, and in sliding windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from penstock.kernels import AttentionSpec, BatchLayout, LayerKV
from penstock.model.architecture import CONV, sliding_windows
from penstock.model.attention.sublayer import SublayerCalls
from penstock.model.config_values import flag, num_layers_of, number, require
from penstock.model.families.llama_architecture import LlamaArchitecture, LlamaSpec
from penstock.model.family import GivenRows
from penstock.model.layer_run import LayerRun, LayersCall, computed
from penstock.model.layers import AttentionForm, attend, gated_mlp, mlp
from penstock.model.norms import HeadNorms
from penstock.weights.layer_weights import LayerWeights

if TYPE_CHECKING:
    from penstock.model.recurrent.mixer_calls import MixerCalls

#: Layers of one call of the kernels, at most.
MOST_TOGETHER = 16
#: RMS norms on the heads of q and k.
HEAD_NORMS = AttentionForm(norms=HeadNorms())


class Llama(LlamaArchitecture):
    """A layer has rms norms, rope, grouped heads, and a gated mlp. LlamaSpec says what other families have in
    their place. Products with a factor and sums are separate operations, because a fused operation rounds
    once, and not all of torch's loops fuse."""

    architectures: ClassVar[tuple[str, ...]] = ("LlamaForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        require(config, "pretraining_tp", 1)
        has_bias = flag(config, "attention_bias", False)
        return cls._spec(
            config,
            has_qkv_bias=has_bias,
            has_o_bias=has_bias,
            has_mlp_bias=flag(config, "mlp_bias", False),
        )

    def attention_spec(self) -> AttentionSpec:
        spec = self.spec
        scale = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
        return AttentionSpec(
            spec.num_heads, scale, softcap=spec.attention_softcap, latent_dim=spec.latent_dim
        )

    def scale_tokens(self, vectors: Tensor) -> Tensor:
        return _scaled(vectors, self.spec.embedding_factor)

    def embed(
        self, weights: LayerWeights, input_ids: Tensor, positions: Tensor, given: GivenRows | None = None
    ) -> Tensor:
        """A head of multi-token prediction is `given` the hidden states of all tokens."""
        head = self.spec.mtp
        if head is None:
            return super().embed(weights, input_ids, positions, given)
        vectors = self.scale_tokens(weights.matrix("embedding").look_up(input_ids))
        # A step that measures memory has no hidden states.
        hidden = torch.zeros_like(vectors) if given is None else given.vectors
        return head.join(self, self.spec.norm, weights, vectors, hidden)

    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        calls = self._sublayers
        together = calls.attend(self, index, weights, hidden, kv, batch) if calls is not None else None
        if together is not None:
            hidden, x = together
            return self.mlp_onto(hidden, index, weights, x)
        x = self._before("input_norm", weights, hidden)
        attended = self.attention(index, weights, x, kv, batch)
        attended = self._behind("attention_out_norm", weights, attended)
        if self.spec.is_parallel:
            return hidden + attended + self._behind("mlp_out_norm", weights, self.mlp(index, weights, x))
        hidden = hidden + attended
        x = self._before("post_norm", weights, hidden)
        return hidden + self._behind("mlp_out_norm", weights, self.mlp(index, weights, x))

    @property
    def most_together(self) -> int:  # type: ignore[override]
        """Also where layers are computed one by one: to lend several at once takes less time."""
        return MOST_TOGETHER if self.kernels.sublayers is not None else 1

    @cached_property
    def _calls_layers(self) -> bool:
        """Whether SublayerCalls computes several layers at once."""
        return type(self).mlp is Llama.mlp and self._has_plain_layer

    @property
    def _has_plain_layer(self) -> bool:
        """Whether a layer is Llama's but for its mlp, and dense mlps have gates."""
        own, plain = type(self), Llama
        is_plain = own.layer is plain.layer and own.attention is plain.attention
        return is_plain and self.spec.has_gate and self.kernels.sublayers is not None

    def layers(
        self,
        indices: Sequence[int],
        weights: Sequence[LayerWeights],
        hidden: Tensor,
        caches: Sequence[LayerKV],
        batch: BatchLayout,
        go_on: Callable[[], object],
    ) -> Tensor | None:
        run = LayerRun(indices, weights, caches, batch, go_on)
        return computed(run, hidden, [*map(self._call_of, indices, weights)], self.layer)

    def _call_of(self, index: int, weights: LayerWeights) -> LayersCall | None:
        """What computes several layers of this layer's kind."""
        calls = self._sublayers if self._calls_layers else None
        known = None if calls is None else calls.sublayer(self, index, weights)
        return None if known is None or known.native is None else self._call_dense

    def _call_dense(self, run: LayerRun, hidden: Tensor) -> Tensor | None:
        return None if self._sublayers is None else self._sublayers.layers(self, run, hidden)

    @cached_property
    def _sublayers(self) -> SublayerCalls | None:
        """A family with an attention() of its own has no such calls."""
        return SublayerCalls() if type(self).attention is Llama.attention else None

    def attention(
        self, index: int, weights: LayerWeights, x: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        """What attention makes of x [num_tokens, hidden_size], normed."""
        if CONV in weights:
            return self.recurrence(weights, x, kv, batch)
        if self.spec.latent is not None:
            return self.spec.latent.attend(self, index, weights, x, kv, batch)
        return attend(self, index, weights, x, kv, batch, self.spec.attention)

    def recurrence(self, weights: LayerWeights, x: Tensor, kv: LayerKV, batch: BatchLayout) -> Tensor:
        """What a recurrent layer makes of x [num_tokens, hidden_size], normed."""
        return self.mixers.mix(self, weights, x, kv, batch)

    @cached_property
    def mixers(self) -> MixerCalls:
        from penstock.model.recurrent.mixer_calls import MixerCalls  # of hybrids alone

        assert self.spec.recurrent is not None
        return MixerCalls(self.spec.recurrent)

    def mlp(self, index: int, weights: LayerWeights, x: Tensor) -> Tensor:
        """What the mlp makes of x [num_tokens, hidden_size], normed."""
        return (gated_mlp if self.spec.has_gate else mlp)(self, weights, x, self.spec.activation)

    def mlp_onto(self, hidden: Tensor, index: int, weights: LayerWeights, x: Tensor) -> Tensor:
        """The sum of the hidden state and of mlp(), times the branches' factor."""
        return hidden + _scaled(self.mlp(index, weights, x), self.spec.branch_factor)

    def norm_final(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        return _scaled(self._norm("final_norm", weights, hidden), self.spec.head_factor)

    def head(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        logits, cap = super().head(weights, hidden), self.spec.logits_softcap
        if not cap:
            return logits
        # tanh runs in float64. torch's vector tanh and scalar tanh differ in the last bit, and an element's
        # place in the batch decides which of the two computes it; rounded to float32 the two agree.
        capped: Tensor = cap * (logits.double() / cap).tanh()
        return capped.float()

    def _before(self, name: str, weights: LayerWeights, hidden: Tensor) -> Tensor:
        """What attention or mlp gets."""
        return hidden if self.spec.norm_places == "after" else self._norm(name, weights, hidden)

    def _behind(self, name: str, weights: LayerWeights, x: Tensor) -> Tensor:
        """What is added to the hidden state of what attention or mlp gives."""
        x = x if self.spec.norm_places == "before" else self._norm(name, weights, x)
        return _scaled(x, self.spec.branch_factor)

    def _norm(self, name: str, weights: LayerWeights, x: Tensor) -> Tensor:
        return self.spec.norm.apply(self.kernels, weights, name, x, self.spec.norm_eps)


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


class Mistral(Llama):
    """Llama with sliding windows (arXiv 2310.06825)."""

    architectures = ("MistralForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        config = {"sliding_window": 4096} | config  # null means none
        windows = sliding_windows(config, num_layers_of(config, "num_hidden_layers"))
        return cls._spec(config, sliding_windows=windows)


class Qwen2(Llama):
    """Llama with biases on q, k, v (arXiv 2407.10671)."""

    architectures = ("Qwen2ForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        return cls._spec(config, has_qkv_bias=True, sliding_windows=cls._windows(config))

    @classmethod
    def _windows(cls, config: dict[str, Any]) -> tuple[int, ...]:
        """The window of each layer. Older configs say which layer is the first with a window; newer configs
        name each layer's kind."""
        num_layers = num_layers_of(config, "num_hidden_layers")
        windows = sliding_windows(config, num_layers) if config.get("use_sliding_window") else ()
        if not windows or config.get("layer_types") is not None:
            return windows
        first = number(config, "max_window_layers", 28)
        return tuple(window if index >= first else 0 for index, window in enumerate(windows))


class Qwen3(Qwen2):
    """Qwen2 without biases by default, and with norms on the heads of q and k (arXiv 2505.09388)."""

    architectures = ("Qwen3ForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        has_bias = flag(config, "attention_bias", False)
        return cls._spec(
            config,
            has_qkv_bias=has_bias,
            has_o_bias=has_bias,
            attention=HEAD_NORMS,
            sliding_windows=cls._windows(config),
        )
