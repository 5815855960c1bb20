"""Drafter: guesses how a sequence goes on, so that one sweep computes several of its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List

from penstock.generation.sequence import Sequence


class Drafter:
    """Guesses cost time and places in a step, and never change an answer: a guess is accepted where the
    sampler chooses the same token. This class guesses nothing."""

    def propose(
        self, sequences: Iterable[Sequence], num_tokens: int, room: int
    ) -> Mapping[Sequence, List[int]]:
        """For each of these sequences the token ids that may follow its tokens, in order. A sequence without
        a guess may be left out. The step has `num_tokens` tokens without guesses, and room for `room` guesses
        in all. The scheduler drops guesses that have no room, the last ones first."""
        return {}

    def learn(self, sequence: Sequence, drafts: tuple[int, ...], num_accepted: int) -> None:
        """The first `num_accepted` of these guesses were right. The sequence does not have them yet."""


NO_DRAFTS = Drafter()
