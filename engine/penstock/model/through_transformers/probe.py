"""The probe: transformers' model computes three tokens with weights that are all zero, before any weight is
read. The probe shows what each layer's attention is and which tensors come before the layers, and whether the
layers are functions of hidden states and positions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from penstock.errors import UnsupportedModel
from penstock.kernels.reference import ReferenceKernels
from penstock.model.through_transformers.attention import KeyRule, LayerAttention, read_attention
from penstock.model.through_transformers.desk import Desk
from penstock.model.through_transformers.outline import Given, Outline, Passed
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec

if TYPE_CHECKING:
    from penstock.model.through_transformers.skeleton import Skeleton

NUM_TOKENS = 3


class Probed(NamedTuple):
    """What was found out."""

    attentions: tuple[LayerAttention, ...]
    #: Names of the outline's modules that forward() calls before the first layer, and after the last one.
    before: frozenset[str]
    after: frozenset[str]
    #: Length of the tuple that layers return; None for layers that return a tensor.
    num_returned: int | None
    #: Width of what the layers pass on.
    hidden_size: int
    #: Experts that a token passes through in a layer.
    num_chosen: int


class ProbeDesk(Desk):
    """Products and attention are zero; what is asked of attention is noted."""

    def __init__(self, length: int) -> None:
        """`length` is the longest text in tokens."""
        super().__init__(ReferenceKernels(), lambda weights, name, x: x, 0, 1)
        self._length = length
        self.widths: Mapping[str, int] = {}
        self.asked: list[LayerAttention] = []
        self.num_chosen = 0

    def lay(self, tensors: Iterable[TensorSpec]) -> None:
        """Zeros for these tensors."""
        self.widths = {tensor.name: tensor.shape[0] for tensor in tensors if tensor.is_matrix}
        vectors = {tensor.name: zeros(tensor.shape) for tensor in tensors if not tensor.is_matrix}
        self.weights = LayerWeights(dict(vectors))

    def project(self, name: str, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], self.widths[name])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: Mapping[str, Any]) -> Tensor:
        self.asked.append(read_attention(q, k, v, mask, options, self._length))
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])

    def mix(self, module: nn.Module, x: Tensor, experts: Tensor, scores: Tensor) -> Tensor:
        if experts.shape != scores.shape or experts.shape[0] != x.shape[0]:
            raise UnsupportedModel("its experts are not chosen token by token")
        self.num_chosen = max(self.num_chosen, experts.shape[1])
        return torch.zeros_like(x)


def zeros(shape: Iterable[int]) -> Tensor:
    """Zeros that take the memory of one."""
    return torch.zeros(()).expand(tuple(shape))


def probe(skeleton: Skeleton, desk: ProbeDesk) -> Probed:
    """Raises UnsupportedModel for a model whose layers can't be computed one by one."""
    outline = skeleton.outline
    outer = {name: zeros(shape) for name, shape in skeleton.outer.own.items()}
    given = Given(torch.zeros(NUM_TOKENS, skeleton.embedding.shape[1]), torch.arange(NUM_TOKENS))
    run = _Run(desk, skeleton)
    with run.watching(outline.model):
        outline.run(given, outer, run.visit)
    if run.order != list(range(len(skeleton.layers))):
        raise UnsupportedModel("its forward pass does not go through its layers one after the other")
    if len(set(run.num_returned)) > 1:
        raise UnsupportedModel("its layers return different things")
    outline.num_returned = run.num_returned[0]
    hidden_size = _compare(outline, outer, skeleton.embedding.shape[1])
    return Probed(
        tuple(run.attentions),
        frozenset(run.before),
        frozenset(run.after),
        run.num_returned[0],
        hidden_size,
        desk.num_chosen,
    )


class _Run:
    """One forward pass through layers of zeros."""

    def __init__(self, desk: ProbeDesk, skeleton: Skeleton) -> None:
        self._desk, self._layers = desk, skeleton.layers
        self._outer = (*skeleton.outer.tensors, *skeleton.head)
        self._desk.lay(self._outer)
        self.order: list[int] = []
        self.attentions: list[LayerAttention] = []
        self.num_returned: list[int | None] = []
        self.before: set[str] = set()
        self.after: set[str] = set()

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Notes which modules of the model are called before the first layer and after it."""
        hooks = [
            module.register_forward_pre_hook(partial(self._note, name))
            for name, module in model.named_modules()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, name: str, module: nn.Module, args: Any) -> None:
        (self.after if self.order else self.before).add(name)

    def visit(self, index: int, passed: Passed) -> Any:
        self.order.append(index)
        parts, before = self._layers[index], len(self._desk.asked)
        self._desk.lay(parts.tensors)
        zero = {name: zeros(shape) for name, shape in parts.own.items()}
        with self._desk.functions:
            result = functional_call(parts.module, zero, passed.args, passed.kwargs)
        asked = self._desk.asked[before:]
        if len(asked) != 1:
            raise UnsupportedModel(
                f"layer {index} ({type(parts.module).__name__}) calls attention "
                f"{len(asked) or 'no'} times, and the cache has keys and values for one"
            )
        self.attentions += asked
        self.num_returned.append(len(result) if isinstance(result, tuple) else None)
        self._desk.lay(self._outer)
        return result


def _compare(outline: Outline, outer: Mapping[str, Tensor], width: int) -> int:
    """The width of hidden states. Raises UnsupportedModel if layers get more than hidden states and what
    positions make of them."""
    positions = torch.arange(NUM_TOKENS)
    calls = []
    for value in (0.0, 1.0):
        rows = torch.full((NUM_TOKENS, width), value)
        ids = torch.full((NUM_TOKENS,), int(value))
        calls.append(outline.before(Given(rows, positions, ids), outer)[1])
    for first, second in zip(*calls, strict=True):
        pairs = zip(_others(first), _others(second), strict=True)
        if not all(_is_equal(one, other) for one, other in pairs):
            raise UnsupportedModel("its layers get more than hidden states and positions (such as tokens)")
    return calls[0][0].hidden.shape[2]


def _others(passed: Passed) -> list[Any]:
    """What a layer gets beside its hidden states."""
    hidden = passed.hidden
    return [leaf for leaf in tree_leaves((passed.args, passed.kwargs)) if leaf is not hidden]


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    return isinstance(one, KeyRule) or one == other
