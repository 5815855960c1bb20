"""Drafter: guesses how a sequence goes on, so that one sweep computes several of its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List
from typing import Protocol

from penstock.generation.sequence import Sequence


class Drafter(Protocol):
    """Guesses cost time and places in a step, and never change an answer. The scheduler takes as many guesses
    as have room, and a guess is accepted where the sampler chooses the same token."""

    def propose(self, sequences: Iterable[Sequence], num_tokens: int) -> Mapping[Sequence, List[int]]:
        """For each of these sequences the token ids that may follow its tokens, in order. A sequence without
        a guess may be left out. The step has room for `num_tokens` guesses in all."""
        ...


class NoDrafts:
    """A Drafter that guesses nothing."""

    def propose(self, sequences: Iterable[Sequence], num_tokens: int) -> Mapping[Sequence, List[int]]:
        return {}


NO_DRAFTS = NoDrafts()
