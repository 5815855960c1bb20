"""The session of clients/ray/dataset.py against a server of a few lines, used as Ray's HTTP stage uses it."""

from __future__ import annotations

import asyncio
import importlib
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
GOOD = {
    "choices": [{"text": " there", "finish_reason": "length"}],
    "usage": {"prompt_tokens": 2, "completion_tokens": 1},
}


@pytest.fixture
def module(ray_folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = importlib.import_module("patient_session")
    monkeypatch.setattr(found, "_FIRST_WAIT_S", 0.001)
    return found


def batch(module: ModuleType, handler: Handler, num_rows: int = 1) -> list[dict[str, Any]]:
    """What the stage makes of a batch: it posts all rows, and then awaits one after the other."""

    async def run() -> list[dict[str, Any]]:
        server = web.Application()
        server.router.add_post("/v1/completions", handler)
        runner = web.AppRunner(server)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/completions"
        try:
            return await posted(module.PatientSession(patience_s=20), url, num_rows)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


async def posted(made: Any, url: str, num_rows: int) -> list[dict[str, Any]]:
    answers = []
    async with made as session:
        requests = [session.post(url, headers={"X-Row": str(row)}, data="{}") for row in range(num_rows)]
        for request in requests:
            async with await request as response:
                assert response.status == 200
                answers.append(await response.json())
    return answers


def test_all_rows_of_a_batch_are_under_way_at_once(module: ModuleType) -> None:
    """The server answers nobody before all are there. aiohttp's own session would send one row alone."""
    all_there = asyncio.Barrier(8)

    async def handler(_: web.Request) -> web.Response:
        await all_there.wait()
        return web.json_response(GOOD)

    columns = {
        "answer": " there",
        "finish_reason": "length",
        "prompt_tokens": 2,
        "completion_tokens": 1,
        "error": "",
    }
    assert batch(module, handler, num_rows=8) == [columns] * 8


def test_a_chat_and_a_tool_call(module: ModuleType) -> None:
    async def handler(request: web.Request) -> web.Response:
        content = [None, "Hello"][int(request.headers["X-Row"])]
        return web.json_response({"choices": [{"message": {"content": content}, "finish_reason": "stop"}]})

    assert [columns["answer"] for columns in batch(module, handler, num_rows=2)] == ["", "Hello"]


def test_the_error_of_a_row_is_its_own(module: ModuleType) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if request.headers["X-Row"] == "0":
            return web.json_response({"error": {"message": "the prompt is too long"}}, status=400)
        if request.headers["X-Row"] == "1":
            return web.Response(text="<html>Gateway Timeout</html>", status=504)
        if request.headers["X-Row"] == "4":
            return web.json_response({"error": "no healthy upstream"}, status=500)
        if request.headers["X-Row"] == "2":
            assert request.transport is not None
            request.transport.abort()
        return web.json_response(GOOD)

    errors = [columns["error"] for columns in batch(module, handler, num_rows=5)]
    assert errors[0] == "the prompt is too long" and errors[3] == ""
    assert errors[1] == "HTTP 504: <html>Gateway Timeout</html>"
    assert "5 times, the connection broke" in errors[2]
    assert errors[4] == 'HTTP 500: {"error": "no healthy upstream"}'


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_is_busy_is_asked_again(
    module: ModuleType, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a wait, whatever the server says: a proxy's "Retry-After: 0" would be asked without end."""
    statuses, waits, wait = [status, status, 200], list[float](), module.PatientSession._wait

    def listen(session: Any, wait_s: float, reason: str) -> Awaitable[None]:
        waits.append(wait_s)
        return wait(session, wait_s, reason)

    monkeypatch.setattr(module.PatientSession, "_wait", listen)

    async def handler(_: web.Request) -> web.Response:
        now = statuses.pop(0)
        body = GOOD if now == 200 else {"error": {"message": "the model is being loaded"}}
        return web.json_response(body, status=now, headers={"Retry-After": "0"})

    assert batch(module, handler)[0]["error"] == "" and not statuses
    assert waits == [module._FIRST_WAIT_S] * 2


def test_an_error_of_all_rows_ends_the_job(module: ModuleType) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "wrong key"}}, status=401)

    with pytest.raises(module.JobRefused, match="wrong key"):
        batch(module, handler)


def test_a_server_that_stays_away_ends_the_job(module: ModuleType) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1/completions"  # nobody listens
        with pytest.raises(module.JobRefused, match="start the server and the job again"):
            asyncio.run(posted(module.PatientSession(patience_s=0), url, num_rows=2))
