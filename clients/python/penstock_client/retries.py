"""RetryPolicy: whether to send a request again, and when. Pure: no clock, no randomness, no sleeping."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock_client.errors import PenstockError


@dataclass(frozen=True)
class RetryPolicy:
    """How often a request is sent again, and after how many seconds."""

    max_retries: int = 2
    initial_backoff_s: float = 0.5
    max_backoff_s: float = 8.0
    #: The longest Retry-After that is waited for; after a longer one the caller gets the error.
    max_retry_after_s: float = 120.0

    def __post_init__(self) -> None:
        if self.max_retries < 0:
            raise ValueError(f"max_retries is {self.max_retries}; give 0 or more")

    def delay_s(self, num_retries: int, error: PenstockError, random_fraction: float) -> float | None:
        """Seconds to wait before the next attempt, or None to give up and raise `error`.

        num_retries: retries that were made already. random_fraction: in [0, 1); it spreads the
        backoff over the upper half of its range, so that clients that were turned away together do
        not come back together.
        """
        if not error.is_retryable or num_retries >= self.max_retries:
            return None
        return self.wait_s(num_retries, error, random_fraction)

    def wait_s(self, num_retries: int, error: PenstockError, random_fraction: float) -> float | None:
        """Seconds to wait before a retry, or None if Retry-After is too long; `num_retries` has no limit."""
        retry_after = error.retry_after or 0.0
        if retry_after > self.max_retry_after_s:
            return None
        # The exponent is bounded because 2.0**1024 overflows.
        backoff = self.initial_backoff_s * 2.0 ** min(num_retries, 30)
        return max(retry_after, min(backoff, self.max_backoff_s) * (0.5 + 0.5 * random_fraction))


@dataclass
class Attempts:
    """Counts the attempts at one request."""

    policy: RetryPolicy
    num_retries: int = field(default=0, init=False)

    def delay_s(self, error: PenstockError, random_fraction: float) -> float | None:
        """The result of RetryPolicy.delay_s. A number counts as a retry."""
        delay_s = self.policy.delay_s(self.num_retries, error, random_fraction)
        self.num_retries += delay_s is not None
        return delay_s
