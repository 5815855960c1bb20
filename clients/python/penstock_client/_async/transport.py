"""Sends requests, and gives whole answers or bodies that still come. http_library.py knows the HTTP library.

This file knows nothing of retries or of JSON. Several threads or tasks may use a transport at once.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import cast

from penstock_client.exchange import Reply, Request
from penstock_client.http_library import (
    STREAM_HEADERS,
    AsyncBlocks,
    AsyncHTTPClient,
    RequestOptions,
    Response,
    client_options,
    is_stream,
    refusal,
    reply_of,
    translated,
)
from penstock_client.settings import Settings


class AsyncStreamReply:
    """An answer whose body is still coming. Close it, also after an error."""

    def __init__(self, response: Response, request: Request) -> None:
        self._response = response
        self.request_id: str | None = response.headers.get("x-request-id")
        # A generator that held this object would form a cycle with it, and a stream that is simply dropped
        # would keep its connection until the garbage collector runs.
        self._blocks = _blocks(response, request, self.request_id)

    async def next_block(self) -> bytes | None:
        """The next bytes of the body; None at the end, where the connection is closed. Raises
        StreamInterrupted if the connection breaks, and Timeout."""
        return await anext(self._blocks, None)

    async def aclose(self) -> None:
        await self._blocks.aclose()
        await self._response.aclose()


async def _blocks(response: Response, request: Request, request_id: str | None) -> AsyncBlocks:
    with translated(request, request_id, has_begun=True):
        async with aclosing(response), aclosing(cast(AsyncBlocks, response.aiter_bytes())) as blocks:
            async for block in blocks:
                yield block


class AsyncTransport:
    """Sends requests and waits for the answers."""

    def __init__(self, settings: Settings, http_client: AsyncHTTPClient | None = None) -> None:
        """A client that is given stays open: its maker closes it."""
        self._options = RequestOptions(settings)
        self._http = http_client or AsyncHTTPClient(**client_options(settings))
        self.is_own = http_client is None

    async def send(self, request: Request) -> Reply:
        """The whole answer, whatever its status."""
        options, request_id = self._options(request)
        with translated(request, request_id):
            return reply_of(await self._http.request(request.method, **options))

    async def open(self, request: Request) -> AsyncStreamReply:
        """The beginning of a stream. Raises an APIError for a status that is no success."""
        options, request_id = self._options(request, STREAM_HEADERS)
        with translated(request, request_id):
            built = self._http.build_request(request.method, **options)
            response = await self._http.send(built, stream=True)
            try:
                if not is_stream(response):
                    await response.aread()
                    raise refusal(reply_of(response))
            except BaseException:
                await response.aclose()
                raise
        return AsyncStreamReply(response, request)

    async def aclose(self) -> None:
        if self.is_own:
            await self._http.aclose()
