"""The progress of a batch: as values for programs, and as a bar for people."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock_client.results import Usage

_BAR_WIDTH = 24


@dataclass(frozen=True)
class BatchProgress:
    """num_done: prompts that ended, num_failed of them with an error. total: prompts; None if unknown.

    num_retries: requests that were sent again. completion_tokens: tokens of the answers so far.
    """

    num_done: int
    num_failed: int
    total: int | None
    num_retries: int
    completion_tokens: int
    elapsed_s: float


#: True: a bar on stderr. A function is called at each change.
ProgressReport = bool | Callable[[BatchProgress], None]


@dataclass
class Tally:
    """The counts of a batch. began_s: the time of its beginning, by the clock of snapshot()'s now_s."""

    total: int | None
    began_s: float
    num_done: int = field(default=0, init=False)
    num_failed: int = field(default=0, init=False)
    num_retries: int = field(default=0, init=False)
    completion_tokens: int = field(default=0, init=False)

    def add(self, is_error: bool, usage: Usage | None) -> None:
        self.num_done += 1
        self.num_failed += is_error
        self.completion_tokens += usage.completion_tokens if usage else 0

    def snapshot(self, now_s: float) -> BatchProgress:
        return BatchProgress(
            self.num_done,
            self.num_failed,
            self.total,
            self.num_retries,
            self.completion_tokens,
            now_s - self.began_s,
        )


def reporter(report: ProgressReport) -> Callable[[BatchProgress | None], None]:
    """The function that gets the progress at each change, and None at the end."""
    if report is True:
        return _draw if sys.stderr.isatty() else _Log()
    if report is False:
        return lambda progress: None
    return lambda progress: None if progress is None else report(progress)


def bar(progress: BatchProgress) -> str:
    """The progress as one line.
    >>> print(bar(BatchProgress(3, 1, 12, 2, 100, 20.0)))
    3/12 [######..................] 20 s, 60 s left, 5.0 tokens/s, 1 failed, 2 retries
    """
    done, total, elapsed_s = progress.num_done, progress.total, progress.elapsed_s
    head = f"{done}"
    notes = [f"{elapsed_s:.0f} s"]
    if total:
        filled = min(_BAR_WIDTH, _BAR_WIDTH * done // total)
        head = f"{done}/{total} [{'#' * filled}{'.' * (_BAR_WIDTH - filled)}]"
        if 0 < done < total:
            notes.append(f"{elapsed_s * (total - done) / done:.0f} s left")
    if elapsed_s > 0 and progress.completion_tokens:
        notes.append(f"{progress.completion_tokens / elapsed_s:.1f} tokens/s")
    if progress.num_failed:
        notes.append(f"{progress.num_failed} failed")
    if progress.num_retries:
        notes.append(f"{progress.num_retries} retries")
    return f"{head} {', '.join(notes)}"


def _draw(progress: BatchProgress | None) -> None:
    # ESC[K clears what a longer line left behind.
    print("\n" if progress is None else f"\r{bar(progress)}\x1b[K", end="", file=sys.stderr, flush=True)


class _Log:
    """Writes lines if stderr is no terminal: after each tenth of the prompts (each 10 prompts if the total is
    unknown), and at the end."""

    def __init__(self) -> None:
        self._num_told = -1
        self._last: BatchProgress | None = None

    def __call__(self, progress: BatchProgress | None) -> None:
        is_last = progress is None
        self._last = progress = progress or self._last
        # A change may also be a retry, and many retries can come before another prompt is done.
        if progress is None or progress.num_done == self._num_told:
            return
        if is_last or progress.num_done % max(1, (progress.total or 100) // 10) == 0:
            self._num_told = progress.num_done
            print(bar(progress), file=sys.stderr, flush=True)
