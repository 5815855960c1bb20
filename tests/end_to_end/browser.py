"""What the tests of the web page share: an application over a fake engine, and words for what a reader does.

The pages themselves come from the fixture `open_page` of conftest.py.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import uvicorn

from fakes import FakeAsyncEngine, render_chat
from penstock_server.api.app import create_app
from penstock_server.facade.engine import ServedEngine
from penstock_server.models.served_models import ServedModels
from penstock_server.serving.listener import bind
from penstock_server.settings.settings import Settings

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
#: As root there is no sandbox; the rest keeps the browser from calling anybody by itself.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
#: For waits that end when something happens; only a broken page lets one run out.
PATIENCE_MS = 60_000

Page = Any
OpenPage = Callable[..., Page]


@contextmanager
def serving(engine: FakeAsyncEngine | ServedModels, **settings: Any) -> Iterator[str]:
    """The application over a fake engine or several, on a socket, in a thread; its address."""
    fake: Any = engine
    served = engine if isinstance(engine, ServedModels) else ServedEngine(fake)
    app = create_app(served, Settings(**({"model": "tiny"} | settings)))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    # The fakes' tokenizer has no template of its own.
    with (
        mock.patch("penstock_server.prompts.inputs.render_chat", render_chat),
        bind("127.0.0.1", 0) as listener,
    ):
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def say(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answer(page: Page) -> Any:
    """The last answer."""
    return page.locator(".message.assistant").last


def wait_until_done(page: Page) -> None:
    page.get_by_role("button", name="Send", exact=True).wait_for()


def expect(found: Any) -> Any:
    """playwright's own, which waits."""
    from playwright.sync_api import expect

    return expect(found)
