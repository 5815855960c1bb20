"""StepWatch: whether an engine's steps go on, told by the engine's thread, and asked by any thread.

A step that ends with an error says that the next ones may end so, too, until one is computed. Nothing is
computed where no request comes, so the error counts for a while only: then requests may try again. A step
whose layer neither ends nor fails hangs, as a read of a network file system does whose server is gone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

#: Seconds for which requests should go elsewhere after a step has failed.
FAILING_S = 30.0
#: A layer hangs that takes so many times as long as it should, and longer than LEAST_S; longer than UNKNOWN_S
#: where nobody knows how long it should take.
SLOWEST, LEAST_S, UNKNOWN_S = 20.0, 60.0, 600.0


class Trouble(NamedTuple):
    """Why requests should go elsewhere, for people. Everybody may read it: it names no file."""

    kind: Literal["failing", "stuck"]
    message: str


class StepWatch:
    """begin(), end() and fail() are for the thread that steps."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock() says the time in seconds, as LayerStreamer.moved_s has it."""
        self._clock = clock
        self._began_s = math.inf
        #: When a step failed last, if none was computed since.
        self._failed_s = -math.inf

    def begin(self) -> None:
        """A step begins, or the thread looks whether there is one."""
        self._began_s = self._clock()

    def end(self, is_computed: bool) -> None:
        """The step has ended; `is_computed`: some request has gained something."""
        self._began_s = math.inf
        if is_computed:
            self._failed_s = -math.inf

    def fail(self) -> None:
        """The step has ended with an error."""
        self._began_s, self._failed_s = math.inf, self._clock()

    def trouble(self, moved_s: float, layer_s: float) -> Trouble | None:
        """`moved_s`: when a layer began or ended last. `layer_s`: seconds that a layer of the largest step
        should take; 0: unknown."""
        now_s, began_s = self._clock(), self._began_s
        limit_s = max(LEAST_S, SLOWEST * layer_s) if layer_s else UNKNOWN_S
        if began_s < math.inf and (waits_s := now_s - max(began_s, moved_s)) >= limit_s:
            return Trouble("stuck", f"a layer has been on its way for {waits_s:.0f} s: does the disk hang?")
        if now_s - self._failed_s < FAILING_S:
            return Trouble("failing", "the last step failed; the log says why")
        return None
