"""Trial: whether drafts pay, by what steps took. Pure: the caller has the clock.

At first, steps with drafts and steps without take turns. Then drafts go on while they bring more tokens per
second. Drafts that do not pay stop, and are tried again after some steps, since a text may turn into a
quotation; each time after twice as many.

A prediction errs: by the rates of one machine a step of two tokens should take 1.2 times as long as a step of
one, and it took 1.8 times as long. So the trial also says how much longer than predicted steps with drafts
take.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

#: Steps with drafts that decide, and steps of each kind that are remembered.
_NUM_TRIED, _NUM_KEPT = 4, 8
#: Steps without drafts after which drafts are tried again: at first, and at most. Four of 64 steps that take
#: half as long again are 3%, and the next trial begins with what is known of the acceptance.
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 64


class TriedStep(NamedTuple):
    """What a step brought and took. Times are multiples of the predicted time of the same step without
    drafts."""

    #: Of each sequence.
    num_tokens: float
    seconds: float
    predicted: float = 1.0


class Trial:
    """Of steps with about the same number of sequences."""

    def __init__(self) -> None:
        self._plain = deque[TriedStep](maxlen=_NUM_KEPT)
        self._drafted = deque[TriedStep](maxlen=_NUM_KEPT)
        #: Steps since the last one with drafts, and as many as end a pause.
        self._num_idle, self._pause = 0, _FIRST_PAUSE

    @property
    def may_draft(self) -> bool:
        """Whether the next step may have drafts."""
        if len(self._drafted) < _NUM_TRIED:
            return len(self._plain) > len(self._drafted)
        return _rate(self._drafted) > _rate(self._plain)

    @property
    def price(self) -> float:
        """How many times their predicted seconds steps with drafts take, where steps without take theirs; 1
        if no step was tried."""
        if not self._drafted or not self._plain:
            return 1.0
        errors = (each.seconds / each.predicted for each in self._drafted)
        return statistics.median(errors) / statistics.median(each.seconds for each in self._plain)

    def record(self, step: TriedStep, has_drafts: bool) -> None:
        """A step has ended."""
        if has_drafts:
            self._drafted.append(step)
            self._num_idle = 0
            if len(self._drafted) >= _NUM_TRIED and self.may_draft:
                self._pause = _FIRST_PAUSE
            return
        self._plain.append(step)
        self._num_idle += 1
        if self._drafted and self._num_idle >= self._pause:
            self._drafted.clear()
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)


def _rate(steps: deque[TriedStep]) -> float:
    """Tokens of a sequence in a predicted plain step's time. A step that was slow by accident does not
    count."""
    return statistics.fmean(each.num_tokens for each in steps) / statistics.median(
        each.seconds for each in steps
    )
