"""Kernels, the interface of every set of kernels: what a layer may call; and KernelTraits, what a set says of
itself before it computes. reference.py defines what each method computes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from penstock.config import KernelChoice
from penstock.errors import ConfigError
from penstock.kernels.mixture.routing import Routed, Router, Routing, plain_route
from penstock.kernels.operands import (
    ActivationFunction,
    AttentionSpec,
    BatchLayout,
    GatedFunction,
    LayerKV,
    Matrix,
    RouterFunction,
)
from penstock.kernels.recurrent.plain import NO_LIMITS
from penstock.kernels.sublayers.protocol import Sublayers
from penstock.spec import KV_LAYOUTS, KVLayout

if TYPE_CHECKING:
    from penstock.kernels.experts import ExpertKernels
    from penstock.kernels.low_rank import LowRankKernels


@dataclass(frozen=True)
class KernelTraits:
    """What a set of kernels is and computes. Loader and plan decide by these values, never by a name."""

    #: The set's name in the config and for people.
    name: KernelChoice
    #: These kernels bring their own threads, or run on a GPU. Torch's threads would only compete for the
    #: cores: they keep cores busy for a while after each operation.
    has_own_threads: bool
    #: Attention first copies a sequence's keys and values together, so a longer sequence takes more memory.
    gathers_keys: bool
    #: Memory for activations, as a multiple of what the native kernels take.
    workspace_factor: float
    #: Types of the matrices that linear() takes.
    matrices: tuple[type, ...]
    #: Numbers of inputs that may share a scale. All inputs of an output channel may always share one.
    group_sizes: tuple[int, ...]
    #: Names of the layouts of keys and values that attention reads.
    kv_layouts: tuple[str, ...]

    def require(self, group_size: int | None, kv_layout: KVLayout, matrices: Collection[type] = ()) -> None:
        """Raises ConfigError for weights, keys or values that these kernels do not compute. A `group_size` of
        0 or None stands for a scale per output channel. `matrices` are the types of the weights' matrices."""
        self.require_matrices(matrices)
        if kv_layout.name not in self.kv_layouts:
            raise ConfigError(
                f"the {self.name} kernels of this device can't read keys and values as {kv_layout.name}; "
                f"choose --kv-dtype {' or '.join(name for name in self.kv_layouts if name in KV_LAYOUTS)}"
            )
        if group_size and group_size not in self.group_sizes:
            raise ConfigError(
                f"the {self.name} kernels of this device don't compute weights with a scale per group of "
                f"{group_size} inputs yet: pass --device cpu, or take a model with scales per output channel"
            )

    def require_matrices(self, matrices: Collection[type]) -> None:
        """Raises ConfigError for a type of matrices that these kernels don't multiply by."""
        for kind in set(matrices) - set(self.matrices):
            raise ConfigError(f"{self._refusal(kind)}; choose other --kernels or another checkpoint")

    def unknown_matrix(self, matrix: Matrix) -> TypeError:
        """The error for a matrix of a type that is not in `matrices`."""
        return TypeError(self._refusal(type(matrix)))

    def _refusal(self, kind: type) -> str:
        names = ", ".join(known.__name__ for known in self.matrices)
        return f"the {self.name} kernels compute no product with a {kind.__name__}; they know: {names}"


class Recurrences(Protocol):
    """Arithmetic of layers that have a state of each sequence in place of keys and values."""

    def short_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: BatchLayout
    ) -> Tensor:
        """A causal convolution of each channel: y[t] = bias + the sum over i of weight[i] * x[t - width + 1 +
        i], where x is 0 before a sequence's first token. x is [num_tokens, channels], weight [width,
        channels], width at least 2. `states` is [num_states, width - 1, channels]: the last rows of x of each
        sequence, oldest first. It is brought up to date, as StateSlots says."""

    def recurrence(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor | None,
        states: Tensor,
        batch: BatchLayout,
    ) -> Tensor:
        """For each head and token, one after the other, with the state S [key_dim, value_dim]:

            new = v                                  without beta (Mamba-2, arXiv 2405.21060)
            new = beta * (v - decay * (S^T k))       the gated delta rule (arXiv 2412.06464)
            S = decay * S + k new^T,  y = S^T q

        q and k are [num_tokens, num_key_heads, key_dim], and serve num_heads / num_key_heads heads each; v
        and y are [num_tokens, num_heads, value_dim]; beta [num_tokens, num_heads]. decay is [num_tokens,
        num_heads], or [num_tokens, num_heads, key_dim] with a factor for each row of S (Kimi Delta Attention,
        arXiv 2510.26692): S is multiplied by it first, and the lines above follow with a decay of 1. `states`
        is [num_states, num_heads, key_dim, value_dim], and is brought up to date, as StateSlots says."""

    def decays(
        self,
        x: Tensor,
        bias: Tensor | None,
        a_log: Tensor,
        limits: tuple[float, float] = NO_LIMITS,
        bound: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """steps = softplus(x + bias), from one limit to the other, and exp(-e^a_log * steps): each of x's
        shape, [num_tokens, num_heads] or [num_tokens, num_heads, key_dim]. a_log has a number for each head,
        and bias one for each of a token's numbers. With a `bound` the second result is exp(bound *
        sigmoid(e^a_log * (x + bias))), and the first one means nothing. Both are computed in float64 and
        rounded: the last bits of such functions depend on where in a tensor a number lies, and rounding
        removes them."""

    def gates(self, x: Tensor, factor: float = 1.0) -> Tensor:
        """factor * sigmoid(x), [num_tokens, width], computed as decays() are."""


class Kernels(Recurrences, Protocol):
    """Arithmetic on one device. All sets of kernels compute the same: integer products are equal bit for bit,
    everything else to float32 rounding. Tensors are float32 on the kernels' device unless a method says
    otherwise."""

    @property
    def traits(self) -> KernelTraits: ...

    def without_arithmetic(self, longest: int) -> Kernels:
        """Kernels that allocate as much memory as these kernels, and may leave out the arithmetic. They show
        the memory that a step of sequences of up to `longest` tokens takes, or that a smaller step takes if
        this is more."""

    def with_int8_activations(self) -> Kernels:
        """Kernels of the same kind that round activations to 8 bits, for what may be less exact; these
        kernels themselves where nothing would be won."""

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        """x W^T + bias: [num_tokens, in_features] -> [num_tokens, out_features]. The type of `weight` tells
        the weight format. Raises TypeError for a type that these kernels don't know."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """x / rms(x) * (weight + offset) over the last dimension (arXiv 1910.07467)."""

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """(x - mean) / std * weight + bias over the last dimension (arXiv 1607.06450)."""

    def activation(self, x: Tensor, function: ActivationFunction) -> Tensor:
        """Elementwise: [num_tokens, width] -> the same shape."""

    def gated_activation(self, gate_up: Tensor, function: GatedFunction) -> Tensor:
        """f(gate) * up: [num_tokens, 2 * width], gate first -> [num_tokens, width]. ClampedGate has columns
        of its own, and LimitedGate a formula."""

    def router_scores(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, function: RouterFunction
    ) -> Tensor:
        """function(x W^T + bias) for each expert: [num_tokens, in_features] -> [num_tokens, num_experts].
        `weight` is float32 [num_experts, in_features], since a small error may choose another expert. The
        softmax goes over a token's experts."""

    def route(self, x: Tensor, router: Router, routing: Routing) -> Routed:
        """The experts of x [num_tokens, in_features]: plain_route() defines them."""

    @property
    def experts(self) -> ExpertKernels:
        """Arithmetic of mixtures of experts."""

    @property
    def adapters(self) -> LowRankKernels:
        """Arithmetic of adapters (LoRA)."""

    @property
    def sublayers(self) -> Sublayers | None:
        """Parts of layers in one call; None: these kernels compute all operations one by one."""

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool = False) -> None:
        """Rotate the first 2 * half dimensions of each head in place (arXiv 2104.09864).

        x is [num_tokens, num_heads, head_dim]; cos and sin are [num_tokens, half]. Pairs are
        (i, i + half), or (2i, 2i + 1) if interleaved.
        """

    def write_kv(self, k: Tensor, v: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
        """Store K and V, each [num_tokens, num_kv_heads, head_dim], in the tokens' slots. A value beyond the
        layout's range becomes the layout's largest finite value; INT8 has the same codes and scales from all
        kernels. Where the beginning of a key is the value
        (a latent), V is not read. Raises TypeError for a layout that these kernels don't know."""

    def paged_attention(self, q: Tensor, kv: LayerKV, batch: BatchLayout, spec: AttentionSpec) -> Tensor:
        """Attention of the step's tokens over all cached tokens of their sequences: causal, but for the
        prefix that BatchLayout.prefix_lens tells.

        q is [num_tokens, num_heads, head_dim]; returns [num_tokens, num_heads * head_dim], or with a latent
        [num_tokens, num_heads * latent_dim]. The step's own K and V must be in the cache already.
        """


class _ForwardingRecurrences:
    """The part of ForwardingKernels that is Recurrences."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def short_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: BatchLayout
    ) -> Tensor:
        return self._kernels.short_conv(x, weight, bias, states, batch)

    def recurrence(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor | None,
        states: Tensor,
        batch: BatchLayout,
    ) -> Tensor:
        return self._kernels.recurrence(q, k, v, decay, beta, states, batch)

    def decays(
        self,
        x: Tensor,
        bias: Tensor | None,
        a_log: Tensor,
        limits: tuple[float, float] = NO_LIMITS,
        bound: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        return self._kernels.decays(x, bias, a_log, limits, bound)

    def gates(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return self._kernels.gates(x, factor)


def unwrapped(kernels: Kernels) -> Kernels:
    """The kernels to which wrappers pass calls on."""
    while isinstance(kernels, ForwardingKernels):
        kernels = kernels._kernels
    return kernels


class ForwardingKernels(_ForwardingRecurrences):
    """Kernels that pass every call on to others. A wrapper is a subclass and overrides the calls
    that it watches or replaces. A wrapper that replaces the products of experts as well sets `experts`. A
    wrapper that neither watches nor replaces what `sublayers` consist of passes these on, too."""

    sublayers: Sublayers | None = None

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels)
        self.experts = kernels.experts
        self.adapters = kernels.adapters

    @property
    def traits(self) -> KernelTraits:
        return self._kernels.traits

    def without_arithmetic(self, longest: int) -> Kernels:
        return self._kernels.without_arithmetic(longest)

    def with_int8_activations(self) -> Kernels:
        return self._kernels.with_int8_activations()

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        return self._kernels.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        return self._kernels.rms_norm(x, weight, eps, offset)

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        return self._kernels.layer_norm(x, weight, bias, eps)

    def activation(self, x: Tensor, function: ActivationFunction) -> Tensor:
        return self._kernels.activation(x, function)

    def gated_activation(self, gate_up: Tensor, function: GatedFunction) -> Tensor:
        return self._kernels.gated_activation(gate_up, function)

    def router_scores(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, function: RouterFunction
    ) -> Tensor:
        return self._kernels.router_scores(x, weight, bias, function)

    def route(self, x: Tensor, router: Router, routing: Routing) -> Routed:
        """By router_scores(), which a wrapper may replace."""
        return plain_route(self, x, router, routing)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool = False) -> None:
        self._kernels.rope(x, cos, sin, is_interleaved)

    def write_kv(self, k: Tensor, v: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
        self._kernels.write_kv(k, v, kv, slot_mapping)

    def paged_attention(self, q: Tensor, kv: LayerKV, batch: BatchLayout, spec: AttentionSpec) -> Tensor:
        return self._kernels.paged_attention(q, kv, batch, spec)
