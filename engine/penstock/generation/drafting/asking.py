"""Asking a draft model: level by level, as long as the next level should bring more than it costs.

The model computes the likeliest guesses of all sequences together, and its answers are the next level's
guesses. This is OPT-Tree's way (Wang et al. 2024, arXiv 2406.17276), over several sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List
from typing import NamedTuple, Protocol

from penstock.generation.drafting.acceptance import ANY_OF_MODEL, kind_of_share
from penstock.generation.drafting.choice import Choice, PlainStep, choose
from penstock.generation.drafting.guesses import Guesses
from penstock.generation.sequence import Sequence

#: Most guesses of a sequence whose followers are asked for in one level.
MAX_WIDTH = 6
#: What a draft model catches up with has to be repaid within so many tokens.
_REPAYING = 64


class Place(NamedTuple):
    """A guess whose followers a draft model should say, by its number among the sequence's guesses, and the
    guess that it follows; -1: the text's end, which has no token of its own."""

    sequence: Sequence
    node: int = -1
    parent: int = -1
    token_id: int = -1
    #: That this guess and all those before it are right.
    chance: float = 1.0


class Guesser(Protocol):
    """A draft model."""

    #: Levels that the first expand() of a step pays for, so that further ones take nothing; 1: its own.
    levels_of_pass: int

    def seconds(self, num_places: int) -> float:
        """What expand() takes for so many places; 0 if nothing was measured."""
        ...

    def backlog_s(self, sequences: List[Sequence]) -> float:
        """What it takes to compute the sequences' tokens that the model has not seen, before it can guess."""
        ...

    def start(self, sequences: List[Sequence]) -> list[Sequence]:
        """Begin a step. Returns the sequences for which there can be guesses."""
        ...

    def expand(self, places: List[Place]) -> list[list[tuple[int, float]]]:
        """One level: for each place tokens that may follow, likeliest first, with their shares of the
        probability. The guess before a place was a place before, in the same step."""
        ...

    def finish(self) -> None:
        """All guesses of the step are there."""
        ...


class Asking:
    """The questions of one step."""

    def __init__(self, model: Guesser, guesses: list[Guesses], step: PlainStep) -> None:
        self._model, self._step = model, step
        self._guesses = {each.sequence: each for each in guesses}
        self._asked = set[tuple[Sequence, int]]()
        #: What all levels should have taken.
        self.seconds = 0.0
        self.choice = choose(guesses, step)

    def run(self) -> Choice:
        """Add what the model guesses. Returns the choice among all guesses."""
        try:
            return self._run()
        finally:
            self._model.finish()

    def _run(self) -> Choice:
        places = self._worth([Place(sequence) for sequence in self._guesses])
        if places:
            able = set(self._model.start([place.sequence for place in places]))
            places = [place for place in places if place.sequence in able]
        while places:
            self.seconds += self._model.seconds(len(places))
            for place, found in zip(places, self._model.expand(places), strict=True):
                self._asked.add((place.sequence, place.node))
                guesses = self._guesses[place.sequence]
                for token_id, share in found:
                    guesses.add(place.node, token_id, kind_of_share(share))
                if found:
                    guesses.doubt(place.node, [each for each, _ in found], guesses.rate(ANY_OF_MODEL))
            self.choice = choose(list(self._guesses.values()), self._step, self.seconds)
            places = self._worth(list(self._next()))
        return self.choice

    @property
    def is_begun(self) -> bool:
        """Whether the model guessed anything."""
        return bool(self._asked)

    def _worth(self, places: list[Place]) -> list[Place]:
        """Of these places as many of the likeliest as should bring the most tokens per second; none where
        fewer than now."""
        order = sorted(places, key=lambda place: -place.chance)
        best, most = 0, self.choice.rate
        # Twice as many each time: each count asks for a prediction.
        for count in sorted({min(2**power, len(order)) for power in range(len(order).bit_length() + 1)}):
            rate = self._rate_with(order[:count]) if count else 0.0
            if rate > most:
                best, most = count, rate
        return order[:best]

    def _rate_with(self, places: list[Place]) -> float:
        """Tokens per second if as many of these places' followers are right as usually are."""
        choice, seconds, levels = self.choice, self.seconds + self._model.seconds(len(places)), 1
        if not self._asked:
            seconds += self._repaid_s()
            levels = self._model.levels_of_pass

        def rate_to(depth: int) -> float:
            """With a chain of so many guesses after each place."""
            rates = [self._guesses[place.sequence].rate(ANY_OF_MODEL) for place in places]
            chains = [sum(rate**level for level in range(1, depth + 1)) for rate in rates]
            hope = sum(place.chance * chain for place, chain in zip(places, chains, strict=True))
            num_guesses = min(self._step.room, choice.num_guesses + depth * len(places))
            return self._step.rate(choice.num_right + hope, num_guesses, seconds)

        return max(rate_to(min(2**power, levels)) for power in range((levels - 1).bit_length() + 1))

    def _repaid_s(self) -> float:
        """A step's share of what the model has to catch up with: the rest of the answers repays it."""
        sequences = list(self._guesses)
        num_left = max(each.max_total_tokens - each.num_tokens for each in sequences)
        return self._model.backlog_s(sequences) / max(1, min(num_left, _REPAYING))

    def _next(self) -> Iterator[Place]:
        """Guesses that the step would compute and that follow a place of an earlier level."""
        for guesses, nodes in zip(self._guesses.values(), self.choice.nodes, strict=True):
            num_left, sequence = MAX_WIDTH, guesses.sequence
            for node in nodes:
                parent = guesses.parents[node]
                is_new = (sequence, node) not in self._asked and (sequence, parent) in self._asked
                if is_new and num_left:
                    num_left -= 1
                    yield Place(sequence, node, parent, guesses.token_ids[node], guesses.chances[node])
