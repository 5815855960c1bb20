"""Keys: from flags and files, in either header, and what needs none."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes import FakeAsyncEngine
from penstock.errors import ConfigError
from penstock_server.middleware.access import read_keys
from penstock_server.settings.settings import Settings

from ..conftest import MakeClient


def test_keys(make_client: MakeClient, engine: FakeAsyncEngine) -> None:
    client = make_client(engine, api_key=("one", "two"))
    for header in ({}, {"Authorization": "Bearer three"}, {"Authorization": "Basic one"}):
        answer = client.get("/v1/models", headers=header)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["x-request-id"]
    for key in ("Bearer one", "bearer two"):
        assert client.get("/v1/models", headers={"Authorization": key}).status_code == 200


def test_a_key_in_the_other_header(make_client: MakeClient, engine: FakeAsyncEngine) -> None:
    client = make_client(engine, api_key=("one",))
    assert client.get("/v1/models", headers={"X-Api-Key": "one"}).status_code == 200
    for headers in (
        {"X-Api-Key": "two"},
        {"X-Api-Key": ""},
        {"X-Api-Key": "one", "Authorization": "Bearer x"},
    ):
        assert client.get("/v1/models", headers=headers).status_code == 401


def test_metrics_may_be_open(make_client: MakeClient, engine: FakeAsyncEngine) -> None:
    client = make_client(engine, api_key=("one",), open_metrics=True)
    assert client.get("/metrics").status_code == 200
    assert client.get("/v1/models").status_code == 401


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/ping", "/version"])
def test_open_paths(make_client: MakeClient, engine: FakeAsyncEngine, path: str) -> None:
    assert make_client(engine, api_key=("one",)).get(path).status_code == 200


@pytest.mark.parametrize("path", ["/metrics", "/healthy", "/docs", "/openapi.json", "/models", "/x"])
def test_everything_else_is_guarded(make_client: MakeClient, engine: FakeAsyncEngine, path: str) -> None:
    assert make_client(engine, api_key=("one",)).get(path).status_code == 401


def test_keys_of_a_file_add_to_those_of_flags(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# the team's\nfirst\n\n  second  \n")
    assert read_keys(Settings(api_key=("flag",), api_key_file=path)) == ("flag", "first", "second")


@pytest.mark.parametrize("text", ["", "# none yet\n", "two words\n", "schl\u00fcssel\n"])
def test_a_file_that_would_leave_the_server_open_or_shut(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match="API key"):
        read_keys(Settings(api_key_file=path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gone"):
        read_keys(Settings(api_key_file=tmp_path / "gone"))


def test_an_empty_key_is_none() -> None:
    with pytest.raises(ConfigError, match="API key"):
        read_keys(Settings(api_key=("",)))
