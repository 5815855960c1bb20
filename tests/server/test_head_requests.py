"""HEAD is GET without a body, on every route."""

from __future__ import annotations

from starlette.testclient import TestClient


def test_head_answers_like_get_without_a_body(client: TestClient) -> None:
    for path in ("/health", "/health/live", "/ping", "/version", "/load", "/v1/models", "/v1/models/tiny",
                 "/v1/responses/x", "/v1/nothing", "/", "/openapi.json"):  # fmt: skip
        head, got = client.head(path), client.get(path)
        assert head.status_code == got.status_code and head.content == b"", path
        for name in ("content-type", "content-length", "etag"):
            assert head.headers.get(name) == got.headers.get(name), (path, name)
    answer = client.head("/v1/completions")
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    assert client.post("/health").headers["allow"] == "GET, HEAD"
    assert not any("head" in methods for methods in client.get("/openapi.json").json()["paths"].values())
