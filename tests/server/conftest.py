"""A server over a fake engine, in this process and without a socket."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from starlette.testclient import TestClient

from fakes import FakeAsyncEngine, render_chat
from penstock_server.api.app import create_app
from penstock_server.facade.engine import ServedEngine
from penstock_server.settings.settings import Settings

MakeClient = Callable[..., TestClient]


@pytest.fixture(autouse=True)
def plain_chat_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fakes' tokenizer has no template of its own."""
    for module in ("penstock_server.prompts.inputs", "penstock_server.commands.talking.conversation"):
        monkeypatch.setattr(f"{module}.render_chat", render_chat)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Whatever a test sets up for logs is gone after it."""
    root, requests = logging.getLogger(), logging.getLogger("penstock_server.middleware.request_context")
    handlers, levels = root.handlers[:], (root.level, requests.level)
    yield
    root.handlers[:] = handlers
    for logger, level in zip((root, requests), levels, strict=True):
        logger.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture
def engine() -> FakeAsyncEngine:
    return FakeAsyncEngine()


@pytest.fixture
def make_client() -> Iterator[MakeClient]:
    """make_client(engine, **settings): a client of a running application."""
    with ExitStack() as stack:

        def make(engine: FakeAsyncEngine, **settings: Any) -> TestClient:
            fake: Any = engine
            app = create_app(ServedEngine(fake), Settings(**({"model": "tiny"} | settings)))
            return stack.enter_context(
                TestClient(app, raise_server_exceptions=False, base_url="http://localhost")
            )

        yield make


@pytest.fixture
def client(make_client: MakeClient, engine: FakeAsyncEngine) -> TestClient:
    return make_client(engine)


def sse_events(body: str) -> list[Any]:
    """The data of each event, [DONE] as a string; comments are left out."""
    events = []
    for block in body.split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            events.append(data if data == "[DONE]" else json.loads(data))
    return events
