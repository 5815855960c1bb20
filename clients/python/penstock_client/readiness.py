"""Waiting until a server can answer: what to do after each question for its health. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock_client.errors import APIError, ConnectionFailed, PenstockError, Timeout
from penstock_client.server_info import Health

#: Seconds between two questions.
POLL_INTERVAL_S = 0.5


@dataclass
class Readiness:
    """What is known of a server that is not ready.

    timeout_s: longest time in which neither its state nor its progress changes; None is for ever.
    on_progress: is told of each change.
    last_change_s: when that last happened, by the clock that `judge` is told.
    """

    timeout_s: float | None
    on_progress: Callable[[Health], None] | None
    last_change_s: float
    _last: tuple[object, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout is {self.timeout_s!r}; give seconds > 0, or None for no limit")

    def judge(self, answer: Health | PenstockError, now_s: float) -> Health | None:
        """`answer` if the server is ready, None to ask again.

        Raises an APIError other than 5xx, as waiting won't help, and Timeout if nothing changed
        for too long.
        """
        state = _state(answer)
        if state != self._last:
            self._last, self.last_change_s = state, now_s
            if isinstance(answer, Health) and self.on_progress:
                self.on_progress(answer)
        if isinstance(answer, Health) and answer.is_ready:
            return answer
        if self.timeout_s is not None and now_s - self.last_change_s >= self.timeout_s:
            last = _words(answer) if isinstance(answer, Health) else answer
            raise Timeout(f"not ready, and nothing changed for {self.timeout_s:g} seconds: {last}")
        return None


def _words(health: Health) -> str:
    loaded = "" if health.progress is None else f", {health.progress:.0%} loaded"
    return f"the server says {health.status!r}{loaded}"


def _state(answer: Health | PenstockError) -> tuple[object, ...]:
    match answer:
        case Health():
            return (answer.status, answer.progress)
        # While it starts, or restarts, there is nobody to connect to, or a proxy says so.
        case ConnectionFailed() | Timeout():
            return ()
        case APIError() if answer.status >= 500:
            return ()
    raise answer
