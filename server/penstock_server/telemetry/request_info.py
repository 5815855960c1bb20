"""RequestInfo: the facts about the HTTP request that is being answered, for logs, traces, limits and the
engine.

The RequestInfo lies in a context variable, so that functions between the socket and the engine need not pass
it on. Each request has a task of its own, and so a context of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass
class AnswerTimes:
    """The times of one answer (one choice for one prompt), in seconds of the monotonic clock."""

    arrival: float
    #: The times at which the first step began, the first token came, and the latest token came.
    started: float | None = None
    first: float | None = None
    last: float | None = None
    num_output_tokens: int = 0

    @property
    def queue_s(self) -> float | None:
        return None if self.started is None else self.started - self.arrival

    @property
    def first_token_s(self) -> float | None:
        return None if self.first is None else self.first - self.arrival


@dataclass(frozen=True)
class TimeLimits:
    """Seconds from a request's arrival within which its computation must begin (queue_s), and must end
    (total_s)."""

    queue_s: float | None = None
    total_s: float | None = None

    @property
    def total_ends_first(self) -> bool:
        return self.total_s is not None and (self.queue_s is None or self.total_s <= self.queue_s)


@dataclass
class RequestInfo:
    request_id: str
    #: The client to whose limits and share the request counts: a digest of the API key, or the address.
    client: str = ""
    limits: TimeLimits = TimeLimits()
    #: Seconds of the monotonic clock.
    arrival: float = field(default_factory=time.monotonic)
    #: Bytes of the body that have come.
    num_body_bytes: int = 0
    #: Tokens of the request's prompts, each prompt counted once.
    num_prompt_tokens: int = 0
    answers: list[AnswerTimes] = field(default_factory=list)
    #: What the request asked for and the server leaves out, by its place in the body.
    ignored: list[str] = field(default_factory=list)
    #: The model that was chosen, if the server has several.
    model: str | None = None
    #: What is to be done when the answer is sent, or the client gone.
    at_end: list[Callable[[], None]] = field(default_factory=list)

    @property
    def left_s(self) -> float | None:
        """Seconds until the computation must have begun, or must have ended; None without a limit."""
        limits = [limit_s for limit_s in (self.limits.queue_s, self.limits.total_s) if limit_s is not None]
        return self.arrival + min(limits) - time.monotonic() if limits else None

    def end(self) -> None:
        while self.at_end:
            self.at_end.pop()()

    def engine_options(self) -> dict[str, Any]:
        """The fields of a GenerationRequest that follow from the HTTP request."""
        options: dict[str, Any] = {"client": self.client}
        for name, limit_s in (("start_by", self.limits.queue_s), ("finish_by", self.limits.total_s)):
            if limit_s is not None:
                options[name] = self.arrival + limit_s
        return options

    @property
    def num_output_tokens(self) -> int:
        return sum(answer.num_output_tokens for answer in self.answers)

    def timings(self) -> dict[str, float | int]:
        """The figures of a log line: tokens, the longest wait in the queue, and the longest wait for a first
        token. {} for a request that generated nothing."""
        if not self.answers:
            return {}
        figures: dict[str, float | int] = {
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
        }
        for name in ("queue_s", "first_token_s"):
            known = [value for each in self.answers if (value := getattr(each, name)) is not None]
            if known:
                figures[name] = round(max(known), 4)
        return figures


current_request: ContextVar[RequestInfo | None] = ContextVar("current_request", default=None)
