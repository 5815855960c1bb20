"""UsualTimes: what steps of so many tokens took lately. Pure: whoever has a clock tells."""

from __future__ import annotations

import statistics
from collections import deque

#: Steps of a size that are remembered: an odd number, so that the median is one of them.
_NUM_KEPT = 5
#: Larger steps are those of prompts.
_MOST_TOKENS = 1024


class UsualTimes:
    """The last steps of each size."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}

    def record(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took this long."""
        if num_tokens <= _MOST_TOKENS:
            self._seconds.setdefault(num_tokens, deque(maxlen=_NUM_KEPT)).append(seconds)

    def of(self, num_tokens: int) -> float:
        """The median of the last steps of so many tokens, in seconds; 0 if there were none."""
        found = self._seconds.get(num_tokens)
        return statistics.median(found) if found else 0.0
