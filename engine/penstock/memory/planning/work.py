"""Work: what takes time in a step; and the simulator that makes seconds of a list of it. Pure.

Each feature of a step brings its own Work: bytes over a link, bytes of a memory, operations, or seconds that
were found elsewhere. A resource does one piece after the other, in the list's order. Resources work at the
same time, but for a piece that begins after others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Work(NamedTuple):
    #: A link, a memory, the arithmetic of a processor: each name is a resource of its own.
    resource: str
    amount: float
    #: How much of it the resource does in a second; 0: not known, and then the piece takes no time.
    rate: float = 1.0
    #: Pieces that have to end before this one begins.
    after: tuple[Work, ...] = ()

    @property
    def seconds(self) -> float:
        return self.amount / self.rate if self.rate else 0.0


class Timeline(NamedTuple):
    """When a list of Work is done."""

    #: Resource -> seconds for which it is busy. A resource that has nothing to do is left out.
    busy: dict[str, float]
    #: Resource -> when its last piece ends.
    ends: dict[str, float]

    @property
    def seconds(self) -> float:
        return max(self.ends.values(), default=0.0)


def simulate(works: Iterable[Work]) -> Timeline:
    """The Timeline of these pieces. A piece that another one comes `after` stands before it in the list."""
    busy, ends = dict[str, float](), dict[str, float]()
    ended: dict[int, float] = {}
    for work in works:
        resource, seconds, end = work.resource, work.seconds, ends.get(work.resource, 0.0)
        for each in work.after:
            end = max(end, ended[id(each)])
        ended[id(work)] = end = end + seconds
        if seconds:
            busy[resource] = busy.get(resource, 0.0) + seconds
            ends[resource] = end
    return Timeline(busy, ends)
