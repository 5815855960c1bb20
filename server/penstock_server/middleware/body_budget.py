"""BodyBudget: the memory that the bodies of all requests together may take, as they come and as they are
read.

A request keeps its share until it is answered. Where the budget has no room for more, the largest body that
is still on its way gives way to a smaller one: a few clients that send slowly can't keep all others out."""

from __future__ import annotations

from collections.abc import Callable

from penstock_server.protocol.errors import ApiError, unavailable


class BodyBudget:
    """For one event loop."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.num_bytes = 0
        self._shares: set[BodyShare] = set()

    def share(self, end: Callable[[], None]) -> BodyShare:
        """The share of a request, to be closed at its end. `end` is called if its body has to give way: from
        then on, it counts no more."""
        share = BodyShare(self, end)
        self._shares.add(share)
        return share

    def make_room(self, share: BodyShare, num_bytes: int) -> None:
        """Ends larger bodies that are on their way until there is room. Raises 503 if that does not help."""
        while self.num_bytes + num_bytes > self.most_bytes:
            size = share.num_bytes + num_bytes
            larger = [each for each in self._shares if not each.is_complete and each.num_bytes > size]
            if not larger:
                raise self.refusal()
            max(larger, key=lambda each: each.num_bytes).give_way()

    def forget(self, share: BodyShare) -> None:
        self._shares.discard(share)

    def refusal(self) -> ApiError:
        message = (
            f"The server is busy: the requests that are being answered take the {self.most_bytes} bytes of "
            "memory that there are for requests (--request-memory). Try again later."
        )
        return unavailable(message, "overloaded")


class BodyShare:
    """What one request has of the budget."""

    def __init__(self, budget: BodyBudget, end: Callable[[], None]) -> None:
        self._budget = budget
        self._end = end
        self.num_bytes = 0
        #: The body has come. It does not give way any more.
        self.is_complete = False
        self._is_open = True

    def take(self, num_bytes: int) -> None:
        """Raises 503 if the budget has no room for so many more bytes."""
        if self._is_open:
            self._budget.make_room(self, num_bytes)
            self._add(num_bytes)

    def give(self, num_bytes: int) -> None:
        self._add(-num_bytes)

    def _add(self, num_bytes: int) -> None:
        if self._is_open:
            self.num_bytes += num_bytes
            self._budget.num_bytes += num_bytes

    def give_way(self) -> None:
        self.close()
        self._end()

    def close(self) -> None:
        """Idempotent."""
        self._add(-self.num_bytes)
        self._is_open = False
        self._budget.forget(self)
