"""RankedStream: one of the answers that a beam search finds, as a stream of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol

from penstock import RequestOutput


class OutputStream(Protocol):
    """The outputs of one answer: a RequestStream, or one like it."""

    def __anext__(self) -> Awaitable[RequestOutput]: ...

    def abort(self) -> None:
        """Idempotent; never blocks."""
        ...


class Search:
    """The stream of a search. Its only output has all answers, best first."""

    def __init__(self, stream: OutputStream) -> None:
        self._stream = stream
        #: Waits for the output; made when the first answer is asked for.
        self._output: asyncio.Future[RequestOutput] | None = None

    async def output(self) -> RequestOutput:
        """May be called by several tasks at the same time. One that is cancelled does not disturb the
        others."""
        if self._output is None:
            self._output = asyncio.ensure_future(self._stream.__anext__())
        return await asyncio.shield(self._output)

    def abort(self) -> None:
        self._stream.abort()
        if self._output is not None:
            self._output.cancel()


class RankedStream:
    """An answer of a search; rank 0 is the best."""

    def __init__(self, search: Search, rank: int) -> None:
        self._search = search
        self._rank = rank

    async def __anext__(self) -> RequestOutput:
        """Raises what the search's stream raises."""
        best = await self._search.output()
        return best.others[self._rank - 1] if self._rank else best

    def abort(self) -> None:
        self._search.abort()
