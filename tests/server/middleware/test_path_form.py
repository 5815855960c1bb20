"""Behind a proxy that leaves its own part of a path in, and with a slash at the end: the same answers, the
same doors shut."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from fakes import FakeAsyncEngine
from penstock.errors import ConfigError
from penstock_server.cli import main
from penstock_server.settings.sources import make_settings
from penstock_server.settings.values import parse_prefix

from ..conftest import MakeClient


@pytest.mark.parametrize("prefix", ["", "/llm", "/a/b"])
def test_with_the_prefix_and_without_it(
    make_client: MakeClient, engine: FakeAsyncEngine, prefix: str
) -> None:
    client = make_client(engine, root_path="/llm" if prefix == "/llm" else "/a/b", api_key=("one",))
    assert client.get(f"{prefix}/health").status_code == 200
    assert client.get(f"{prefix}/").headers["content-type"].startswith("text/html")
    for path in ("/v1/completions", "/completions"):
        assert client.post(prefix + path, json={"prompt": "Hi"}).status_code == 401
        answer = client.post(prefix + path, json={"prompt": "Hi"}, headers={"X-Api-Key": "one"})
        assert answer.json()["choices"][0]["text"] == "Hello!"
    assert client.get("/llmx/health").status_code == 401
    series = client.get(f"{prefix}/metrics", headers={"X-Api-Key": "one"}).text
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 1.0' in series


def test_a_prefix_that_is_an_open_path_opens_no_other(
    make_client: MakeClient, engine: FakeAsyncEngine
) -> None:
    """/ui needs no key. The prefix is taken off once: what is behind it is what the key is checked for."""
    client = make_client(engine, root_path="/ui", api_key=("one",))
    for path, status in (("/ui/v1/models", 401), ("/ui/ui/v1/models", 404), ("/ui/ui/main.js", 200)):
        assert client.get(path).status_code == status


def test_what_the_page_and_the_documentation_find(make_client: MakeClient, engine: FakeAsyncEngine) -> None:
    client = make_client(engine, root_path="/llm")
    answer = client.get("/llm", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "/llm/")
    assert client.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_a_slash_at_the_end_changes_nothing(
    make_client: MakeClient, engine: FakeAsyncEngine, prefix: str
) -> None:
    """Nobody is sent elsewhere: the place would have the name in the request's Host."""
    client = make_client(engine, root_path=prefix, api_key=("one",))
    key = {"X-Api-Key": "one", "Host": "127.0.0.1:1"}
    answer = client.post(f"{prefix}/v1/completions/", json={"prompt": "Hi"}, headers=key)
    assert answer.json()["choices"][0]["text"] == "Hello!" and not answer.history
    for path, status in (("/v1/models/", 200), ("/health/", 200), ("/v1/models//", 404)):
        answer = client.get(f"{prefix}{path}", headers=key, follow_redirects=False)
        assert (path, answer.status_code) == (path, status) and "location" not in answer.headers
    assert client.get(f"{prefix}/v1/models/").status_code == 401


@pytest.mark.parametrize("text", ["llm", "/a//b", "/a?b", "/ä", "http://x/"])
def test_what_is_no_prefix(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="PENSTOCK_ROOT_PATH: .* write something like /llm"):
        make_settings({"model": "tiny"}, {"PENSTOCK_ROOT_PATH": text})
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "tiny", "--root-path", text])
    assert "argument --root-path: " in capsys.readouterr().err


def test_a_prefix_ends_without_a_slash() -> None:
    assert [parse_prefix(text) for text in ("/llm/", "/a/b", "/", "")] == ["/llm", "/a/b", "", ""]


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://localhost/health", 200),
        ("http://127.0.0.1:8000/health/", 200),
        ("https://localhost/llm/health", 200),
        ("http://localhost", 200),
        ("http://evil.example/health", 403),
        ("http://localhost/nothing", 404),
    ],
)
def test_a_whole_url_in_place_of_a_path(
    make_client: MakeClient, engine: FakeAsyncEngine, target: str, status: int
) -> None:
    """Its host counts, and not what the header says."""
    app = make_client(engine, root_path="/llm").app
    statuses: list[int] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        statuses.append(message.get("status", 0))

    scope = {
        **{
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
        },
        **{"path": target, "raw_path": target.encode(), "query_string": b"", "scheme": "http"},
        **{"headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 8000)},
    }
    asyncio.run(app(scope, receive, send))
    assert statuses[0] == status
