"""How long a batch tries to get one answer. Pure: no clock, no randomness, no sleeping."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from penstock_client.errors import PenstockError, StreamError, Timeout
from penstock_client.retries import RetryPolicy

#: Often enough that a server which is back does not wait long for us.
_MAX_BACKOFF_S = 4.0
#: After so many an answer is given up: the prompt itself may be what kills the server.
_MAX_INTERRUPTIONS = 5


@dataclass
class Tries:
    """What became so far of one prompt. num_interruptions: how often it failed after it began."""

    num_failures: int = 0
    num_interruptions: int = 0


@dataclass
class Patience:
    """What all prompts of a batch know of the server.

    limit_s: how long the server may be away; None is for ever.
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
        """The server took a request."""
        self._away_since_s = None

    def delay_s(
        self, tries: Tries, error: PenstockError, now_s: float, random_fraction: float
    ) -> float | None:
        """Seconds to wait before asking again, or None to give up; `tries` counts the failure."""
        # A server that died without a word, as of a power cut, is only noticed by its silence.
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
