"""TokenCounters: what each client has had, in prompt tokens. Numbers only.

The counters are virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", arXiv
2401.00588). A client that comes back after a pause starts from the least counter of the clients that wait, so
that no client saves up what it left unused.
"""

from __future__ import annotations

from collections import Counter

#: Counters that are kept at least.
MAX_COUNTERS = 1000


class TokenCounters:
    """Counters of the clients that wait, and of others as long as there is room."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        #: Client -> how many of its sequences wait.
        self._num_waiting: Counter[str] = Counter()
        self._last_client = ""

    def arrive(self, client: str) -> None:
        """A new sequence of a client waits."""
        if client not in self._num_waiting:
            self._served[client] = max(self._served.get(client, 0), self._least())
        if len(self._served) > MAX_COUNTERS:
            self._forget_equals()
        self._num_waiting[client] += 1

    def come_back(self, client: str) -> None:
        """A sequence of a client that was in before waits again."""
        self._num_waiting[client] += 1

    def leave(self, client: str) -> None:
        """A sequence of a client waits no longer."""
        self._num_waiting[client] -= 1
        if not self._num_waiting[client]:
            del self._num_waiting[client]
        self._last_client = client

    def count(self, client: str) -> int:
        count = self._served.get(client)
        return self._least() if count is None else count

    def charge(self, client: str, num_tokens: int) -> None:
        self._served[client] = self.count(client) + num_tokens

    def _least(self) -> int:
        """Where a new client begins: at the least counter of the clients that wait, or, if none waits, at the
        counter of the client that came in last."""
        counts = [self._served[client] for client in self._num_waiting if client in self._served]
        return min(counts, default=self._served.get(self._last_client, 0))

    def _forget_equals(self) -> None:
        """Drop the counters of clients that would begin again where they are."""
        least, waiting = self._least(), self._num_waiting
        self._served = {
            client: count for client, count in self._served.items() if count > least or client in waiting
        }
