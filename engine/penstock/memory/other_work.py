"""Other work: how much of the cores it took while something was measured."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

#: Other work that takes a larger share of the cores disturbs a measurement.
BUSY_SHARE = 0.1
#: Columns of a line of /proc/stat, after the processor's name: what is not idle. "steal" is what a host took.
_BUSY = {"user": 0, "nice": 1, "system": 2, "irq": 5, "softirq": 6, "steal": 7}


@dataclass(frozen=True)
class Moment:
    """Seconds since some start: of the clock, and those in which cores were busy."""

    clock_s: float
    busy_s: float
    #: The part of busy_s that was this process.
    own_s: float


def now(stat: Path = Path("/proc/stat")) -> Moment:
    """This moment, of the cores that the process may use. Without /proc/stat, no core is known to be busy."""
    own = time.process_time()
    try:
        busy = busy_seconds(stat.read_text(), os.sched_getaffinity(0), os.sysconf("SC_CLK_TCK"))
    except OSError:
        busy = own
    return Moment(time.perf_counter(), busy, own)


def busy_seconds(stat: str, cpus: set[int], ticks_per_s: int) -> float:
    """The seconds in which these processors were busy, from the text of /proc/stat."""
    lines = [line.split() for line in stat.splitlines()]
    wanted = [line[1:] for line in lines if line and line[0] in {f"cpu{cpu}" for cpu in cpus}]
    ticks = sum(int(line[column]) for line in wanted for column in _BUSY.values() if column < len(line))
    return ticks / ticks_per_s


def is_busy(others_share: float | None) -> bool:
    """Whether other work disturbed a measurement. A share that is not known (None) does not say so."""
    return others_share is not None and others_share > BUSY_SHARE


def others_share(before: Moment, after: Moment, num_cores: int) -> float:
    """The share of `num_cores` cores, 0 to 1, that others took between two moments."""
    others = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return min(1.0, max(0.0, others / max(1e-9, num_cores * (after.clock_s - before.clock_s))))
