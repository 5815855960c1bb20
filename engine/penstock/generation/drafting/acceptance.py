"""Acceptance: how often guesses came true, by their kind, of one sequence or of all."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

#: Guesses by what stood after the same words: a kind for each length of a match from here on ...
_MATCHES = (1, 2, 3, 4, 6, 9, 17)
#: ... and a draft model's guesses: a kind for each share of the probability from here on.
_SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95)
#: What is assumed of a draft model's guess at first: it is trusted a little less than it trusts itself. The
#: last one is of any of what it guesses at a place.
_OF_MODEL = (0.01, 0.03, 0.06, 0.12, 0.22, 0.35, 0.5, 0.65, 0.8, 0.9, 0.7)
#: What is assumed of a guess at first. Prompt lookup is right in 30 to 40% of cases in prose, and nearly
#: always in a long quotation.
_PRIORS = (
    *(0.12, 0.25, 0.35, 0.5, 0.65, 0.8, 0.9),
    #: The first token after the same words at another place than the best one.
    0.12,
    *_OF_MODEL,
    #: What the model itself found likely after the same token at another time, by rank (Luo et al. 2024,
    #: arXiv 2408.08696).
    *(0.3, 0.1, 0.06, 0.04, 0.03, 0.025, 0.02, 0.02),
    #: The same after the same two tokens.
    *(0.5, 0.12, 0.06, 0.04, 0.03, 0.025, 0.02, 0.02),
)
OTHER_PLACE = len(_MATCHES)
_FIRST_SHARE = OTHER_PLACE + 1
#: Any of what a draft model guesses at a place.
ANY_OF_MODEL = _FIRST_SHARE + len(_SHARES)
_FIRST_RANK = ANY_OF_MODEL + 1
#: How many likely tokens are remembered after a token.
NUM_RANKS = (len(_PRIORS) - _FIRST_RANK) // 2
#: How many guesses an assumption is worth.
_PRIOR_WEIGHT = 2.0
#: What was seen counts less with each further guess of the kind, so that a change of the text shows.
_DECAY = 0.97
#: With each step in which a kind is not tried, the assumption gains this share again: a drafter that did
#: not pay is tried again later.
_RECOVERY = 0.99


def kind_of_match(num_same: int) -> int:
    """The kind of a guess where so many tokens match, at least 1."""
    return bisect_right(_MATCHES, num_same) - 1


def kind_of_share(share: float) -> int:
    """The kind of a draft model's guess to which the model gives this share of the probability."""
    return _FIRST_SHARE + bisect_right(_SHARES, share) - 1


def kind_of_rank(rank: int, is_behind_two: bool = False) -> int:
    """The kind of the (rank + 1)-th likeliest token after the same token, or the same two tokens, at another
    time."""
    return _FIRST_RANK + rank + (NUM_RANKS if is_behind_two else 0)


def is_of_model(kind: int) -> bool:
    """Whether a draft model guessed it."""
    return _FIRST_SHARE <= kind < _FIRST_RANK


class Acceptance:
    """Rates by the kind of a guess."""

    def __init__(self, of_all: Acceptance | None = None) -> None:
        """of_all: the rates of all sequences, which are assumed of this one at first."""
        self._of_all = of_all
        self._right = [0.0] * len(_PRIORS)
        self._seen = [0.0] * len(_PRIORS)

    def rate(self, kind: int) -> float:
        """The expected share of right guesses among those that follow a right one."""
        assumed = _PRIORS[kind] if self._of_all is None else self._of_all.rate(kind)
        return (self._right[kind] + _PRIOR_WEIGHT * assumed) / (self._seen[kind] + _PRIOR_WEIGHT)

    def learn(self, kind: int, is_right: bool) -> None:
        """A guess that follows a right one was tried."""
        if self._of_all is not None:
            self._of_all.learn(kind, is_right)
        self._right[kind] = _DECAY * self._right[kind] + is_right
        self._seen[kind] = _DECAY * self._seen[kind] + 1

    def forget(self, kinds: Iterable[int]) -> None:
        """There were guesses of these kinds in a step, and none was tried. Rates of all sequences are not
        told by those of one: they forget once for each step."""
        for kind in kinds:
            self._right[kind] *= _RECOVERY
            self._seen[kind] *= _RECOVERY
