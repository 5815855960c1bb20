"""Drafter: guesses how a sequence goes on, so that one sweep computes several of its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List

from penstock.generation.drafting.draft_tree import DraftTree
from penstock.generation.sequence import Sequence


class Drafter:
    """Guesses cost time and places in a step, and never change an answer: a guess is accepted where the
    sampler chooses the same token. This class guesses nothing."""

    #: How many of the likeliest tokens at each place learn() wants to know of this step.
    num_followers = 0

    def propose(
        self, sequences: Iterable[Sequence], num_tokens: int, room: int
    ) -> Mapping[Sequence, DraftTree]:
        """For each of these sequences the tokens that may follow its tokens. A sequence without a guess may
        be left out. The step has `num_tokens` tokens without guesses, and room for `room` guesses in all. The
        scheduler drops guesses that have no room, the last ones of a tree first."""
        return {}

    def learn(
        self, sequence: Sequence, drafts: DraftTree, right: List[int], followers: List[tuple[int, ...]]
    ) -> None:
        """Of these guesses, which a step computed, these nodes were right, in order. The sequence does not
        have their tokens yet. followers: the likeliest tokens after the sequence's tokens, and after each
        guess; empty where nobody asked for them."""


NO_DRAFTS = Drafter()
