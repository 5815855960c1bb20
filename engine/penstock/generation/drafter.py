"""Drafter: who guesses what a sequence goes on with, so that one sweep computes several of its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List
from typing import Protocol

from penstock.generation.sequence import Sequence


class Drafter(Protocol):
    """Guesses cost time and places in a step, and never change an answer: the scheduler takes as many as have
    room, and a guess is accepted where the sampler chooses the same token."""

    def propose(self, sequences: Iterable[Sequence], num_tokens: int) -> Mapping[Sequence, List[int]]:
        """Token ids that may follow the tokens of each of these sequences, one after the other; nothing for a
        sequence without a guess. More than `num_tokens` in all have no place."""
        ...


class NoDrafts:
    """A Drafter that guesses nothing."""

    def propose(self, sequences: Iterable[Sequence], num_tokens: int) -> Mapping[Sequence, List[int]]:
        return {}


NO_DRAFTS = NoDrafts()
