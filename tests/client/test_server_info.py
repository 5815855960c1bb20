import json

import pytest

from penstock_client.errors import ProtocolError
from penstock_client.exchange import Reply
from penstock_client.server_info import (
    Model,
    Tokens,
    only_model,
    parse_health,
    parse_models,
    parse_text_of_tokens,
    parse_tokens,
)

from . import samples


def reply(data: object, status: int = 200) -> Reply:
    return Reply(status, {"x-request-id": "req-1"}, json.dumps(data).encode())


def test_models():
    data = {"data": [{"id": "alias", "root": "tiny", "max_model_len": 9}]}
    assert parse_models(reply(data)) == (Model("alias", max_model_len=9, root="tiny"),)
    models = parse_models(reply(samples.MODELS))
    assert models == (Model("tiny", 7, "penstock"),)
    assert models[0].raw == samples.MODELS["data"][0]
    with pytest.raises(ProtocolError, match="id"):
        parse_models(reply({"data": [{"object": "model"}]}))


def test_only_model():
    assert only_model((Model("a"),)) == "a"
    with pytest.raises(ValueError, match=r"2 models.*model=.*a, b"):
        only_model((Model("a"), Model("b")))
    assert only_model((Model("a", root="r"), Model("b", root="r"))) == "a"
    with pytest.raises(ValueError, match="a, b"):
        only_model((Model("a", root="r"), Model("b", root="s")))
    with pytest.raises(ProtocolError, match="no model"):
        only_model(())


def test_health_of_a_ready_server():
    health = parse_health(reply({"status": "ok", "version": "1"}))
    assert (health.status, health.is_ready, health.progress) == ("ok", True, None)
    assert health.raw == {"status": "ok", "version": "1"}


@pytest.mark.parametrize("body", [b"", b"OK"])
def test_health_without_json(body):
    assert parse_health(Reply(200, {}, body)).status == "ok"
    health = parse_health(Reply(503, {}, body))
    assert (health.status, health.is_ready) == ("unavailable", False)


@pytest.mark.parametrize(
    "data",
    [
        {"status": "loading", "progress": 0.25},
        {"status": "loading", "loaded_layers": 8, "total_layers": 32},
        {"status": "loading", "error": {"loaded_layers": 8, "total_layers": 32}},
    ],
)
def test_health_of_a_server_that_loads(data):
    health = parse_health(reply(data, 503))
    assert (health.status, health.is_ready, health.progress) == ("loading", False, 0.25)


def test_health_with_an_error_object():
    health = parse_health(reply({"error": {"message": "Loading model", "code": 503}}, 503))
    assert (health.status, health.message) == ("unavailable", "Loading model")
    assert health.progress is None


def test_progress_of_nothing_is_unknown():
    assert parse_health(reply({"loaded_layers": 0, "total_layers": 0}, 503)).progress is None
    assert parse_health(reply({"loaded_layers": 0, "total_layers": 4}, 503)).progress == 0.0


def test_tokens():
    data = {"count": 2, "max_model_len": 512, "tokens": [5, 6], "token_strs": ["a", "b"]}
    assert parse_tokens(reply(data)) == Tokens((5, 6), 2, 512, ("a", "b"))
    assert parse_tokens(reply({"tokens": []})) == Tokens((), 0)


@pytest.mark.parametrize("data", [{}, {"tokens": None}, {"tokens": ["a"]}, {"tokens": [{"id": 1}]}])
def test_wrong_tokens(data):
    with pytest.raises(ProtocolError) as caught:
        parse_tokens(reply(data))
    assert caught.value.request_id == "req-1"


def test_text_of_tokens():
    assert parse_text_of_tokens(reply({"prompt": "ab", "content": "xy"})) == "ab"
    assert parse_text_of_tokens(reply({"prompt": ""})) == ""
    assert parse_text_of_tokens(reply({"content": "ab"})) == "ab"
    with pytest.raises(ProtocolError):
        parse_text_of_tokens(reply({}))
