"""The fake server, and both clients behind one face so that each case is written once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from end_to_end.server_process import ServerProcess
from penstock_client import AsyncClient, Client, PenstockError

from .fake_server import FakeServer


@dataclass
class Outcome:
    """What came of reading a stream: chunks, and the error that ended it, if one did."""

    chunks: list[Any] = field(default_factory=list)
    error: PenstockError | None = None


class SyncFace:
    """Client. `sleeps` are the seconds that it would have slept; `on_sleep` is called too."""

    def __init__(self, base_url: str, **options: Any) -> None:
        self.sleeps: list[float] = []
        self.on_sleep: Callable[[], None] = lambda: None
        self.client = Client(base_url, sleep=self._sleep, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def _sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.on_sleep()

    def drain(self, stream: Any, on_chunk: Callable[[], None] = lambda: None) -> Outcome:
        outcome = Outcome()
        try:
            for chunk in stream:
                outcome.chunks.append(chunk)
                on_chunk()
        except PenstockError as error:
            outcome.error = error
        return outcome

    def peek(self, stream: Any, num_chunks: int) -> list[Any]:
        """Enter the stream, read so many chunks, and leave."""
        with stream as entered:
            return [next(entered) for _ in range(num_chunks)]

    def result(self, stream: Any) -> Any:
        return stream.result()

    def collect(self, batch: Any) -> list[Any]:
        return list(batch)

    def close_stream(self, stream: Any) -> None:
        stream.close()

    def close(self) -> None:
        self.client.close()


class AsyncFace:
    """AsyncClient, driven by an event loop of its own."""

    def __init__(self, base_url: str, **options: Any) -> None:
        self.sleeps: list[float] = []
        self.on_sleep: Callable[[], None] = lambda: None
        self.loop = asyncio.new_event_loop()
        self.client = AsyncClient(base_url, sleep=self._sleep, **options)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.client, name)
        if not asyncio.iscoroutinefunction(attribute):
            return attribute
        return lambda *args, **kwargs: self.run(attribute(*args, **kwargs))

    def run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    async def _sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.on_sleep()

    def drain(self, stream: Any, on_chunk: Callable[[], None] = lambda: None) -> Outcome:
        async def drain() -> Outcome:
            outcome = Outcome()
            try:
                async for chunk in stream:
                    outcome.chunks.append(chunk)
                    on_chunk()
            except PenstockError as error:
                outcome.error = error
            return outcome

        result: Outcome = self.run(drain())
        return result

    def peek(self, stream: Any, num_chunks: int) -> list[Any]:
        async def peek() -> list[Any]:
            async with stream as entered:
                return [await anext(entered) for _ in range(num_chunks)]

        chunks: list[Any] = self.run(peek())
        return chunks

    def result(self, stream: Any) -> Any:
        return self.run(stream.result())

    def collect(self, batch: Any) -> list[Any]:
        async def collect() -> list[Any]:
            async with batch as results:
                return [result async for result in results]

        results: list[Any] = self.run(collect())
        return results

    def close_stream(self, stream: Any) -> None:
        self.run(stream.aclose())

    def close(self) -> None:
        self.run(self.client.aclose())
        self.run(self.loop.shutdown_asyncgens())
        self.loop.close()


Face = SyncFace | AsyncFace


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_BASE_URL", raising=False)
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)


@pytest.fixture
def sleeping_server() -> Iterator[FakeServer]:
    """A server that refuses connections until it is started."""
    server = FakeServer()
    yield server
    server.stop()


@pytest.fixture
def server(sleeping_server: FakeServer) -> FakeServer:
    sleeping_server.start()
    return sleeping_server


@pytest.fixture(scope="session")
def live_server(demo_server: ServerProcess) -> ServerProcess:
    return demo_server


@pytest.fixture(params=[SyncFace, AsyncFace], ids=["sync", "async"])
def make_client(request: pytest.FixtureRequest) -> Iterator[Callable[..., Face]]:
    """A function from (base_url, **options) to either client; closes what it made."""
    with contextlib.ExitStack() as stack:

        def make(base_url: str, **options: Any) -> Face:
            face: Face = request.param(base_url, **{"model": "tiny", **options})
            stack.callback(face.close)
            return face

        yield make


@pytest.fixture
def client(make_client: Callable[..., Face], server: FakeServer) -> Face:
    """Either client, of the server that runs, with its model given."""
    return make_client(server.url)
