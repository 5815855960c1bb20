"""Patience: how long a batch tries to get one answer. Pure: no clock, no randomness, no sleeping."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from penstock_client.errors import PenstockError, StreamError, Timeout
from penstock_client.retries import RetryPolicy

#: The longest pause between two attempts: short, so that a server that is back is used soon.
_MAX_BACKOFF_S = 4.0
#: Interrupted answers after which a prompt is given up: the prompt itself may kill the server.
_MAX_INTERRUPTIONS = 5


@dataclass
class Tries:
    """The attempts at one prompt so far. num_interruptions: failures after an answer had begun."""

    num_failures: int = 0
    num_interruptions: int = 0


@dataclass
class Patience:
    """The state of the server as all prompts of a batch know it.

    limit_s: seconds that the server may be away; None: for ever.
    """

    limit_s: float | None
    _away_since_s: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.limit_s is not None and not self.limit_s >= 0:
            raise ValueError(f"patience is {self.limit_s!r}; give seconds >= 0, or None for no limit")
        self._policy = RetryPolicy(
            max_backoff_s=_MAX_BACKOFF_S,
            max_retry_after_s=math.inf if self.limit_s is None else self.limit_s,
        )

    def answered(self) -> None:
        """Notes that the server took a request."""
        self._away_since_s = None

    def delay_s(
        self, tries: Tries, error: PenstockError, now_s: float, random_fraction: float
    ) -> float | None:
        """Seconds to wait before the next attempt, or None to give up. Counts the failure in `tries`."""
        # A server that dies without closing connections, as in a power cut, shows by its silence only.
        is_silent = isinstance(error, Timeout) and not error.is_retryable
        if not (error.is_retryable or is_silent):
            return None
        tries.num_interruptions += is_silent or isinstance(error, StreamError)
        if tries.num_interruptions > _MAX_INTERRUPTIONS:
            return None
        if self._away_since_s is None:
            self._away_since_s = now_s
        delay_s = self._policy.wait_s(tries.num_failures, error, random_fraction)
        tries.num_failures += 1
        if delay_s is None:
            return None
        is_too_late = self.limit_s is not None and now_s - self._away_since_s >= self.limit_s
        return None if is_too_late else delay_s
