"""Bodies that are too large, too slow, or never end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fakes import FakeAsyncEngine
from penstock_server.api.app import create_app
from penstock_server.facade.engine import ServedEngine
from penstock_server.middleware.body_budget import BodyBudget
from penstock_server.middleware.body_limit import BodyLimit
from penstock_server.settings.settings import Settings

from ..conftest import MakeClient


def test_large_bodies_are_refused(make_client: MakeClient, engine: FakeAsyncEngine) -> None:
    client = make_client(engine, max_request_size=100)
    body = json.dumps({"prompt": "x" * 100}).encode()
    headers = {"Content-Type": "application/json"}

    def in_pieces() -> Any:  # sent without a length
        yield from (body[:60], body[60:])

    for content in (body, in_pieces()):
        answer = client.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
    assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    assert not engine.streams[1:]


async def ask(
    messages: list[Any],
    headers: Sequence[tuple[bytes, bytes]] = (),
    see: Callable[[Any], None] = lambda message: None,
    **settings: Any,
) -> tuple[FakeAsyncEngine, list[Any]]:
    """What a client gets that sends these messages, an event being a time of silence."""
    engine = FakeAsyncEngine()
    fake: Any = engine
    app = create_app(ServedEngine(fake), Settings(model="tiny", **settings))
    sent: list[Any] = []

    async def receive() -> Any:
        message = messages.pop(0)
        if isinstance(message, asyncio.Event):
            await message.wait()
        return message

    async def send(message: Any) -> None:
        sent.append(message)
        see(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), *headers],
    }
    await app(scope, receive, send)
    return engine, sent


def part(text: str, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": text.encode(), "more_body": more}


@pytest.mark.anyio
@pytest.mark.parametrize("has_length", [True, False])
async def test_the_refusal_reaches_a_client_that_still_sends(has_length: bool) -> None:
    """A connection that is closed with a body on its way is reset, and the client may never read the answer:
    so all of it is sent first, and the connection ends when the body does."""
    parts = [part("x" * 60), part("x" * 60), part("x" * 60), part("x", more=False), part("not asked for")]
    headers = [(b"content-length", b"181")] if has_length else []
    num_left_at_answer = []
    _, sent = await ask(
        parts, headers, lambda message: num_left_at_answer.append(len(parts)), max_request_size=100
    )
    assert sent[0]["status"] == 413 and b"request_too_large" in sent[1]["body"] and sent[1]["more_body"]
    assert num_left_at_answer == ([5, 5, 1] if has_length else [3, 3, 1])
    assert sent[2] == {"type": "http.response.body", "body": b""}


@pytest.mark.anyio
async def test_the_refusal_of_a_whole_body_waits_for_nothing() -> None:
    """The part that is too much is the last one: the client has nothing left to send."""
    silence = asyncio.Event()  # never set
    _, sent = await ask([part("x" * 60), part("x" * 60, more=False), silence], max_request_size=100)
    assert sent[0]["status"] == 413 and sent[2] == {"type": "http.response.body", "body": b""}


@pytest.mark.anyio
async def test_a_body_that_does_not_come_is_a_408() -> None:
    engine, sent = await ask([part('{"prompt"'), asyncio.Event()], request_body_timeout=0.01)
    assert sent[0]["status"] == 408 and (b"connection", b"close") in sent[0]["headers"]
    assert b"request_timeout" in sent[1]["body"] and not engine.streams


@pytest.mark.anyio
async def test_a_slow_client_is_no_slow_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the body is there, its time is over and the answer's begins."""
    messages = [part('{"prompt":'), part(' "x"}', more=False), {"type": "http.disconnect"}]
    coming, seen = iter(messages), []

    async def receive() -> Any:
        for _ in range(3):  # a limit whose time is over acts when the loop runs
            await asyncio.sleep(0)
        return next(coming)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        seen.append(await receive())
        seen.append(await receive())
        loop = asyncio.get_running_loop()
        hours_later = loop.time() + 2 * 3600
        monkeypatch.setattr(loop, "time", lambda: hours_later)
        seen.append(await receive())

    scope = {"type": "http", "headers": []}
    await BodyLimit(answer, max_bytes=100, timeout_s=3600, budget=BodyBudget(1000))(scope, receive, _ignore)
    assert seen == messages


async def _ignore(message: Any) -> None:
    """A `send` of which nothing is expected."""


@pytest.mark.anyio
@pytest.mark.parametrize("num_parts", [0, 1, 2])
async def test_a_client_that_leaves_while_it_sends(num_parts: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    engine, _ = await ask([part('{"prompt": "')] * num_parts + [{"type": "http.disconnect"}])
    assert not engine.streams
    assert "POST /v1/completions 499" in caplog.text


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"nonsense", b"[1, 2]", b"null", b'"x"', b"\xff\xfe\x00", b'{"prompt": "\xff"}', b"[" * 9999,
     b'{"prompt": ' + b"9" * 5000 + b"}", b'{"max_tokens": 1e999, "prompt": "x"}', b"NaN"],
)  # fmt: skip
def test_malformed_bodies_are_the_clients_mistakes(make_client: MakeClient, content: bytes) -> None:
    engine = FakeAsyncEngine()
    client = make_client(engine)
    answer = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"], answer.text
    assert not engine.streams
