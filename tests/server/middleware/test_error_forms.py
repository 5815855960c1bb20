"""Errors of other APIs' paths, whoever answers them."""

from __future__ import annotations

import pytest

from fakes import FakeAsyncEngine

from ..conftest import MakeClient


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_each_api_has_its_form(make_client: MakeClient, prefix: str) -> None:
    client = make_client(FakeAsyncEngine(), api_key=("key",), root_path=prefix or None)
    for path in ("/v1/messages", "/messages", "/v1/messages/count_tokens"):
        error = client.post(prefix + path, json={}, headers={"X-Request-Id": "r1"}).json()
        assert error["type"] == "error" and error["error"]["type"] == "authentication_error"
        assert error["request_id"] == "r1"
    assert isinstance(client.post(f"{prefix}/api/chat", json={}).json()["error"], str)
    for path in ("/v1/chat/completions", "/v1/messagesx", "/apis"):
        assert client.post(prefix + path, json={}).json()["error"]["code"] == "invalid_api_key"


def test_lengths_fit(make_client: MakeClient) -> None:
    client = make_client(FakeAsyncEngine())
    for answer in (client.get("/api/made-up"), client.head("/api/made-up"), client.get("/v1/messages")):
        assert answer.status_code in (404, 405)
        assert int(answer.headers["content-length"]) == len(answer.content) or not answer.content
