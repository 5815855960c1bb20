"""LayerWeights: the matrices and vectors that a layer computes with, by name. LayerWeights know neither
formats nor where bytes come from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from penstock.kernels import Arriving, GatedExpert, Matrix, PlanesTensor, Router
from penstock.weights.tensors import ModelTensors, UnitLayout

if TYPE_CHECKING:
    from penstock.weights.adapters.adapted import Adapted
    from penstock.weights.expert_table import ExpertRun

#: Experts that are there together: (number, weights of the expert).
ExpertGroup = list[tuple[int, "LayerWeights"]]
#: Numbers of experts, and how many tokens each is for -> these experts, in the order in which they are there.
AskForExperts = Callable[[Sequence[int], Sequence[int]], Iterator[ExpertGroup]]
AskForArriving = Callable[[Sequence[int]], Iterator[tuple[ExpertGroup, "Arriving | None"]]]


@dataclass(frozen=True)
class NextExperts:
    """The experts of the layer after a layer, of which the layer may guess some."""

    #: The weights of that layer; None where they are not in memory, or where all its experts are.
    weights: Callable[[], LayerWeights | None]
    #: Takes guesses: numbers of experts that the next layer is likely to ask for.
    expect: Callable[[Sequence[int]], None]


def no_experts(numbers: Sequence[int], num_tokens: Sequence[int]) -> Iterator[ExpertGroup]:
    """The answer of a layer without experts."""
    raise LookupError("this layer has no experts")


class LayerWeights:
    """Named views into a unit's buffer."""

    #: What adapters add to the layer's products in this step; None where no request has an adapter.
    adapted: Adapted | None = None

    def __init__(self, tensors: dict[str, Matrix | Tensor], ask: AskForExperts = no_experts) -> None:
        self._tensors = tensors
        self._ask = ask
        vectors = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
        matrices = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, Tensor)}
        # Methods of dictionaries, which Python calls without a frame: a step asks for hundreds of tensors.
        self.matrix: Callable[[str], Matrix] = matrices.__getitem__
        self.vector: Callable[[str], Tensor] = vectors.__getitem__
        #: None: there are no experts, or nobody takes guesses.
        self.next_experts: NextExperts | None = None
        #: arriving_groups() of a layer; None: experts are lent when they are there.
        self.ask_arriving: AskForArriving | None = None
        #: Different experts, if all of them are in memory: valid until others are asked for. None: they are
        #: not. The attribute is None where nobody knows without asking for them.
        self.take_present: Callable[[Sequence[int]], Sequence[LayerWeights] | None] | None = None
        #: None: compiled kernels don't find the layer's experts by themselves.
        self.expert_run: ExpertRun | None = None
        #: A vector that some models have and others lack, such as a bias.
        self.optional: Callable[[str], Tensor | None] = vectors.get

    @classmethod
    def views(cls, layout: UnitLayout, buffer: Tensor, ask: AskForExperts = no_experts) -> LayerWeights:
        """Views into `buffer` (uint8, at least [layout.num_bytes])."""
        return cls(
            {slot.tensor.name: slot.tensor.format.operand(slot.arrays(buffer)) for slot in layout.slots}, ask
        )

    def experts(self, numbers: Sequence[int]) -> Iterator[tuple[int, LayerWeights]]:
        """(number, weights) of these experts, as expert_groups() brings them. An expert's weights are valid
        until the next expert is asked for."""
        for group in self._ask(numbers, ()):
            yield from group

    def expert_groups(self, numbers: Sequence[int], num_tokens: Sequence[int]) -> Iterator[ExpertGroup]:
        """These experts, each for so many tokens, in groups: first all that are in memory, then those that
        have arrived meanwhile. Computing with a group hides the reading of the next ones. A group's weights
        are valid until the next group is asked for. Raises what reading raised.

        Experts that the processor computes beside a card, as matrices in_ram(), come before all others or, if
        they come from the disk, after them. They are valid until no more groups come. An empty group follows
        them: after the others, and after each group from the disk."""
        return self._ask(numbers, num_tokens)

    def arriving_groups(
        self, numbers: Sequence[int], num_tokens: Sequence[int]
    ) -> Iterator[tuple[ExpertGroup, Arriving | None]]:
        """What expert_groups() brings; a group may end with experts that are still being read, with their
        reads. Whoever has computed a group has waited for all of them."""
        if self.ask_arriving is not None:
            return self.ask_arriving(numbers)
        return ((group, None) for group in self.expert_groups(numbers, num_tokens))

    def in_ram(self) -> LayerWeights:
        """The same weights, whose matrices the processor computes beside a card."""
        from penstock.kernels.shared.split_matrix import SplitMatrix

        matrices = {name: each for name, each in self._tensors.items() if not isinstance(each, Tensor)}
        return LayerWeights(self._tensors | {name: SplitMatrix((), each) for name, each in matrices.items()})

    @cached_property
    def gated(self) -> GatedExpert:
        """The weights of an expert, found once: a step asks for hundreds of experts."""
        biases = self.optional("gate_up.bias"), self.optional("down.bias")
        return GatedExpert(self.matrix("gate_up"), self.matrix("down"), *biases)

    @cached_property
    def router(self) -> Router:
        """The router of a layer with experts."""
        return Router(self.vector("router"), self.optional("router.bias"), self.optional("router.correction"))

    def map(self, function: Callable[[Tensor], Tensor]) -> LayerWeights:
        """What `function` makes of each tensor, and of each part of a matrix."""
        return LayerWeights(
            {
                name: function(tensor) if isinstance(tensor, Tensor) else tensor.map(function)
                for name, tensor in self._tensors.items()
            }
        )

    def with_matrices(self, matrices: Mapping[str, Matrix]) -> LayerWeights:
        """The same weights with these matrices, some of which may be in place of others."""
        return LayerWeights({**self._tensors, **matrices}, self._ask)

    def adapted_by(self, adapted: Adapted) -> LayerWeights:
        """The same weights, with adapters for some of a step's rows."""
        weights = copy.copy(self)
        weights.adapted = adapted
        return weights

    def for_rows(self, first: int, end: int) -> LayerWeights:
        """The weights for products that have rows first:end of the step alone."""
        return self if self.adapted is None else self.adapted_by(self.adapted.part(first, end))

    def asking(self, ask: AskForExperts) -> LayerWeights:
        """The same weights with other experts."""
        return LayerWeights(self._tensors, ask)

    def with_lower_planes(self, lower: LayerWeights) -> LayerWeights:
        """The same weights, whose matrices in planes have their lower ones as well: those of `lower`."""
        whole: dict[str, Matrix | Tensor] = {}
        for name, plane in lower.items():
            upper = self._tensors[name]
            assert isinstance(upper, PlanesTensor) and isinstance(plane, Tensor)
            whole[name] = upper.with_lower(plane)
        return LayerWeights(self._tensors | whole, self._ask)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def items(self) -> Iterator[tuple[str, Matrix | Tensor]]:
        yield from self._tensors.items()


def with_head(tensors: ModelTensors, head: LayerWeights, embedding: LayerWeights) -> LayerWeights:
    """The head with its matrix, which is the embedding's matrix where the two are tied."""
    if not tensors.is_tied:
        return head
    return head.with_matrices({"head": embedding.matrix("embedding").rows(0, tensors.output_matrix.shape[0])})
