"""Buckets on a clock that the test moves, and what clients are told."""

from __future__ import annotations

from typing import Any

import pytest

from fakes import FakeAsyncEngine
from penstock_server.middleware import rate_limit
from penstock_server.middleware.rate_limit import ClientLimits, TokenBucket, duration

from ..conftest import MakeClient


def test_a_bucket_is_full_at_first_and_flows_back_evenly() -> None:
    bucket = TokenBucket(60, now=100.0)
    assert bucket.level(100.0) == 60
    bucket.take(60, 100.0)
    assert bucket.level(100.0) == 0 and bucket.seconds_until(1, 100.0) == pytest.approx(1)
    assert bucket.level(130.0) == pytest.approx(30)
    assert bucket.level(1000.0) == 60  # and not more


def test_a_debt_is_paid_back_first() -> None:
    bucket = TokenBucket(600, now=0.0)
    bucket.take(1200, 0.0)
    assert bucket.level(0.0) == -600
    assert bucket.seconds_until(1, 0.0) == pytest.approx(60.1)
    assert bucket.level(60.1) == pytest.approx(1)


def test_both_limits_hold_and_the_longer_wait_is_told() -> None:
    limits = ClientLimits({"requests": 2, "tokens": 100}, now=0.0)
    assert limits.wait_s(0.0) is None
    limits.take("requests", 2, 0.0)
    assert limits.wait_s(0.0) == (pytest.approx(30), "requests")
    limits.take("tokens", 200, 0.0)
    assert limits.wait_s(0.0) == (pytest.approx(60.6), "tokens")
    assert limits.headers(0.0) == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "2m0s",
    }


def test_no_limit() -> None:
    limits = ClientLimits({"requests": 0, "tokens": 0}, now=0.0)
    limits.take("tokens", 10**9, 0.0)
    assert limits.wait_s(0.0) is None and limits.headers(0.0) == {}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (0.0001, "0.001s"), (6.5, "6.5s"), (60, "1m0s"), (3725.25, "62m5.25s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its one element is the time."""
    now = [1000.0]
    given = rate_limit.RateLimit.__init__

    def init(self: Any, *arguments: Any, **keywords: Any) -> None:
        given(self, *arguments, **keywords, clock=lambda: now[0])

    monkeypatch.setattr(rate_limit.RateLimit, "__init__", init)
    return now


def test_clients_are_limited_one_by_one(
    make_client: MakeClient, engine: FakeAsyncEngine, clock: list[float]
) -> None:
    client = make_client(engine, api_key=("one", "two"), rate_limit_requests=2)

    def ask(key: str) -> Any:
        return client.post("/v1/completions", json={"prompt": "x"}, headers={"X-Api-Key": key})

    assert ask("one").headers["x-ratelimit-remaining-requests"] == "1"
    assert ask("one").status_code == 200
    refused = ask("one")
    assert refused.status_code == 429 and refused.headers["retry-after"] == "30"
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert refused.headers["x-ratelimit-limit-requests"] == "2"
    assert ask("two").status_code == 200
    assert client.get("/v1/models", headers={"X-Api-Key": "one"}).status_code == 200
    text = client.get("/metrics", headers={"X-Api-Key": "one"}).text
    assert 'reason="rate_limit_exceeded"} 1.0' in text
    clock[0] += 30
    assert ask("one").status_code == 200


@pytest.mark.parametrize("is_stream", [False, True])
def test_tokens_of_answers_count(
    make_client: MakeClient, engine: FakeAsyncEngine, clock: list[float], is_stream: bool
) -> None:
    """Prompt 4, answer 3 bytes + 2 + 1 and its end: 11 of the 20."""
    client = make_client(engine, rate_limit_tokens=20)
    body = {"prompt": "four", "stream": is_stream}
    for _ in range(2):
        assert client.post("/v1/completions", json=body).status_code == 200
    refused = client.post("/v1/completions", json=body)
    # A debt of 2, and one token more to begin with: 3 of 20 per minute are 9 s.
    assert refused.status_code == 429 and refused.headers["retry-after"] == "9"
    clock[0] += 9
    assert client.post("/v1/completions", json=body).status_code == 200


def test_the_longest_silent_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, "MAX_CLIENTS", 2)
    unused: Any = None
    limit = rate_limit.RateLimit(unused, 1, 0, unused, clock=lambda: 0.0)
    for client in ("a", "b", "a", "c"):
        limit._limits_of(client)
    assert list(limit._clients) == ["a", "c"]
