"""FairQueue: who comes in next. Numbers only.

By priority first. Among equals by what their clients have had, so that one with a hundred requests does not
hold up another with one: a virtual token counter per client (Sheng et al., "Fairness in Serving Large
Language Models", arXiv 2401.00588). A client that comes back after a pause starts from the least counter of
those that wait: what it left unused is not saved up. Among one client's by age.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.generation.sequence import Sequence

#: What a sampled token counts, in prompt tokens: it takes a place in a sweep of its own.
OUTPUT_WEIGHT = 2
#: Counters that are kept at least.
MAX_COUNTERS = 1000


class FairQueue:
    """Sequences that wait, and what the clients have had so far."""

    def __init__(self) -> None:
        #: By age, the ones that were put back before.
        self._waiting: list[Sequence] = []
        self._served: dict[str, int] = {}
        self._last_client = ""

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def first(self) -> Sequence | None:
        """Who comes in next. One that was preempted goes before others of its priority."""
        return min(self._waiting, key=self._rank, default=None)

    def add(self, sequence: Sequence) -> None:
        client = sequence.request.client
        if client not in self._clients():
            self._served[client] = max(self._served.get(client, 0), self._least_served())
        if len(self._served) > MAX_COUNTERS:
            self._forget_equals()
        self._waiting.append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """It was in before and had to leave."""
        self._waiting.insert(0, sequence)

    def remove(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        self._last_client = sequence.request.client

    def charge(self, client: str, num_tokens: int) -> None:
        """A client had so many tokens, in prompt tokens."""
        self._served[client] = self._count(client) + num_tokens

    def _rank(self, sequence: Sequence) -> tuple[int, bool, int]:
        return sequence.request.priority, not sequence.was_preempted, self._count(sequence.request.client)

    def _count(self, client: str) -> int:
        count = self._served.get(client)
        return self._least_served() if count is None else count

    def _clients(self) -> set[str]:
        return {sequence.request.client for sequence in self._waiting}

    def _least_served(self) -> int:
        """Where a client that comes begins; if nobody waits, with whoever came in last."""
        counts = [self._served[client] for client in self._clients() if client in self._served]
        return min(counts, default=self._served.get(self._last_client, 0))

    def _forget_equals(self) -> None:
        """Counters of clients that would begin again where they are."""
        least, clients = self._least_served(), self._clients()
        self._served = {
            client: count for client, count in self._served.items() if count > least or client in clients
        }
