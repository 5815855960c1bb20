"""Binding, greeting, and the end of a server process."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fakes import FakeAsyncEngine, FakeModel, model_of
from penstock.async_engine import EngineStatus
from penstock.errors import ConfigError, EngineDead, EngineStopped
from penstock_server.serving import serve
from penstock_server.serving.listener import bind
from penstock_server.settings.settings import Settings
from warm_python import run_warm

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("own_logging")]


@pytest.fixture(autouse=True)
def own_signals(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Whatever handlers a test installs, they are gone after it."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def greeting(model: FakeModel | None = None, **settings: Any) -> str:
    settings = {"model": "tiny"} | settings
    return serve.greeting(Settings(**settings), model_of(model or FakeModel()), "http://host:8000")


def test_greeting_has_a_command_that_works() -> None:
    first, page, _, command = greeting().splitlines()
    assert first == "tiny is ready at http://host:8000/v1"
    assert page == "In a browser: http://host:8000/"
    words = shlex.split(command)
    assert words[:2] == ["curl", "http://host:8000/v1/chat/completions"]
    assert json.loads(words[-1])["messages"]


def test_greeting_fits_the_model_and_the_settings() -> None:
    assert "/v1/completions" in greeting(FakeModel(has_chat_template=False))
    assert "Bearer" in greeting(api_key=("secret",))
    assert "secret" not in greeting(api_key=("secret",))
    assert "browser" not in greeting(ui=False)


def test_greeting_says_which_models_are_loaded() -> None:
    text = serve.greeting(
        Settings(model="a"), model_of(FakeModel()), "http://host:8000", ["a", "pinned"], ["c", "d"]
    )
    assert text.splitlines()[:2] == [
        "a and pinned are ready at http://host:8000/v1",
        "Loaded when asked for: c, d",
    ]


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
        self.go_on = asyncio.Event()
        super().__init__(lambda prompt, params: ["begun", self.go_on, "done"])
        self.loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait_until_ready(self) -> None:
        await asyncio.shield(self.loaded)

    async def stop(self, timeout_s: float | None = None) -> bool:
        """Ends what runs, as the real one does."""
        has_ended = await super().stop()
        self.fail_all(EngineStopped("stopped"))
        return has_ended

    def die(self) -> None:
        self.status = EngineStatus("dead", 4, 4, "a step failed badly")
        self.fail_all(EngineDead("a step failed badly"))
        self.ended.set()

    def fail_all(self, error: EngineDead) -> None:
        for stream in self.streams:
            stream._script = [error]
            self.go_on.set()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a server over a Loading engine: (engine, its task, its port)."""

    async def start(**settings: Any) -> tuple[Loading, asyncio.Task[None], int]:
        engine = Loading()
        monkeypatch.setattr("penstock_server.facade.engine.AsyncEngine", lambda load: engine)
        listener = bind("127.0.0.1", 0)
        task = asyncio.create_task(serve._serve(Settings(model="tiny", **settings), listener))
        return engine, task, listener.getsockname()[1]

    return start


async def ask(port: int, path: str, body: dict[str, Any] | None = None) -> str:
    """A whole answer, headers and all; POST if there is a body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode() if body else b""
    head = f"{'POST' if body else 'GET'} {path} HTTP/1.1\r\nHost: localhost\r\n"
    head += "Content-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content)
    answer = await reader.read()
    writer.close()
    return answer.decode()


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


async def test_a_pipe_that_nobody_reads_does_not_blind_the_server(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`penstock serve demo | true`: it says to systemd that it is ready, and ends when the engine dies."""
    reading, writing = os.pipe()
    os.close(reading)
    told: list[str] = []
    monkeypatch.setattr(serve.systemd, "notify", told.append)
    with os.fdopen(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        engine, task, _ = await started()
        engine.loaded.set_result(None)
        while not told and not task.done():
            await asyncio.sleep(0)
        engine.die()
        with pytest.raises(EngineDead):
            await task
    assert told == [serve.systemd.READY, serve.systemd.STOPPING]


async def test_the_garbage_collector_leaves_alone_what_was_loaded(started: Any) -> None:
    """A look at all objects of the libraries would hold up every stream, each time."""
    gc.unfreeze()
    engine, task, port = await started()
    await ask(port, "/health")
    assert gc.get_freeze_count() == 0
    engine.loaded.set_result(None)
    while " 200 " not in await ask(port, "/health"):
        pass
    assert gc.get_freeze_count() > len(gc.get_objects())
    signal.raise_signal(signal.SIGTERM)
    await task
    gc.unfreeze()


async def a_running_request(engine: Loading, port: int, **fields: Any) -> asyncio.Task[str]:
    running = asyncio.create_task(ask(port, "/v1/completions", {"prompt": "x"} | fields))
    while not engine.streams:
        await asyncio.sleep(0)
    return running


async def test_an_engine_that_hangs_does_not_keep_the_process(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would wait for its threads."""
    codes = list[int]()
    monkeypatch.setattr(serve.os, "_exit", codes.append)
    monkeypatch.setattr(serve.logging, "shutdown", lambda: None)
    engine, task, port = await started()
    stop = engine.stop

    async def hang(timeout_s: float | None = None) -> bool:
        assert timeout_s is not None
        await stop(timeout_s)
        return False

    engine.stop = hang
    engine.loaded.set_result(None)
    while " 200 " not in await ask(port, "/health"):
        pass
    signal.raise_signal(signal.SIGTERM)
    await task
    assert codes == [1]


async def until_draining(port: int) -> None:
    while "draining" not in await ask(port, "/health"):
        await asyncio.sleep(0)


async def test_a_signal_lets_running_requests_finish(started: Any) -> None:
    engine, task, port = await started()
    engine.loaded.set_result(None)
    await ask(port, "/health")  # the handlers are in place
    running = await a_running_request(engine, port)
    signal.raise_signal(signal.SIGTERM)
    await until_draining(port)
    assert " 200 " in await ask(port, "/health/live")
    refused = await ask(port, "/v1/completions", {"prompt": "x"})
    assert " 503 " in refused and "shutting_down" in refused and "connection: close" in refused.lower()
    assert not task.done() and not engine.is_stopped
    engine.go_on.set()
    assert "begundone" in await running
    await task
    assert engine.is_stopped


@pytest.mark.parametrize("is_stream", [True, False])
async def test_what_has_no_time_left_is_told(started: Any, is_stream: bool) -> None:
    engine, task, port = await started(shutdown_timeout=0)
    engine.loaded.set_result(None)
    await ask(port, "/health")
    running = await a_running_request(engine, port, stream=is_stream)
    signal.raise_signal(signal.SIGTERM)
    answer = await running
    assert "shutting_down" in answer and ("[DONE]" in answer) == is_stream
    await task


async def test_an_engine_that_dies_ends_it_after_its_requests_were_told(started: Any) -> None:
    engine, task, port = await started()
    engine.loaded.set_result(None)
    await ask(port, "/health")
    running = await a_running_request(engine, port)
    engine.die()
    answer = await running
    assert " 503 " in answer and "engine_dead" in answer
    with pytest.raises(EngineDead, match="failed badly"):
        await task


async def test_a_watch_that_fails_ends_it(
    started: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that nobody watches would go on without an engine."""

    def fail() -> None:
        raise ZeroDivisionError("a plan of nothing")

    monkeypatch.setattr(serve, "spare_the_collector", fail)
    engine, task, _ = await started()
    engine.loaded.set_result(None)
    with pytest.raises(EngineDead, match="a plan of nothing"):  # serve() leaves with 1 then
        await task
    assert engine.is_stopped
    (record,) = [record for record in caplog.records if record.exc_info]
    assert isinstance(record.exc_info[1], ZeroDivisionError)


@pytest.mark.parametrize("state", ["loading", "ready"])
def test_a_second_signal_and_one_while_loading_end_it_at_once(state: str) -> None:
    """In a process of its own, because that is what ends."""
    code = f"""
import asyncio, os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from fakes import FakeAsyncEngine
from penstock.async_engine import EngineStatus
from penstock_server.facade import engine as facade
from penstock_server.serving import serve
from penstock_server.serving.listener import bind
from penstock_server.settings.settings import Settings
engine = FakeAsyncEngine()
engine.status = EngineStatus({state!r}, 1, 4)
facade.AsyncEngine = lambda load: engine
async def stuck(): await asyncio.Event().wait()
engine.stop = stuck
numbers = (signal.SIGTERM, signal.SIGINT)
serve._Server._announce = lambda self: [os.kill(os.getpid(), number) for number in numbers]
serve.serve(Settings(model="tiny"), bind("127.0.0.1", 0))
"""
    done = run_warm("-c", code)
    assert done.returncode == (0 if state == "loading" else 128 + signal.SIGINT), done.stderr


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """One file with a key and what it signed for 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    path = tmp_path / "certificate.pem"
    words = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=x -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*words.split(), "-keyout", "key", "-out", "cert"], cwd=tmp_path, check=True)
    path.write_text((tmp_path / "key").read_text() + (tmp_path / "cert").read_text())
    return path


@pytest.mark.parametrize("is_split", [False, True])
async def test_https(
    started: Any, certificate: Path, capsys: pytest.CaptureFixture[str], is_split: bool
) -> None:
    folder = certificate.parent
    both = {"ssl_certfile": folder / "cert", "ssl_keyfile": folder / "key"}
    engine, task, port = await started(**(both if is_split else {"ssl_certfile": certificate}))
    engine.loaded.set_result(None)
    trust = ssl.create_default_context(cafile=str(folder / "cert"))
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert b" 200 " in await reader.readline()
    writer.close()
    signal.raise_signal(signal.SIGTERM)
    await task
    assert "at https://127.0.0.1" in capsys.readouterr().out


async def test_a_certificate_that_is_none_is_told_before_anything_is_loaded(
    started: Any, tmp_path: Path
) -> None:
    path = tmp_path / "certificate.pem"
    for text in (None, "nonsense"):
        if text:
            path.write_text(text)
        _, task, _ = await started(ssl_certfile=path)
        with pytest.raises(ConfigError, match="certificate.pem"):
            await task


async def test_a_model_that_can_not_be_loaded_ends_it(started: Any) -> None:
    engine, task, _ = await started()
    engine.loaded.set_exception(EngineDead("no such folder"))
    with pytest.raises(EngineDead, match="no such folder"):
        await task
    assert engine.is_stopped


def test_serve_leaves_with_success_at_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is allowed as many connections as the system lets it have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))

    async def run(settings: Settings, listener: socket.socket) -> None:
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(serve, "_serve", run)
    with pytest.raises(SystemExit) as caught:
        serve.serve(Settings(model="tiny"), bind("127.0.0.1", 0))
    assert caught.value.code == 0
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
