"""Allowance: how many seconds guesses may lose, whoever makes them.

Rates of acceptance say which guesses should pay, and they are wrong where a text changes or a drafter lies.
So guesses pay for themselves: what they cost is taken from an account, and each right one earns the time in
which the model would have said its token. Beyond that, the account gets a small share of each step, so that
guesses that did not pay are tried again, and a few at first. Steps lose no more than this share. Where a step
waits for layers, guesses cost nearly nothing, and the account limits nothing.
"""

from __future__ import annotations

#: The share of each step's time that the account gets, and what it begins with, in steps. Over 32 steps,
#: guesses that are always wrong cost 0.84 steps: 2.6%.
SHARE, FIRST = 0.02, 0.2
#: The account keeps no more than the time of so many steps: what was earned long ago is not lost later.
_MOST = 4.0


class Allowance:
    """The account of a server's guesses, of all sequences together."""

    def __init__(self) -> None:
        self._left_s: float | None = None
        self._token_s = 0.0
        self._most_s = 0.0

    def begin(self, plain_s: float, num_sampled: int) -> float:
        """A step begins that takes `plain_s` without guesses, and gives so many tokens. Returns the seconds
        that its guesses may cost. Above 0, one guess may cost more."""
        first_s = FIRST * plain_s
        if self._left_s is None:
            self._left_s = first_s
        elif self._left_s < first_s:
            self._left_s = min(first_s, self._left_s + SHARE * plain_s)
        self._token_s, self._most_s = plain_s / num_sampled, _MOST * plain_s
        return self._left_s

    def spend(self, seconds: float) -> None:
        """What guesses cost in the step."""
        assert self._left_s is not None
        self._left_s -= seconds

    def earn(self, num_right: int) -> None:
        """So many guesses of the step were right."""
        if self._left_s is not None and num_right:
            self._left_s = min(self._left_s + num_right * self._token_s, max(self._left_s, self._most_s))
