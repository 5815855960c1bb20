"""Allowance: how many seconds guesses may lose, whoever makes them.

Rates of acceptance say which guesses should pay, and they are wrong where a text changes or a drafter lies.
So guesses pay for themselves: what they cost is taken from an account, and each right one earns the time in
which the model would have said its token. Beyond that, the account gets a small share of each step, so that
guesses that did not pay are tried again, and a few at first. Steps lose no more than this share. Where a step
waits for layers, guesses cost nearly nothing, and the account limits nothing.

Guesses are paid by the plan's prediction at first. Predictions err: by the rates of one machine, a step of
two tokens should take 1.2 times as long as a step of one, and it took 1.8 times as long in hours in which the
memory was faster. So the account is settled when the step was measured.
"""

from __future__ import annotations

#: The share of each step's time that the account gets, and what it begins with, in steps. Over 32 steps,
#: guesses that are always wrong cost 0.62 steps, 1.9%, and the last of them. With less at first, few
#: sequences of several would have a guess in the first steps, and none would learn that theirs come true.
SHARE, FIRST = 0.01, 0.3
#: The account keeps no more than the time of so many steps: what was earned long ago is not lost later.
_MOST = 4.0
#: And it owes no more: a step that was slow by accident does not end guessing for longer.
_LEAST = -0.5


class Allowance:
    """The account of a server's guesses, of all sequences together. All times are those of the plan."""

    def __init__(self) -> None:
        self._left_s: float | None = None
        self._token_s = 0.0
        self._plain_s = 0.0
        #: The last step's guesses, and what was paid for them.
        self._num_guesses, self._paid_s = 0, 0.0

    def begin(self, plain_s: float, num_sampled: int) -> float:
        """A step begins that takes `plain_s` without guesses, and gives so many tokens. Returns the seconds
        that its guesses may cost. Above 0, one guess may cost more."""
        first_s = FIRST * plain_s
        if self._left_s is None:
            self._left_s = first_s
        elif self._left_s < first_s:
            self._left_s = max(_LEAST * plain_s, min(first_s, self._left_s + SHARE * plain_s))
        self._token_s, self._plain_s = plain_s / num_sampled, plain_s
        self._num_guesses, self._paid_s = 0, 0.0
        return self._left_s

    def pay(self, num_guesses: int, seconds: float) -> None:
        """What so many guesses, and making them, should add to the step."""
        assert self._left_s is not None
        self._num_guesses, self._paid_s = num_guesses, seconds
        self._left_s -= seconds

    def settle(self, growth: float) -> None:
        """Steps as large as the last one take `growth` times as long as steps without its guesses. A guess
        never costs more than a step of its own."""
        if self._num_guesses and self._left_s is not None:
            cost_s = self._plain_s * min(max(0.0, growth - 1), self._num_guesses)
            self._left_s += self._paid_s - cost_s
            self._num_guesses = 0

    def earn(self, num_right: int) -> None:
        """So many guesses of the step were right."""
        if self._left_s is not None and num_right:
            most_s = max(self._left_s, _MOST * self._plain_s)
            self._left_s = min(self._left_s + num_right * self._token_s, most_s)
