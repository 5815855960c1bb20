"""Probes say what can be relied on, at any time of the engine's life."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from fakes import FakeAsyncEngine
from penstock.async_engine import EngineStatus
from penstock.nodes.member import NodeStatus
from penstock.step_watch import Trouble
from penstock_server import __version__
from penstock_server.api.app import create_app
from penstock_server.facade.engine import ServedEngine
from penstock_server.middleware.draining import Drain
from penstock_server.protocol.errors import unavailable
from penstock_server.settings.settings import Settings

from ..conftest import MakeClient

READY = ("/health", "/health/ready", "/ping")


def client_in(make_client: MakeClient, status: EngineStatus) -> TestClient:
    engine = FakeAsyncEngine()
    engine.status = status
    return make_client(engine)


@pytest.mark.parametrize("path", READY)
def test_ready(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("path", READY)
def test_loading(make_client: MakeClient, path: str) -> None:
    answer = client_in(make_client, EngineStatus("loading", 3, 12)).get(path)
    assert answer.status_code == 503
    assert answer.json() == {"status": "loading", "loaded_layers": 3, "total_layers": 12}
    assert answer.headers["retry-after"]


@pytest.mark.parametrize("path", READY)
def test_dead(make_client: MakeClient, path: str) -> None:
    answer = client_in(make_client, EngineStatus("dead", 12, 12, "secret")).get(path)
    assert (answer.status_code, answer.json()) == (503, {"status": "dead"})


def test_draining_is_alive_but_not_ready(engine: FakeAsyncEngine) -> None:
    fake: Any = engine
    drain = Drain()
    with TestClient(
        create_app(ServedEngine(fake), Settings(model="tiny"), drain), base_url="http://localhost"
    ) as client:
        drain.begin(unavailable("The server is shutting down.", "shutting_down"))
        for path in READY:
            answer = client.get(path)
            assert (answer.status_code, answer.json()) == (503, {"status": "draining"})
        assert client.get("/health/live").status_code == 200
        refused = client.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"


@pytest.mark.parametrize("kind", ["failing", "stuck"])
def test_steps_that_fail_or_hang(kind: Any, make_client: MakeClient) -> None:
    """A router sends requests elsewhere, and nobody restarts the server: the disk would be the same."""
    engine = FakeAsyncEngine()
    engine.trouble = Trouble(kind, "why")
    client = make_client(engine)
    for path in READY:
        answer = client.get(path)
        assert (answer.status_code, answer.json()) == (503, {"status": kind, "message": "why"})
    assert client.get("/health/live").status_code == 200
    engine.trouble = None
    assert client.get("/health/ready").status_code == 200


def test_a_machine_that_is_away(make_client: MakeClient) -> None:
    """A router sends requests elsewhere, and nobody restarts the server: requests wait for the machine."""
    engine = FakeAsyncEngine()
    away = NodeStatus(2, "secret", "away", "secret", (0, 1), 0, 0, 0, 0, True, 0, 0.0, 1, 3.0, 0.0)
    engine.model.nodes = (replace(away, rank=1, state="ready"), away)
    client = make_client(engine)
    for path in READY:
        answer = client.get(path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json() == {"status": "waiting", "message": "rank 2 is away"}
    assert client.get("/health/live").status_code == 200
    engine.model.nodes = ()
    assert client.get("/health").json() == {"status": "ok"}


def test_load_counts_what_is_being_answered(engine: FakeAsyncEngine) -> None:
    fake: Any = engine
    drain = Drain()
    with TestClient(
        create_app(ServedEngine(fake), Settings(model="tiny"), drain), base_url="http://localhost"
    ) as client:
        assert client.get("/load").json() == {"server_load": 0}
        drain.enter()
        assert client.get("/load").json() == {"server_load": 1}


@pytest.mark.parametrize(
    ("state", "status"), [("loading", 200), ("ready", 200), ("dead", 503), ("stopped", 503)]
)
def test_live_unless_only_a_restart_can_help(make_client: MakeClient, state: str, status: int) -> None:
    client = client_in(make_client, EngineStatus(state, 1, 2))  # type: ignore[arg-type]
    assert client.get("/health/live").status_code == status


@pytest.mark.parametrize(("state", "code"), [("loading", "model_loading"), ("dead", "engine_dead")])
def test_without_an_engine_there_is_no_plan(make_client: MakeClient, state: str, code: str) -> None:
    """As on the routes that generate."""
    client = client_in(make_client, EngineStatus(state, 3, 12))  # type: ignore[arg-type]
    answer = client.get("/v1/plan")
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert answer.json() == client.post("/v1/completions", json={"prompt": "x"}).json()
    assert answer.json()["error"]["code"] == code


def test_version(client: TestClient) -> None:
    assert client.get("/version").json() == {"version": __version__}


def test_metrics(client: TestClient) -> None:
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in answer.text
