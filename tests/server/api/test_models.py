"""The model under all its names, at any time."""

from __future__ import annotations

from starlette.testclient import TestClient

from fakes import FakeAsyncEngine
from penstock.async_engine import EngineStatus

from ..conftest import MakeClient


def test_models(client: TestClient) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 1000)
    assert client.get("/v1/models/tiny").json() == model
    assert client.get("/models").json()["data"] == [model]


def test_models_answer_heads(client: TestClient) -> None:
    assert [client.head(path).status_code for path in ("/v1/models", "/models/tiny")] == [200, 200]
    assert client.head("/v1/models/other").status_code == 404


def test_a_models_name_may_have_slashes(make_client: MakeClient, engine: FakeAsyncEngine) -> None:
    client = make_client(engine, model="org/tiny")
    assert client.get("/v1/models/org/tiny").json()["id"] == "org/tiny"
    missing = client.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_models_are_listed_while_loading(make_client: MakeClient) -> None:
    engine = FakeAsyncEngine()
    engine.status = EngineStatus("loading", 1, 4)
    client = make_client(engine, served_model_name=("a", "b"))
    listed = client.get("/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in listed] == [("a", None), ("b", None)]
