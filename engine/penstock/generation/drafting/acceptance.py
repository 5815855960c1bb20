"""Acceptance: how often guesses came true, of one sequence or of all."""

from __future__ import annotations

#: Matches of so many tokens and more share a rate.
_CLASSES = (2, 3, 4, 6, 9, 17)
#: What is assumed of a guess at first, by its match, and how many guesses that assumption is worth. Prompt
#: lookup is right in 30 to 40% of cases in prose, and nearly always in a long quotation.
_PRIOR = (0.25, 0.35, 0.5, 0.65, 0.8, 0.9)
_PRIOR_WEIGHT = 2.0
#: What was seen counts less with each further guess of the class, so that a change of the text shows.
_DECAY = 0.97
#: With each step in which a class is not tried, the assumption gains this share again: a drafter that did
#: not pay is tried again later.
_RECOVERY = 0.99


class Acceptance:
    """Rates by the length of a guess's match."""

    def __init__(self, of_all: Acceptance | None = None) -> None:
        """of_all: the rates of all sequences, which are assumed of this one at first."""
        self._of_all = of_all
        self._right = [0.0] * len(_CLASSES)
        self._seen = [0.0] * len(_CLASSES)

    def rate(self, num_same: int) -> float:
        """The expected share of right guesses where `num_same` tokens match."""
        index = _class_of(num_same)
        assumed = _PRIOR[index] if self._of_all is None else self._of_all.rate(num_same)
        right = self._right[index] + _PRIOR_WEIGHT * assumed
        return right / (self._seen[index] + _PRIOR_WEIGHT)

    def learn(self, num_same: int, num_accepted: int, num_guesses: int) -> None:
        """Of a chain of guesses the first ones were right. The first wrong one was tried, and those after it
        were not."""
        if self._of_all is not None:
            self._of_all.learn(num_same, num_accepted, num_guesses)
        index = _class_of(num_same)
        tried = min(num_guesses, num_accepted + 1)
        for number in range(tried):
            self._right[index] = _DECAY * self._right[index] + (number < num_accepted)
            self._seen[index] = _DECAY * self._seen[index] + 1

    def forget(self, num_same: int) -> None:
        """A guess with such a match was not tried."""
        if self._of_all is not None:
            self._of_all.forget(num_same)
        index = _class_of(num_same)
        self._right[index] *= _RECOVERY
        self._seen[index] *= _RECOVERY


def _class_of(num_same: int) -> int:
    return sum(num_same >= least for least in _CLASSES) - 1
