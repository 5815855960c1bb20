"""Readiness: decides, after each look at a server's health, whether to go on waiting. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock_client.errors import APIError, ConnectionFailed, PenstockError, Timeout
from penstock_client.server_info import Health

#: Seconds between two looks at the server's health.
POLL_INTERVAL_S = 0.5


@dataclass
class Readiness:
    """The state of a server that is not ready yet.

    timeout_s: longest time without a change of the server's state or progress; None: for ever.
    on_progress: gets the server's health at each change.
    last_change_s: the time of the last change, by the clock of judge()'s now_s.
    """

    timeout_s: float | None
    on_progress: Callable[[Health], None] | None
    last_change_s: float
    _last: tuple[object, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout is {self.timeout_s!r}; give seconds > 0, or None for no limit")

    def judge(self, answer: Health | PenstockError, now_s: float) -> Health | None:
        """`answer` if the server is ready, None to go on waiting.

        Raises an APIError other than 5xx, since waiting won't help then, and Timeout if nothing has
        changed for too long.
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
            raise Timeout(
                f"the server is not ready, and nothing changed for {self.timeout_s:g} seconds: {last}"
            )
        return None


def _words(health: Health) -> str:
    loaded = "" if health.progress is None else f", {health.progress:.0%} loaded"
    return f"the server says {health.status!r}{loaded}"


def _state(answer: Health | PenstockError) -> tuple[object, ...]:
    match answer:
        case Health():
            return (answer.status, answer.progress)
        # While the server starts or restarts, connections fail, or a proxy answers with an error.
        case ConnectionFailed() | Timeout():
            return ()
        case APIError() if answer.status >= 500:
            return ()
    raise answer
