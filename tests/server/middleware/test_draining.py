"""Who was let in is answered; who comes later is told to go elsewhere."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from penstock_server.middleware.draining import Drain, DrainMiddleware
from penstock_server.protocol.errors import unavailable

pytestmark = pytest.mark.anyio

REFUSAL = unavailable("The server is shutting down.", "shutting_down")


async def ask(app: Any, path: str = "/v1/completions") -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    await app({"type": "http", "method": "GET", "path": path, "headers": []}, receive, send)
    headers = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:])


async def test_running_requests_finish_and_new_ones_are_refused() -> None:
    drain, go_on = Drain(), asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await go_on.wait()
        await PlainTextResponse("done")(scope, receive, send)

    refused: list[str] = []
    app = DrainMiddleware(slow, drain, refused.append)
    running = asyncio.create_task(ask(app))
    while drain.num_open == 0:
        await asyncio.sleep(0)
    drain.begin(REFUSAL)
    status, headers, body = await ask(app)
    assert (status, headers["connection"]) == (503, "close") and headers["retry-after"]
    assert b"shutting_down" in body and refused == ["shutting_down"]
    emptying = asyncio.create_task(drain.wait_until_empty(3600))
    await asyncio.sleep(0)
    assert not emptying.done()
    go_on.set()
    status, headers, body = await running
    assert (status, headers["connection"], body) == (200, "close", b"done")
    assert await emptying


async def test_waiting_ends_with_its_time() -> None:
    drain = Drain()
    drain.enter()
    assert not await drain.wait_until_empty(0)
    drain.leave()
    assert await drain.wait_until_empty(0)


async def test_a_request_that_fails_has_left() -> None:
    drain = Drain()

    async def fail(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await ask(DrainMiddleware(fail, drain, print))
    assert drain.num_open == 0


@pytest.mark.parametrize("path", ["/health", "/health/live", "/metrics"])
async def test_probes_come_through_and_hold_nothing_up(path: str) -> None:
    drain = Drain()

    async def count(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse(str(drain.num_open))(scope, receive, send)

    drain.begin(REFUSAL)
    status, _, body = await ask(DrainMiddleware(count, drain, print), path)
    assert (status, body) == (200, b"0")


async def test_the_first_reason_stays() -> None:
    drain = Drain()
    drain.begin(REFUSAL)
    drain.begin(unavailable("dead", "engine_dead"))
    assert drain.refusal is REFUSAL
