"""What the bodies of all requests together may take."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fakes import FakeAsyncEngine
from penstock_server.api.app import create_app
from penstock_server.facade.engine import ServedEngine
from penstock_server.middleware.body_budget import BodyBudget
from penstock_server.middleware.body_limit import BodyLimit
from penstock_server.protocol.errors import ApiError
from penstock_server.settings.settings import Settings


def test_a_share_ends_with_its_request() -> None:
    budget = BodyBudget(100)
    one, other = budget.share(lambda: None), budget.share(lambda: None)
    one.is_complete = other.is_complete = True
    one.take(60)
    one.give(20)
    other.take(60)
    with pytest.raises(ApiError, match="--request-memory") as refused:
        other.take(1)
    assert refused.value.status_code == 503 and refused.value.headers is not None
    one.close()
    one.close()
    other.take(40)
    assert budget.num_bytes == 100
    other.close()
    assert budget.num_bytes == 0


def test_the_largest_body_that_is_on_its_way_gives_way_to_a_smaller_one() -> None:
    budget, ended = BodyBudget(100), []
    shares = {size: budget.share(lambda size=size: ended.append(size)) for size in (20, 30, 40)}  # type: ignore[misc]
    for size, share in shares.items():
        share.take(size)
    late = budget.share(lambda: None)
    late.take(15)
    assert ended == [40] and budget.num_bytes == 65
    shares[40].take(50)  # it counts no more: its request is about to end
    assert budget.num_bytes == 65
    shares[30].is_complete = True
    late.take(4)
    late.take(31)
    with pytest.raises(ApiError):  # what has come stays, and what is smaller does not give way
        late.take(1)
    assert ended == [40] and budget.num_bytes == 100


class Body:
    """A client that sends its parts as the test says, on the plain ASGI interface."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[Any] = []

    async def ask(self, app: Any) -> None:
        async def send(message: Any) -> None:
            self.sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": self.path, "query_string": b"", "headers": headers}
        await app(scope, self.parts.get, send)

    async def give(self, text: str, more: bool = True) -> None:
        await self.parts.put({"type": "http.request", "body": text.encode(), "more_body": more})
        for _ in range(20):
            await asyncio.sleep(0)

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None


@pytest.mark.anyio
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/messages", "/api/chat", "/v1/tokenize", "/v1/load_lora_adapter"]
)
async def test_slow_bodies_on_all_routes(path: str) -> None:
    engine: Any = FakeAsyncEngine()
    settings = Settings(
        model="tiny",
        request_memory=1000,
        allow_runtime_lora_updating=True,
        lora_memory=1,
        max_request_size=900,
    )
    app = create_app(ServedEngine(engine), settings)
    slow = [Body(path) for _ in range(3)]
    async with asyncio.TaskGroup() as group:
        for body, size in zip(slow, (300, 500, 100), strict=True):
            group.create_task(body.ask(app))
            await body.give(" " * size)
        small = Body(path)
        group.create_task(small.ask(app))
        await small.give(" " * 150)
        await slow[1].give("", more=False)  # the rest of a refused body would be waited for
        assert [body.status for body in slow] == [None, 503, None] and small.status is None
        await slow[0].give(" " * 500, more=False)
        assert (slow[0].status, small.status) == (503, None)
        assert (b"connection", b"close") in slow[0].sent[0]["headers"] and b"--request-memory" in slow[
            0
        ].sent[1]["body"]
        for body in (slow[2], small):
            await body.give("", more=False)


@pytest.mark.anyio
async def test_a_request_keeps_its_share_until_it_is_answered() -> None:
    """What a body becomes counts: a list and its place take many times its two bytes."""
    engine = FakeAsyncEngine()
    fake: Any = engine
    settings = Settings(model="tiny", request_memory=70_000)
    app = create_app(ServedEngine(fake), settings)
    lists = json.dumps({"prompt": "Hi", "metadata": {"a": [[]] * 40}})
    one, other, third = Body("/v1/completions"), Body("/v1/completions"), Body("/v1/completions")
    async with asyncio.TaskGroup() as group:
        async with asyncio.TaskGroup() as first:
            first.create_task(one.ask(app))
            await one.give(lists[:-1])  # has come but for its end, so that the next one finds it here
            whole = first.create_task(other.ask(app))
            await other.give(lists, more=False)
            await whole
            assert other.status == 200
            await one.give(lists[-1], more=False)
        assert one.status == 200
        group.create_task(third.ask(app))
        costly = json.dumps({"prompt": "Hi", "metadata": {"a": [[]] * 300}})
        await third.give(costly, more=False)
    assert third.status == 503 and len(engine.streams) == 2


@pytest.mark.anyio
async def test_a_body_whose_last_part_comes_as_it_gives_way_is_refused() -> None:
    """Its room is another's by then."""
    budget = BodyBudget(1000)
    last: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    first = {"type": "http.request", "body": b"x" * 600, "more_body": True}
    messages, waits, read = [first], asyncio.Event(), []

    async def receive() -> Any:
        if messages:
            return messages.pop()
        waits.set()
        return await last

    async def app(scope: Any, receive: Any, send: Any) -> None:
        with pytest.raises(ApiError) as caught:
            for _ in range(2):
                read.append(await receive())
        assert caught.value.status_code == 503

    async def send(message: Any) -> None:
        raise AssertionError

    limit = BodyLimit(app, max_bytes=900, timeout_s=0, budget=budget)
    task = asyncio.create_task(limit({"type": "http", "headers": []}, receive, send))
    await waits.wait()
    last.set_result({"type": "http.request", "body": b"x", "more_body": False})
    budget.share(lambda: None).take(500)
    await task
    assert read == [first] and budget.num_bytes == 500
