"""StepLimit: how many tokens a step may have. Numbers only."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

#: Tokens that each prompt advances by in a step, if the step has room for prompts at all.
MIN_CHUNK = 32


@dataclass(frozen=True)
class StepLimit:
    """A step's limits in tokens and in seconds."""

    max_num_batched_tokens: int
    #: Seconds that a step should take at most. 0: no limit.
    step_time_target_s: float
    #: Tokens of a step -> seconds. More tokens never take less.
    predict_s: Callable[[int], float]

    def num_tokens(self, num_riders: int) -> int:
        """The most tokens of a step with so many riders (sequences with one pending token). With a target,
        the step has as many tokens as the target allows. A chunk beside the riders is always allowed, and so
        is every token that makes the step no longer than the riders alone do."""
        most = self.max_num_batched_tokens
        if not self.step_time_target_s:
            return most
        least = min(num_riders + MIN_CHUNK, most)
        limit_s = max(self.step_time_target_s, self.predict_s(max(1, num_riders)))
        beyond = bisect.bisect_right(range(most + 1), limit_s, lo=least, key=self.predict_s)
        return max(least, beyond - 1)
