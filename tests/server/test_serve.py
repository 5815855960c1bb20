"""Binding, greeting, and the end of a server process."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import socket
from typing import Any

import pytest

from fakes import FakeAsyncEngine, FakeModel
from penstock.errors import EngineDead
from penstock_server import serve
from penstock_server.listener import bind
from penstock_server.settings import Settings

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def own_signals(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Whatever handlers a test installs, they are gone after it."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def greeting(model: FakeModel | None = None, **settings: Any) -> str:
    fake: Any = model or FakeModel()
    text: str = serve.greeting(Settings(**({"model": "tiny"} | settings)), fake, "http://host:8000")
    return text


def test_greeting_has_a_command_that_works() -> None:
    first, _, command = greeting().splitlines()
    assert first == "tiny is ready at http://host:8000/v1"
    words = shlex.split(command)
    assert words[:2] == ["curl", "http://host:8000/v1/chat/completions"]
    assert json.loads(words[-1])["messages"]


def test_greeting_fits_the_model_and_the_settings() -> None:
    assert "/v1/completions" in greeting(FakeModel(has_chat_template=False))
    assert "Bearer" in greeting(api_key=("secret",))
    assert "secret" not in greeting(api_key=("secret",))


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://localhost:80"),
        ("::", "http://localhost:80"),
        ("::1", "http://[::1]:80"),
    ],
)
def test_address(host: str, url: str) -> None:
    assert serve.address(host, 80) == url


class Loading(FakeAsyncEngine):
    """Becomes ready, or not, when told."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait_until_ready(self) -> None:
        await asyncio.shield(self.loaded)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a server over a Loading engine: (engine, its task, its port)."""

    async def start() -> tuple[Loading, asyncio.Task[None], int]:
        engine = Loading()
        monkeypatch.setattr(serve, "AsyncEngine", lambda load: engine)
        listener = bind("127.0.0.1", 0)
        task = asyncio.create_task(serve._serve(Settings(model="tiny"), listener))
        return engine, task, listener.getsockname()[1]

    return start


async def ask(port: int, path: str) -> str:
    """The status line of an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    line = await reader.readline()
    writer.close()
    return line.decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it_cleanly(
    started: Any, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    signal.signal(number, lambda *_: None)  # uvicorn raises it again when it is done
    engine, task, port = await started()
    engine.loaded.set_result(None)
    assert "200" in await ask(port, "/health")
    signal.raise_signal(number)
    await task
    assert engine.is_stopped
    assert "tiny is ready" in capsys.readouterr().out


async def test_a_model_that_can_not_be_loaded_ends_it(started: Any) -> None:
    engine, task, _ = await started()
    engine.loaded.set_exception(EngineDead("no such folder"))
    with pytest.raises(EngineDead, match="no such folder"):
        await task
    assert engine.is_stopped


def test_serve_leaves_with_success_at_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(settings: Settings, listener: socket.socket) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(serve, "_serve", run)
    with pytest.raises(SystemExit) as caught:
        serve.serve(Settings(model="tiny"), bind("127.0.0.1", 0))
    assert caught.value.code == 0
