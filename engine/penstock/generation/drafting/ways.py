"""Ways: which of several drafters guesses in a step, by what each brought so far. Pure.

What a way brings is told in plain steps: the tokens that each sequence gained, by the time of the step as a
multiple of the same step without guesses. At first, that is what expectation.py has. All ways guess from the
text as well, and each of them may leave it at that, where nothing else pays.

A way that should bring less is tried now and then, since expectations err and texts change. What such tries
should lose, in tokens, is bounded by a share of all tokens. So a way that is nearly as good is tried often,
and a bad one rarely.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import NamedTuple, Protocol

from penstock.config import EngineConfig
from penstock.generation.drafting.asking import Guesser
from penstock.generation.drafting.expectation import Assumed, expected

#: The share of tokens that trying other ways may lose.
SHARE = 0.02
#: What is kept for tries of a way, at most: tokens of a sequence, in a plain step's time of it. No way can
#: be so much worse that it is never tried again.
_MOST_LEFT = 32.0
#: What is expected counts as so many plain steps' time with a way.
_PRIOR = 3.0
#: What was seen counts less with each further step of the way.
_DECAY = 0.98


class Rival(Guesser, Protocol):
    """A drafter that may guess in a step, or leave it to another one."""

    @property
    def assumed(self) -> Assumed:
        """What is assumed of its guesses before any was tried."""
        ...

    @property
    def spent_s(self) -> float:
        """Seconds that guesses have taken so far; others' may be among them."""
        ...


class Brought:
    """What one way brought in steps of about so many sequences."""

    def __init__(self, hope: float) -> None:
        """hope: what it should bring, as a multiple of steps without guesses."""
        self._gained, self._spent = _PRIOR * hope, _PRIOR
        #: Plain steps' time of the last step with it.
        self.last_spent = 1.0
        #: Steps since it was tried, and the tokens of a sequence that trying it may lose.
        self.num_idle, self.left = 0, 0.0

    @property
    def rate(self) -> float:
        """Tokens of a sequence in a plain step's time."""
        return self._gained / self._spent

    def learn(self, gained: float, spent: float) -> None:
        """A step gave each sequence so many tokens, in so many plain steps' time."""
        self._gained = _DECAY * self._gained + gained
        self._spent = _DECAY * self._spent + spent
        self.last_spent = spent


class Trials:
    """The choice between ways, in steps of about so many sequences."""

    def __init__(self, hopes: List[float]) -> None:
        """hopes: what each way should bring, as a multiple of steps without guesses."""
        self.brought = [Brought(hope) for hope in hopes]

    def pick(self) -> int:
        """The number of the way that should guess now: the best one, or another one that is affordable to
        try, the one longest not tried."""
        brought = self.brought
        best = max(range(len(brought)), key=lambda way: brought[way].rate)
        for way in sorted(range(len(brought)), key=lambda way: -brought[way].num_idle):
            each, cost = brought[way], self._cost(way, best)
            if way != best and cost < each.left:
                each.left -= cost
                return way
        return best

    def _cost(self, way: int, best: int) -> float:
        """Tokens of a sequence that a step with the way should lose."""
        each = self.brought[way]
        return (self.brought[best].rate - each.rate) * each.last_spent

    def learn(self, way: int, gained: float, spent: float) -> None:
        """A step with this way gave each sequence so many tokens, in so many plain steps' time."""
        saved = SHARE / max(1, len(self.brought) - 1) * gained
        for number, each in enumerate(self.brought):
            each.num_idle = 0 if number == way else each.num_idle + 1
            # Each way saves for itself, or cheap tries of one would leave nothing for the other.
            each.left = min(each.left + saved, _MOST_LEFT * each.last_spent)
        self.brought[way].learn(gained, spent)


class _Step(NamedTuple):
    """A step whose guesses are made."""

    trials: Trials
    way: int
    num_sampled: int
    #: Plain steps' time.
    spent: float


class Ways:
    """Drafters of which one guesses in each step."""

    def __init__(self, rivals: List[Rival], predict_s: Callable[[int], float], config: EngineConfig) -> None:
        """rivals: of two that should bring the same, the first guesses. predict_s: tokens of a step ->
        seconds; 0 if nothing is known."""
        self._rivals, self._predict_s, self._config = rivals, predict_s, config
        #: By the number of binary digits of the number of sequences.
        self._trials: dict[int, Trials] = {}
        self._way, self._before_s = 0, 0.0
        self._step: _Step | None = None
        self._num_right, self._is_done = 0, False

    def pick(self, num_sampled: int) -> Rival:
        """Who guesses in the step that begins, of so many sequences."""
        self._end_step()
        trials = self._trials.get(num_sampled.bit_length())
        if trials is None:
            trials = self._trials[num_sampled.bit_length()] = Trials(self._hopes(num_sampled))
        self._way = trials.pick()
        picked = self._rivals[self._way]
        self._before_s = picked.spent_s
        return picked

    def guessed(self, num_sampled: int, num_tokens: int, num_guesses: int) -> None:
        """The one that was picked has guessed: the step computes so many tokens, and so many guesses."""
        plain_s = self._predict_s(num_tokens)
        drafting_s = self._rivals[self._way].spent_s - self._before_s
        spent = (self._predict_s(num_tokens + num_guesses) + drafting_s) / plain_s
        trials = self._trials[num_sampled.bit_length()]
        self._step = _Step(trials, self._way, num_sampled, spent)
        self._num_right, self._is_done = 0, False

    def learn(self, num_right: int) -> None:
        """So many guesses of a sequence were right in the last step."""
        self._num_right, self._is_done = self._num_right + num_right, True

    def _end_step(self) -> None:
        """Learn what the last step brought, if it was not cancelled."""
        if (step := self._step) is not None and self._is_done:
            step.trials.learn(step.way, 1 + self._num_right / step.num_sampled, step.spent)
        self._step = None

    def _hopes(self, num_sampled: int) -> list[float]:
        """What each way should bring."""
        hopes = list[float]()
        for each in self._rivals:
            assumed = each.assumed
            if assumed.level_s is not None:  # which is asked for many trees
                assumed = assumed._replace(level_s=functools.cache(assumed.level_s))
            found = expected(assumed, num_sampled, self._predict_s, self._config)
            hopes.append(found.tokens_per_s / found.plain_tokens_per_s)
        return hopes
