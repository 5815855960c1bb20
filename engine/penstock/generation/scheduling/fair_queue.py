"""FairQueue: which waiting sequence comes in next. Numbers only.

Priority decides first. Among equals the client that has had the least comes first, so that a client with a
hundred requests does not hold up another with one. Among one client's sequences the oldest comes first.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.generation.scheduling.token_counters import TokenCounters
from penstock.generation.sequence import Sequence

#: What a sampled token counts, in prompt tokens: each takes a place in a sweep of its own.
OUTPUT_WEIGHT = 2


class FairQueue:
    """Sequences that wait, and what their clients have had so far."""

    def __init__(self) -> None:
        #: By age; those that were put back come first.
        self._waiting: list[Sequence] = []
        self._counters = TokenCounters()

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def first(self) -> Sequence | None:
        """The sequence that comes in next. A preempted one goes before others of its priority."""
        return min(self._waiting, key=self._rank, default=None)

    def add(self, sequence: Sequence) -> None:
        self._counters.arrive(sequence.request.client)
        self._waiting.append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Queue a sequence that was in before and had to leave."""
        self._counters.come_back(sequence.request.client)
        self._waiting.insert(0, sequence)

    def remove(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        self._counters.leave(sequence.request.client)

    def charge(self, client: str, num_tokens: int) -> None:
        """A client had so many tokens, in prompt tokens."""
        self._counters.charge(client, num_tokens)

    def _rank(self, sequence: Sequence) -> tuple[int, bool, int]:
        client = sequence.request.client
        return sequence.request.priority, not sequence.was_preempted, self._counters.count(client)
