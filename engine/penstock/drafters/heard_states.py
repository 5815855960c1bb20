"""HeardStates: the model's hidden states of a step after some layers, for heads that predict from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.generation.drafting.draft_tree import DraftTree
from penstock.generation.scheduling.batch import Batch
from penstock.generation.sequence import Sequence


class _Part(NamedTuple):
    """A sequence's part of a step."""

    sequence: Sequence
    #: The place in the text of its first token in the step, and the row of that token.
    start: int
    first_row: int
    num_new_tokens: int
    drafts: DraftTree

    def rows(self) -> list[int]:
        """Rows of tokens that the text has: those that were pending, and guesses that came true."""
        end = self.first_row + self.num_new_tokens
        right = self.drafts.follow(self.sequence.token_ids[self.start + self.num_new_tokens :])
        return [*range(self.first_row, end), *(end + node for node in right)]


class HeardStates:
    """The hidden states stay until take() or until the next step, in memory that the step itself had where
    they are those of the last layer; others are copied, since later layers may write over them."""

    def __init__(self, layers: tuple[int, ...], num_layers: int) -> None:
        """layers: from 0, in order, of so many."""
        self._layers, self._last_layer = layers, num_layers - 1
        self._parts: list[_Part] = []
        self._hidden: list[Tensor] = []

    def listen(self, batch: Batch) -> Callable[[int, Tensor], None]:
        """What a sweep of this step should call after each layer (Executor.sweep())."""
        parts, heard, first = list[_Part](), list[Tensor](), 0
        for item in batch.scheduled:
            sequence, num_new = item.sequence, item.num_new_tokens
            parts.append(_Part(sequence, sequence.num_computed_tokens, first, num_new, item.drafts))
            first += num_new + item.drafts.num_nodes
        self._parts, self._hidden = [], []

        def observe(index: int, hidden: Tensor) -> None:
            if index in self._layers:
                heard.append(hidden if index == self._last_layer else hidden.clone())
            if index == self._last_layer:
                self._parts, self._hidden = parts, heard

        return observe

    def take(self) -> Iterator[tuple[Sequence, int, Tensor]]:
        """For each sequence of the step that guesses may be wanted for, the place of a token in its text, and
        the hidden states of that token and those after it, one layer's beside the other's, float32
        [num_tokens, num_layers * hidden_size], where layers are computed. Each step is taken once."""
        parts, hidden, self._parts, self._hidden = self._parts, self._hidden, [], []
        for part in parts:
            if part.sequence.params.speculation:
                rows = torch.tensor(part.rows(), device=hidden[0].device)
                yield part.sequence, part.start, torch.cat([each[rows] for each in hidden], dim=1)
