"""Limits of requests and tokens per client and minute, with OpenAI's headers.

Both limits are token buckets: a client may use the amount of a minute at once, and the bucket fills again
evenly. The number of tokens is known only when an answer is done, so they are taken then, and the bucket may
be in debt: the client's next request has to wait until the debt is paid back. The classes here work on
numbers; only the middleware looks at a clock."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock_server.protocol.errors import ApiError
from penstock_server.telemetry.request_info import RequestInfo, current_request

#: The number of clients that are remembered. Beyond it, the client whose last request is the oldest is
#: forgotten; its bucket is full again.
MAX_CLIENTS = 10_000

_MINUTE_S = 60.0


class TokenBucket:
    def __init__(self, per_minute: int, now: float) -> None:
        """now: seconds of a clock that only goes forward, here and in all other methods."""
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._when = now

    def level(self, now: float) -> float:
        """The amount that may be taken now; a negative level is a debt."""
        self._level = min(self.per_minute, self._level + (now - self._when) * self.per_minute / _MINUTE_S)
        self._when = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        self._level = self.level(now) - amount

    def seconds_until(self, level: float, now: float) -> float:
        return max(0.0, (level - self.level(now)) * _MINUTE_S / self.per_minute)


class ClientLimits:
    """One client's buckets, by the thing that they count: "requests", "tokens". Without a bucket there is no
    limit."""

    def __init__(self, per_minute: dict[str, int], now: float) -> None:
        self._buckets = {name: TokenBucket(most, now) for name, most in per_minute.items() if most}

    def wait_s(self, now: float) -> tuple[float, str] | None:
        """(seconds until a request may come in, name of the bucket that it waits for); None: it may now."""
        # A level of 1 lets one request in; for tokens it means that there is no debt.
        waits = [(bucket.seconds_until(1, now), name) for name, bucket in self._buckets.items()]
        longest = max(waits, default=(0.0, ""))
        return longest if longest[0] > 0 else None

    def take(self, name: str, amount: int, now: float) -> None:
        if name in self._buckets:
            self._buckets[name].take(amount, now)

    def headers(self, now: float) -> dict[str, str]:
        found = {}
        for name, bucket in self._buckets.items():
            found[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
            found[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level(now))))
            found[f"x-ratelimit-reset-{name}"] = duration(bucket.seconds_until(bucket.per_minute, now))
        return found


def duration(seconds: float) -> str:
    """A duration as OpenAI writes it: "1m4.5s"."""
    minutes, rest = divmod(math.ceil(seconds * 1000) / 1000, 60)
    return (f"{minutes:.0f}m" if minutes else "") + f"{round(rest, 3):g}s"


class RateLimit:
    """Refuses POST requests of clients that have used up their limits; other methods cost nothing. This layer
    stands after ApiKeys, which finds out the client."""

    def __init__(
        self,
        app: ASGIApp,
        requests: int,
        tokens: int,
        count_rejected: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """requests and tokens: per minute; 0 is no limit."""
        self._app = app
        self._per_minute = {"requests": requests, "tokens": tokens}
        self._count_rejected = count_rejected
        self._clock = clock
        self._clients: OrderedDict[str, ClientLimits] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = current_request.get()
        if scope["type"] != "http" or scope["method"] != "POST" or request is None:
            await self._app(scope, receive, send)
            return
        limits = self._limits_of(request.client)
        if (wait := limits.wait_s(self._clock())) is not None:
            await self._refusal(limits, *wait).response()(scope, receive, send)
            return
        limits.take("requests", 1, self._clock())

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(limits.headers(self._clock()))
            await send(message)

        try:
            await self._app(scope, receive, send_with_limits)
        finally:
            limits.take("tokens", _num_tokens(request), self._clock())

    def _limits_of(self, client: str) -> ClientLimits:
        if client not in self._clients:
            self._clients[client] = ClientLimits(self._per_minute, self._clock())
        self._clients.move_to_end(client)
        if len(self._clients) > MAX_CLIENTS:
            self._clients.popitem(last=False)
        return self._clients[client]

    def _refusal(self, limits: ClientLimits, seconds: float, name: str) -> ApiError:
        code = "rate_limit_exceeded"
        self._count_rejected(code)
        message = (
            f"The limit of {self._per_minute[name]} {name} per minute is used up; try again in "
            f"{duration(seconds)}."
        )
        headers = {"Retry-After": str(math.ceil(seconds))} | limits.headers(self._clock())
        return ApiError(429, message, code=code, headers=headers)


def _num_tokens(request: RequestInfo) -> int:
    return request.num_prompt_tokens + request.num_output_tokens
