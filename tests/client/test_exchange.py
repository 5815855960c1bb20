import json

import pytest

from penstock_client.errors import ProtocolError
from penstock_client.exchange import Reply, Request, parse_json_object


def test_with_model_adds_it_to_a_copy():
    request = Request("POST", "/v1/completions", {"prompt": "a"})
    assert request.needs_model
    filled = request.with_model("tiny")
    assert filled.body == {"prompt": "a", "model": "tiny"}
    assert not filled.needs_model
    assert request.body == {"prompt": "a"}


def test_a_get_needs_no_model_and_has_no_content():
    request = Request("GET", "/health")
    assert not request.needs_model
    assert request.content() == b""


@pytest.mark.parametrize("prompt", ["Grüße 🌍", "\ud800 alone", "\0\n\u2028"])
def test_content_carries_any_text(prompt):
    assert json.loads(Request("POST", "/", {"prompt": prompt}).content()) == {"prompt": prompt}


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_content_refuses_what_json_cannot_say(number):
    with pytest.raises(ValueError, match="JSON"):
        Request("POST", "/", {"temperature": number}).content()


@pytest.mark.parametrize(
    ("status", "is_success"), [(199, False), (200, True), (299, True), (300, False), (503, False)]
)
def test_success_is_2xx(status, is_success):
    assert Reply(status, {}, b"").is_success is is_success


def test_request_id_is_a_header():
    assert Reply(200, {"x-request-id": "req-1"}, b"").request_id == "req-1"
    assert Reply(200, {}, b"").request_id is None


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b'{"a":', b"[1]", b"null", b'"text"', b"\xff\xfe\xfa", b"[" * 100_000]
)
def test_garbage_is_a_protocol_error_that_quotes_its_beginning(body):
    with pytest.raises(ProtocolError) as caught:
        parse_json_object(body)
    assert repr(body[:200]) in str(caught.value)


def test_an_object_is_returned():
    assert Reply(200, {}, b'{"a": [1]}').json_object() == {"a": [1]}
