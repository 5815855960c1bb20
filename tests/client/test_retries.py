import pytest

from penstock_client.errors import ConnectionFailed, ServerBusy, ServerError
from penstock_client.retries import Attempts, RetryPolicy

REFUSED = ConnectionFailed("refused", is_retryable=True)


def busy(retry_after: float | None) -> ServerBusy:
    return ServerBusy("busy", status=503, retry_after=retry_after, is_retryable=True)


def test_backoff_doubles_up_to_its_limit():
    policy = RetryPolicy(max_retries=100)
    delays = [policy.delay_s(number, REFUSED, 1.0) for number in range(7)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_backoff_does_not_overflow():
    assert RetryPolicy(max_retries=10_000).delay_s(9_999, REFUSED, 1.0) == 8.0


def test_jitter_spreads_over_the_upper_half():
    policy = RetryPolicy()
    assert policy.delay_s(0, REFUSED, 0.0) == 0.25
    assert policy.delay_s(0, REFUSED, 0.5) == 0.375


def test_number_of_retries_is_bounded():
    policy = RetryPolicy(max_retries=2)
    assert policy.delay_s(1, REFUSED, 0.0) is not None
    assert policy.delay_s(2, REFUSED, 0.0) is None
    assert RetryPolicy(max_retries=0).delay_s(0, REFUSED, 0.0) is None


def test_what_would_only_fail_again_is_not_repeated():
    assert RetryPolicy().delay_s(0, ServerError("bug", status=500), 0.0) is None
    assert RetryPolicy().delay_s(0, ConnectionFailed("broke"), 0.0) is None


def test_retry_after_is_honoured():
    assert RetryPolicy().delay_s(0, busy(7.5), 1.0) == 7.5
    assert RetryPolicy().delay_s(0, busy(120.0), 1.0) == 120.0


def test_a_short_retry_after_does_not_undercut_the_backoff():
    assert RetryPolicy().delay_s(0, busy(0.0), 1.0) == 0.5
    assert RetryPolicy().delay_s(0, busy(0.1), 1.0) == 0.5
    assert RetryPolicy().delay_s(0, busy(None), 1.0) == 0.5


def test_a_long_retry_after_is_left_to_the_caller():
    assert RetryPolicy().delay_s(0, busy(120.5), 0.0) is None


def test_negative_number_is_refused():
    with pytest.raises(ValueError, match="max_retries"):
        RetryPolicy(max_retries=-1)


def test_attempts_are_counted():
    attempts = Attempts(RetryPolicy(max_retries=2))
    assert [attempts.delay_s(REFUSED, 1.0) for _ in range(3)] == [0.5, 1.0, None]
    assert attempts.num_retries == 2
