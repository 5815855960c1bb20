"""Mixture: an mlp of experts, of which each token passes through a few. What a checkpoint holds of it, and
what it computes. Attention and norms belong to the family, so that any family can have a mixture."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from penstock.kernels import (
    ActivationFunction,
    Arriving,
    GatedFunction,
    Kernels,
    LimitedGate,
    Routed,
    Routing,
    settle_all,
)
from penstock.model.architecture import linear_tensors
from penstock.model.family import Family
from penstock.model.layers import gated_mlp, mlp
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.merged_experts import rename, separate_experts
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec

#: Steps of more tokens keep the disk busy, and guess no experts of the next layer.
MOST_GUESSED_TOKENS = 4
#: An expert that is in memory: its weights, its first row and the end of its rows.
LentExpert = tuple[LayerWeights, int, int]
#: What experts compute: (kernels, x, tokens, experts, y, arriving), as ExpertKernels.compute() has it.
ComputeExperts = Callable[[Kernels, Tensor, Tensor, Sequence[LentExpert], Tensor, Arriving | None], None]


@dataclass(frozen=True)
class MixtureNames:
    """Names in a checkpoint, after the prefix of a layer. The defaults are Qwen's. `expert` and `shared` are
    beginnings of names; an expert's number follows `expert`."""

    router: str = "mlp.gate"
    expert: str = "mlp.experts."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_expert."
    #: The shared expert's modules: those of gate and up, which may be one, and that of down.
    shared_modules: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    shared_gate: str = "mlp.shared_expert_gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    #: Tensors that hold all experts of a layer, where a checkpoint has these in place of each expert's own.
    merged_gate_up: str = "mlp.experts.gate_up_proj"
    merged_down: str = "mlp.experts.down_proj"
    #: The matrices before and after experts that are narrower than the hidden state.
    narrow_in: str = "mixer.fc1_latent_proj"
    narrow_out: str = "mixer.fc2_latent_proj"
    #: Tensors to which transformers gives another name in memory, and in files that it saves so: that name,
    #: and the usual one.
    in_memory: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Mixture:
    """The mixtures of a model; all its mixtures have one shape."""

    routing: Routing
    hidden_size: int
    #: The inner width of an expert.
    expert_size: int
    #: The layers that have experts; the other layers have an ordinary mlp.
    layers: frozenset[int]
    activation: ActivationFunction = "silu"
    #: An expert is down(f(gate x) * up x), otherwise down(f(up x)).
    has_gate: bool = True
    #: The inner width of the shared expert, through which every token passes; 0: there is none.
    shared_size: int = 0
    #: The shared expert's output is multiplied by a sigmoid of its own.
    has_shared_gate: bool = False
    has_router_bias: bool = False
    #: The width of what experts read and write, between the matrices "narrow_in" and "narrow_out"; 0: the
    #: hidden size, without these matrices.
    narrow_size: int = 0
    #: The scores multiply what goes into the experts, in place of what comes out.
    scales_inputs: bool = False
    #: Per layer: the limit of LimitedGate in the experts, and in the shared expert; 0: none. () if no layer
    #: has limits.
    limits: tuple[tuple[float, float], ...] = ()
    #: LimitedGate.is_behind
    limits_behind: bool = False
    #: Checkpoints have the correction of scores as [1, num_experts].
    has_correction_row: bool = False
    #: Merged tensors are [num_experts, in_features, out_features], otherwise with the last two exchanged.
    is_merged_transposed: bool = False
    names: MixtureNames = MixtureNames()
    #: The beginning of a layer's names; "{}" stands for the layer's number.
    prefix: str = "model.layers.{}."

    def layer_tensors(self, layer: int) -> tuple[TensorSpec, ...]:
        """The tensors that every sweep needs: the router, and the shared expert under the names of an mlp."""
        names, prefix, hidden = self.names, self.prefix.format(layer), self.hidden_size
        count, router = self.routing.num_experts, f"{prefix}{names.router}"
        row = (1, count) if self.has_correction_row else (count,)
        optional = (
            (self.has_router_bias, TensorSpec("router.bias", (count,), (f"{router}.bias",))),
            (
                self.routing.has_correction,
                TensorSpec("router.correction", row, (prefix + names.correction,)),
            ),
            (
                self.has_shared_gate,
                TensorSpec("shared_gate", (1, hidden), (f"{prefix}{names.shared_gate}.weight",)),
            ),
        )
        shared = self._mlp_tensors(prefix + names.shared, hidden, self.shared_size, names.shared_modules)
        return (
            TensorSpec("router", (count, hidden), (f"{router}.weight",)),
            *(tensor for exists, tensor in optional if exists),
            *(self._narrow_tensors(prefix) if self.narrow_size else ()),
            *(shared if self.shared_size else ()),
        )

    def all_experts(self, num_layers: int) -> tuple[tuple[tuple[TensorSpec, ...], ...], ...]:
        """The tensors of each expert of each layer; a layer without experts has none."""
        return tuple(self.experts(layer) if layer in self.layers else () for layer in range(num_layers))

    def experts(self, layer: int) -> tuple[tuple[TensorSpec, ...], ...]:
        """The tensors of each expert of a layer."""
        names, prefix = self.names, self.prefix.format(layer) + self.names.expert
        modules = (names.gate, names.up, names.down) if self.has_gate else (names.up, names.down)
        outer = self.narrow_size or self.hidden_size
        return tuple(
            self._mlp_tensors(f"{prefix}{number}.", outer, self.expert_size, modules)
            for number in range(self.routing.num_experts)
        )

    def _narrow_tensors(self, prefix: str) -> tuple[TensorSpec, ...]:
        into, out = (self.narrow_size, self.hidden_size), (self.hidden_size, self.narrow_size)
        return (
            *linear_tensors("narrow_in", into, (prefix + self.names.narrow_in,), has_bias=False),
            *linear_tensors("narrow_out", out, (prefix + self.names.narrow_out,), has_bias=False),
        )

    def _mlp_tensors(
        self, prefix: str, outer: int, width: int, modules: tuple[str, ...]
    ) -> tuple[TensorSpec, ...]:
        *into, down = (prefix + module for module in modules)
        name, rows = ("gate_up", 2 * width) if self.has_gate else ("up", width)
        return (
            *linear_tensors(name, (rows, outer), tuple(into), has_bias=False),
            *linear_tensors("down", (outer, width), (down,), has_bias=False),
        )

    @property
    def is_plain(self) -> bool:
        """Whether all experts have gates and one function, and read the layer's own normed hidden state, and
        scores multiply what they give."""
        has_one_function = not self.shared_size or self.function == self.activation
        is_plain = self.has_gate and has_one_function and not (self.narrow_size or self.scales_inputs)
        return is_plain and not self.limits

    def in_layer(self, index: int) -> Mixture:
        """The mixture of a layer, of which `limits` has one pair at most."""
        return replace(self, limits=self.limits[index : index + 1]) if self.limits else self

    @property
    def function(self) -> GatedFunction:
        """What lies between the two products of an expert with a gate."""
        return self._limited(0)

    @property
    def shared_function(self) -> GatedFunction:
        """The same of the shared expert."""
        return self._limited(1)

    def _limited(self, which: int) -> GatedFunction:
        limit = self.limits[0][which] if self.limits else 0.0
        return LimitedGate(limit, self.limits_behind) if limit else self.activation

    def compute(
        self,
        kernels: Kernels,
        x: Tensor,
        tokens: Tensor,
        experts: Sequence[LentExpert],
        y: Tensor,
        arriving: Arriving | None = None,
    ) -> None:
        """ComputeExperts"""
        if not self.has_gate:
            one_by_one(lambda weights, rows: self._plain(kernels, weights, rows))(
                kernels, x, tokens, experts, y, arriving
            )
            return
        given = [(weights.gated, first, end) for weights, first, end in experts]
        kernels.experts.compute(x, tokens, given, self.function, y, arriving)

    def _plain(self, kernels: Kernels, weights: LayerWeights, x: Tensor) -> Tensor:
        """An expert without a gate."""
        up = kernels.activation(kernels.linear(x, weights.matrix("up")), self.activation)
        return kernels.linear(up, weights.matrix("down"))

    def separate(self, checkpoint: Checkpoint) -> None:
        """Put experts apart that lie in merged tensors, under the names that experts have alone."""
        names = self.names
        for layer in self.layers:
            prefix = self.prefix.format(layer)
            for name, usual in names.in_memory:
                rename(checkpoint, prefix + name, prefix + usual)
            expert, is_transposed = prefix + names.expert, self._is_transposed(checkpoint, prefix)
            gate_up = (f"{names.gate}.weight", f"{names.up}.weight")
            separate_experts(checkpoint, prefix + names.merged_gate_up, expert, gate_up, is_transposed)
            down = (f"{names.down}.weight",)
            separate_experts(checkpoint, prefix + names.merged_down, expert, down, is_transposed)

    def _is_transposed(self, checkpoint: Checkpoint, prefix: str) -> bool:
        """Whether merged tensors have inputs before outputs. Qwen3-VL's files have, though those of its text
        model have not: the shape tells."""
        down = checkpoint.entries.get(prefix + self.names.merged_down)
        width, size = self.narrow_size or self.hidden_size, self.expert_size
        if down is None or width == size or down.shape[1:] not in ((width, size), (size, width)):
            return self.is_merged_transposed
        return down.shape[1:] == (size, width)


def mixture_mlp(
    family: Family, weights: LayerWeights, x: Tensor, mixture: Mixture, onto: Tensor | None = None
) -> Tensor:
    """What the mlp of a layer with experts makes of x [num_tokens, hidden_size], added to `onto` of the same
    shape."""
    routed = family.kernels.route(x, weights.router, mixture.routing)
    guess = partial(_guess, family.kernels, weights, x, mixture.routing)
    return mixed(family, weights, x, mixture, routed, guess, onto)


def _guess(kernels: Kernels, weights: LayerWeights, x: Tensor, routing: Routing) -> None:
    """Guess the experts of the next layer: its router on the input of this layer's router. The hidden state
    changes little from layer to layer."""
    behind = weights.next_experts
    if behind is None or x.shape[0] > MOST_GUESSED_TOKENS:
        return
    following = behind.weights()
    if following is not None and "router" in following:
        guessed = kernels.route(x, following.router, routing).experts.tolist()
        behind.expect(list(dict.fromkeys(itertools.chain(*guessed))))


def mixed(
    family: Family,
    weights: LayerWeights,
    x: Tensor,
    mixture: Mixture,
    routed: Routed,
    meanwhile: Callable[[], None] | None = None,
    onto: Tensor | None = None,
) -> Tensor:
    """The experts of each token, and the shared expert, added to `onto`."""
    if onto is not None and (mixture.narrow_size or mixture.shared_size):
        return onto + mixed(family, weights, x, mixture, routed, meanwhile)
    narrow = family.project(weights, "narrow_in", x) if mixture.narrow_size else x
    kernels, scales_inputs = family.kernels, mixture.scales_inputs
    y = _of_present(kernels, weights, narrow, routed, mixture, meanwhile, onto)
    if y is None:
        y = blend(kernels, weights, narrow, routed, mixture.compute, scales_inputs, meanwhile, onto)
    y = family.project(weights, "narrow_out", y) if mixture.narrow_size else y
    if not mixture.shared_size:
        return y
    if mixture.has_gate:
        shared = gated_mlp(family, weights, x, mixture.shared_function)
    else:
        shared = mlp(family, weights, x, mixture.activation)
    if mixture.has_shared_gate:
        shared *= family.kernels.router_scores(x, weights.vector("shared_gate"), None, "sigmoid")
    return y + shared


def _of_present(
    kernels: Kernels,
    weights: LayerWeights,
    x: Tensor,
    routed: Routed,
    mixture: Mixture,
    meanwhile: Callable[[], None] | None,
    onto: Tensor | None,
) -> Tensor | None:
    """blend() of one token whose experts are all in memory. None: nothing was computed or asked for."""
    if weights.take_present is None or x.shape[0] != 1 or mixture.scales_inputs or not mixture.has_gate:
        return None
    experts = weights.take_present(routed.experts.tolist()[0])
    if experts is None:
        return None
    if meanwhile is not None:
        meanwhile()
    given = [expert.gated for expert in experts]
    return kernels.experts.blend_token(x, given, mixture.function, routed.scores, onto)


def one_by_one(compute: Callable[[LayerWeights, Tensor], Tensor]) -> ComputeExperts:
    """Experts whose arithmetic kernels don't have: compute(weights of an expert, its rows of x) -> rows of
    the same shape."""

    def compute_all(
        kernels: Kernels,
        x: Tensor,
        tokens: Tensor,
        experts: Sequence[LentExpert],
        y: Tensor,
        arriving: Arriving | None = None,
    ) -> None:
        settle_all(arriving)
        for weights, first, end in experts:
            y[first:end] = compute(weights, x[tokens[first:end]])

    return compute_all


def blend(
    kernels: Kernels,
    weights: LayerWeights,
    x: Tensor,
    routed: Routed,
    compute: ComputeExperts,
    scales_inputs: bool = False,
    meanwhile: Callable[[], None] | None = None,
    onto: Tensor | None = None,
) -> Tensor:
    """The sum of each token's experts, times their scores: [num_tokens, hidden_size] -> the same shape. The
    sum is added to `onto`.

    Each expert is asked for once, for all its tokens. Experts come in groups, in the order in which they are
    in memory, and a group is computed together. A token's experts are added best first, so that the order in
    which they came changes no bit. `meanwhile` is called once, while missing experts are read.
    """
    order, rows, tokens, spans = _order(routed.experts)
    if scales_inputs:
        x, tokens = x[tokens] * routed.scores.view(-1, 1)[order], torch.arange(len(order), device=x.device)
    parts = x.new_empty(order.shape[0], x.shape[1])
    num_tokens = [end - first for first, end in spans.values()]
    for group, arriving in weights.arriving_groups(list(spans), num_tokens):
        if meanwhile is not None:
            meanwhile()
            meanwhile = None
        compute(kernels, x, tokens, [(expert, *spans[number]) for number, expert in group], parts, arriving)
    return kernels.experts.add(parts, rows, None if scales_inputs else routed.scores, onto)


def _order(experts: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[int, tuple[int, int]]]:
    """The places of `experts` (int64 [num_tokens, num_chosen], counted row by row), sorted by expert; for
    each place, where it is now, [num_tokens, num_chosen]; the token of each sorted place; and for each expert
    that is needed, where its places begin and end."""
    if experts.shape[0] == 1:
        (numbers,) = experts.tolist()
        order, rows, tokens, places = _order_of_one(len(numbers), experts.device)
        return order, rows, tokens, dict(zip(numbers, places, strict=True))
    flat = experts.flatten()
    found, counts = torch.unique(flat, return_counts=True)
    ends = counts.cumsum(0).tolist()
    spans = zip([0, *ends], ends, strict=False)
    order = flat.argsort(stable=True)
    rows, tokens = order.argsort().view(experts.shape), order // experts.shape[1]
    return order, rows, tokens, dict(zip(found.tolist(), spans, strict=True))


@lru_cache(maxsize=16)
def _order_of_one(
    num_chosen: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, list[tuple[int, int]]]:
    """_order() of one token, in which each expert has one place, but for the experts' numbers. Every layer of
    a step asks for this."""
    order = torch.arange(num_chosen, device=device)
    return order, order[None], torch.zeros_like(order), [(i, i + 1) for i in range(num_chosen)]
