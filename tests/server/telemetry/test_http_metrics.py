"""Requests are counted by route, and nobody can make new series."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient


def counts(client: TestClient) -> dict[tuple[str, str, str], float]:
    """By method, status and handler, without the scrapes themselves."""
    found = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            labels = sample.labels
            if sample.name == "http_requests_total" and labels["handler"] != "/metrics":
                found[labels["method"], labels["status"], labels["handler"]] = sample.value
    return found


def test_routes_and_not_paths(client: TestClient) -> None:
    client.get("/v1/models/tiny")
    client.get("/v1/models/other/one")
    client.get("/models/tiny")
    client.post("/v1/completions", json={"prompt": "x"})
    client.get("/health")
    assert counts(client) == {
        ("GET", "2xx", "/v1/models/{model:path}"): 1,
        ("GET", "4xx", "/v1/models/{model:path}"): 1,
        ("GET", "2xx", "/models/{model:path}"): 1,
        ("POST", "2xx", "/v1/completions"): 1,
        ("GET", "2xx", "/health"): 1,
    }


@pytest.mark.parametrize(("method", "path"), [("GET", "/nobody/1"), ("GET", "/nobody/2"), ("BREW", "/tea")])
def test_what_has_no_route_has_no_name(client: TestClient, method: str, path: str) -> None:
    client.request(method, path)
    assert counts(client) == {("GET" if method == "GET" else "other", "4xx", "none"): 1}


def test_seconds_are_measured(client: TestClient) -> None:
    client.get("/health")
    text = client.get("/metrics").text
    assert 'http_request_duration_seconds_count{handler="/health",method="GET"} 1.0' in text
