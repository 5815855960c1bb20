"""Requests that schemathesis makes up from /openapi.json, and now and then spoils: no answer is a server's
error, and each is what the document says of it, whole or as a stream."""

from __future__ import annotations

import re
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.testclient import TestClient

from fakes import FakeAsyncEngine
from penstock_server.api.app import create_app
from penstock_server.facade.engine import ServedEngine
from penstock_server.settings.settings import Settings

CHECKS: Any = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


def document() -> dict[str, Any]:
    """With names of models that are there, and now and then a prompt in the vocabulary or messages that fit
    each other: almost no made-up request would come through otherwise."""
    engine: Any = FakeAsyncEngine()
    description = create_app(ServedEngine(engine), Settings(model="tiny")).openapi()
    for schema in description["components"]["schemas"].values():
        properties = schema.get("properties", {})
        if "model" in properties:
            properties["model"] = {"enum": ["tiny"]}
        if "prompt_embeds" in properties:  # no made-up text is a tensor, or the name of a soft prompt
            for name in ("prompt_embeds", "prompt_follows_embeds", "soft_prompt"):
                del properties[name]
        for name, plain in (("messages", [{"role": "user", "content": "Hi"}]), ("prompt", "Hi")):
            if name in properties:
                properties[name] = {"anyOf": [{"const": plain}, properties[name]]}
    return description


SCHEMA = schemathesis.openapi.from_dict(document())
OPERATIONS = {operation.label: operation for each in SCHEMA.get_all_operations() if (operation := each.ok())}


CASES = [
    pytest.param(label, mode, id=f"{label}-{mode.value}")
    for label in OPERATIONS
    for mode in GenerationMode
    if mode is GenerationMode.POSITIVE or "requestBody" in OPERATIONS[label].definition.raw
]


@pytest.mark.parametrize(("label", "mode"), CASES)
def test_made_up_requests_are_answered_as_described(
    client: TestClient, label: str, mode: GenerationMode
) -> None:
    statuses = set[int]()
    # One made-up field is enough for a refusal, so that few requests that are meant to be right come through.
    num_posted = 40 if mode is GenerationMode.POSITIVE else 12

    @settings(
        max_examples=num_posted if "POST" in label else 3,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=OPERATIONS[label].as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        request = case.as_transport_kwargs(base_url="http://localhost")
        request.pop("cookies", None)  # there are none, and the client wants them for all its requests
        answer = client.request(**request)
        statuses.add(answer.status_code)
        case.validate_response(answer, checks=CHECKS)

    check()
    if mode is GenerationMode.NEGATIVE:
        assert statuses & {400, 415}, statuses
    elif not re.search(r"\{|/plan|/fill|/embed|/score|/rerank", label):  # which the fake model can't do
        assert 200 in statuses, statuses
