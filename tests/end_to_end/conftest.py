"""One server on the demo model for all tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from .server_process import ServerProcess

MODEL = "demo"


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(MODEL, "--max-model-len", "512") as server:
        yield server.wait_until_ready()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
