"""StatePaths: what drafts take in a model with recurrent states, in addition to their rows of a step.
Pure."""

from __future__ import annotations

import sys
from typing import NamedTuple

from penstock.memory.planning.cost import Predict
from penstock.memory.planning.plan import MemoryPlan
from penstock.memory.planning.step_work import StepLoad


class StatePaths(NamedTuple):
    """The guesses of a sequence go on from a copy of its states."""

    #: Of each sequence with guesses.
    seconds: float = 0.0
    #: Guesses of a step that have room.
    room: int = sys.maxsize

    @classmethod
    def of(cls, plan: MemoryPlan, predict: Predict) -> StatePaths:
        """By a plan, and what its steps should take."""
        if not plan.num_state_slots:
            return NO_PATHS
        plain = StepLoad.decode(1)
        seconds = predict(plain._replace(num_paths=1)).seconds - predict(plain).seconds
        return cls(seconds, plan.guess_room.num_rows)


NO_PATHS = StatePaths()
