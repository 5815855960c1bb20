"""Beam search: which beginnings of an answer go on, and which whole answers are best. Numbers only: no model,
no tokens' texts.

The rules are those of transformers (generate(num_beams=...)). In each round, every beam proposes its
likeliest next tokens. All proposals are ranked by the sum of the log-probabilities of their answers. An
answer that ends is finished if it is among the first `num_beams` proposals, and is dropped otherwise. The
first `num_beams` answers that do not end are the beams of the next round. The score of a finished answer of L
tokens, its end token included, is sum / L ** length_penalty.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from penstock.errors import InvalidParameter

#: A larger exponent would leave the range of float64 for answers of some thousand tokens.
MAX_LENGTH_PENALTY = 10.0


@dataclass(frozen=True)
class BeamParams:
    """How to search. Raises InvalidParameter for values out of range, by the names that requests have."""

    #: Answers that are continued at the same time.
    num_beams: int
    #: The best answers that are returned.
    num_answers: int = 1
    #: Above 0, long answers are favoured; below 0, short ones.
    length_penalty: float = 1.0
    #: True: the search ends with `num_beams` finished answers. False: the search goes on while the best beam,
    #: at its present length, has a better score than the worst of the finished answers. "never": the same at
    #: the length that gives the beam its best score, so that no better answer is missed.
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if self.num_beams < 1:
            raise InvalidParameter("best_of", f"{self.num_beams} beams are asked for; at least 1 is needed")
        if not 1 <= self.num_answers <= self.num_beams:
            raise InvalidParameter(
                "n",
                f"n is {self.num_answers}; a search with {self.num_beams} beams gives 1 to {self.num_beams}",
            )
        if not abs(self.length_penalty) <= MAX_LENGTH_PENALTY:
            limit = MAX_LENGTH_PENALTY
            raise InvalidParameter(
                "length_penalty",
                f"length_penalty is {self.length_penalty}; it lies between -{limit:g} and {limit:g}",
            )
        if self.early_stopping not in (True, False, "never"):
            raise InvalidParameter(
                "early_stopping", f'early_stopping is {self.early_stopping!r}; it is true, false or "never"'
            )


class Candidate(NamedTuple):
    """A beam, by its number, and the proposal that goes on with the beam."""

    beam: int
    #: The number of the proposal among those of its beam.
    proposal: int
    #: The sum of the log-probabilities of all tokens.
    total: float


class Hypothesis(Protocol):
    """An answer, whole or not."""

    @property
    def total(self) -> float: ...

    @property
    def has_ended(self) -> bool: ...


H = TypeVar("H", bound=Hypothesis)


@dataclass(frozen=True)
class Finished(Generic[H]):
    """A whole answer."""

    score: float
    hypothesis: H


class BeamSearch(Generic[H]):
    """One search: round after round, from the beams to the next ones."""

    def __init__(self, params: BeamParams, first: H, max_length: int) -> None:
        """first: the empty answer. max_length: tokens of the longest answer."""
        self._params = params
        self._max_length = max_length
        #: Tokens of each beam.
        self._length = 0
        #: Best first.
        self.beams: list[H] = [first]
        #: At most num_beams, best first.
        self.finished: list[Finished[H]] = []

    def advance(self, proposals: List[List[float]], extend: Callable[[Candidate], H]) -> list[H]:
        """A round. proposals[i]: the log-probabilities of the tokens that beam i proposes, likeliest first.
        extend() makes the answer of a candidate. Returns the next beams; [] if the search is over."""
        width, living = self._params.num_beams, list[H]()
        self._length += 1
        for rank, candidate in enumerate(self._ranked(proposals)):
            hypothesis = extend(candidate)
            if not hypothesis.has_ended:
                living.append(hypothesis)
            elif rank < width:
                self._finish(hypothesis)
            if len(living) == width:
                break
        self.beams = living if self._goes_on(living) else []
        return self.beams

    def _ranked(self, proposals: List[List[float]]) -> list[Candidate]:
        """Best first. Of equal ones the lower beam comes first, and of a beam's the one that was proposed
        first."""
        candidates = [
            Candidate(beam, number, self.beams[beam].total + logprob)
            for beam, own in enumerate(proposals)
            for number, logprob in enumerate(own)
        ]
        return sorted(candidates, key=lambda each: -each.total)

    def _finish(self, hypothesis: H) -> None:
        score = self._score(hypothesis.total, self._length)
        bisect.insort(self.finished, Finished(score, hypothesis), key=lambda each: -each.score)
        del self.finished[self._params.num_beams :]

    def _goes_on(self, living: list[H]) -> bool:
        """Whether one of the beams may still become one of the best answers."""
        if not living or len(self.finished) < self._params.num_beams:
            return bool(living)
        if self._params.early_stopping is True:
            return False
        is_patient = self._params.early_stopping == "never" and self._params.length_penalty > 0
        length = self._max_length if is_patient else self._length
        return self._score(living[0].total, length) > self.finished[-1].score

    def _score(self, total: float, length: int) -> float:
        return total / math.pow(length, self._params.length_penalty)
