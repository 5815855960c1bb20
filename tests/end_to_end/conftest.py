"""A client of the server on the demo model, and pages in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from .browser import CHROMIUM, FLAGS, PATIENCE_MS, OpenPage, Page
from .server_process import ServerProcess

MODEL = "demo"


@pytest.fixture(scope="session")
def server(demo_server: ServerProcess) -> ServerProcess:
    return demo_server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Needs the extra `browser` (playwright) and a Chromium of the system's; skips where one is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the extra 'browser' is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    playwright.expect.set_options(timeout=PATIENCE_MS)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """open_page(url, **options of the browser context). Errors in the page's scripts, and what its policy
    forbade, fail the test."""
    contexts, problems = [], []

    def listen(message: Any) -> None:
        if "Content Security Policy" in message.text or "Trusted" in message.text:
            problems.append(message.text)

    def open_one(url: str, **options: Any) -> Page:
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 800}} | options))
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", listen)
        page.goto(url)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert not problems
