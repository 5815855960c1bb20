"""The names by which the server may be asked for."""

from __future__ import annotations

import pytest
from starlette.routing import Route

from fakes import FakeAsyncEngine
from penstock.errors import ConfigError

from ..conftest import MakeClient

OWN = [
    "localhost",
    "localhost:8000",
    "LOCALHOST.",
    "a.localhost:1",
    "127.0.0.1:8000",
    "10.1.2.3",
    "[::1]:8000",
    "::1",
]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "localhostx",
    "[::1].evil.example",
    "[::1]evil",
    "evil.example#.localhost",
    "evil.example,localhost",
]


@pytest.mark.parametrize("host", OWN)
def test_localhost_and_addresses(make_client: MakeClient, engine: FakeAsyncEngine, host: str) -> None:
    assert make_client(engine).get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_a_strangers_name_is_refused_and_the_way_is_told(
    make_client: MakeClient, engine: FakeAsyncEngine, host: str
) -> None:
    answer = make_client(engine).post("/v1/completions", json={"prompt": "x"}, headers={"Host": host})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (403, "permission_error", "host_not_allowed")
    assert host.partition(":")[0] in error["message"] and "--allowed-host" in error["message"]
    assert not engine.streams


def test_on_all_routes(make_client: MakeClient, engine: FakeAsyncEngine) -> None:
    """Those of operators, the page and its files, the document of the routes, and what is no route."""
    client = make_client(engine, allow_runtime_lora_updating=True, lora_memory=1 << 20, root_path="/llm")
    app = client.app
    paths = {route.path for route in app.routes if isinstance(route, Route)}  # type: ignore[attr-defined]
    assert {"/", "/ui/main.js"} <= paths
    paths |= {
        "/health",
        "/metrics",
        "/v1/load_lora_adapter",
        "/api/tags",
        "/v1/messages",
        "/no",
        "/llm",
        "/llm/",
    }
    for path in sorted(paths):
        for method in ("GET", "POST", "OPTIONS", "HEAD"):
            answer = client.request(method, path, headers={"Host": "evil.example"}, follow_redirects=False)
            assert answer.status_code in ((307, 403) if path == "/llm" else (403,)), (method, path)
            assert "evil" not in answer.headers.get("location", "")


@pytest.mark.parametrize(
    ("settings", "allowed", "refused"),
    [
        ({"host": "box.lan"}, ["box.lan", "BOX.lan:8000"], ["lan", "x.box.lan"]),
        ({"allowed_origin": ("https://chat.example.org:8443", "*")}, ["chat.example.org"], ["example.org"]),
        (
            {"allowed_host": ("server", ".svc.cluster.local")},
            ["server:8000", "a.b.svc.cluster.local"],
            ["serve"],
        ),
        (
            {"allowed_host": ("llm.example.org:8443", "HTTPS://API.example.org./", "http://.x.org:80")},
            ["llm.example.org", "llm.example.org:8443", "api.example.org", "a.x.org"],
            ["example.org", "https"],
        ),
        ({"allowed_host": ("*",)}, FOREIGN, []),
    ],
)
def test_names_that_the_owner_allows(
    make_client: MakeClient,
    engine: FakeAsyncEngine,
    settings: dict[str, object],
    allowed: list[str],
    refused: list[str],
) -> None:
    client = make_client(engine, **settings)
    for host, status in [(each, 200) for each in allowed] + [(each, 403) for each in refused]:
        assert (host, client.get("/health", headers={"Host": host}).status_code) == (host, status)


def test_anthropics_and_ollamas_form(make_client: MakeClient, engine: FakeAsyncEngine) -> None:
    client = make_client(engine)
    body = client.post("/v1/messages", json={}, headers={"Host": "evil.example"}).json()
    assert body["error"]["type"] == "permission_error"
    assert isinstance(client.get("/api/tags", headers={"Host": "evil.example"}).json()["error"], str)


@pytest.mark.parametrize("value", ["llm.example.org/v1", "http://", "/", "a b", "bücher.example", ":80", "."])
def test_what_is_no_name_is_refused_at_the_start(
    make_client: MakeClient, engine: FakeAsyncEngine, value: str
) -> None:
    with pytest.raises(ConfigError, match="no name of a host"):
        make_client(engine, allowed_host=(value,))
