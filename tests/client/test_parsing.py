import json

import pytest

from penstock_client.errors import ProtocolError
from penstock_client.exchange import Reply
from penstock_client.parsing import (
    only_model,
    parse_chat_chunk,
    parse_chat_completion,
    parse_completion,
    parse_completion_chunk,
    parse_health,
    parse_models,
)
from penstock_client.results import Model, TokenLogprob, Usage

from . import samples


def reply(data: object, status: int = 200) -> Reply:
    return Reply(status, {"x-request-id": "req-1"}, json.dumps(data).encode())


def test_completion():
    answer = parse_completion(reply(samples.completion("Hello")))
    assert (answer.id, answer.model, answer.created) == ("cmpl-1", "tiny", 1700000000)
    assert (answer.text, answer.finish_reason) == ("Hello", "length")
    assert answer.usage == Usage(5, 2, 7, cached_tokens=3)
    assert answer.request_id == "req-1"
    assert answer.choices[0].logprobs is None
    assert answer.raw == samples.completion("Hello")
    assert answer.choices[0].raw == samples.completion("Hello")["choices"][0]


def test_chat_completion():
    answer = parse_chat_completion(reply(samples.chat("Hello")))
    assert (answer.id, answer.model, answer.created) == ("chatcmpl-1", "tiny", 1700000000)
    assert (answer.text, answer.finish_reason) == ("Hello", "stop")
    assert (answer.message.role, answer.message.raw["refusal"]) == ("assistant", None)
    assert answer.usage == Usage(5, 2, 7, cached_tokens=3)
    assert answer.request_id == "req-1"
    assert answer.raw == samples.chat("Hello")


def test_chunks():
    data = {"id": "x", "model": "tiny", "choices": [{"index": 1, "text": "a"}], "usage": None}
    chunk = parse_completion_chunk(data)
    assert (chunk.id, chunk.model, chunk.usage, chunk.raw) == ("x", "tiny", None, data)
    assert (chunk.choices[0].index, chunk.choices[0].text) == (1, "a")
    delta = {"role": "assistant", "content": "a", "tool_calls": []}
    data = {"choices": [{"index": 1, "delta": delta, "finish_reason": "stop"}]}
    choice = parse_chat_chunk(data).choices[0]
    assert (choice.index, choice.text, choice.finish_reason) == (1, "a", "stop")
    assert (choice.delta.role, choice.delta.raw) == ("assistant", delta)


def test_usage_chunk_has_no_choices():
    data = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}}
    for parse in (parse_completion_chunk, parse_chat_chunk):
        chunk = parse(data)
        assert chunk.choices == ()
        assert chunk.usage == Usage(4, 3, 7)


def test_what_servers_leave_out():
    answer = parse_completion(reply({"choices": [{"text": ""}]}))
    assert (answer.id, answer.model, answer.created, answer.usage) == ("", "", 0, None)
    assert (answer.choices[0].index, answer.finish_reason) == (0, None)
    answer = parse_chat_completion(reply({"choices": [{"message": {"content": None}}]}))
    assert (answer.text, answer.message.content, answer.message.role) == ("", None, "assistant")


def test_logprobs_of_a_completion():
    data = samples.completion()
    data["choices"][0]["logprobs"] = {
        "tokens": ["He", "llo"],
        "token_logprobs": [None, -1],
        "top_logprobs": [None, {"llo": -1.0, "y": -2.5}],
        "text_offset": [0, 2],
    }
    assert parse_completion(reply(data)).choices[0].logprobs == (
        TokenLogprob("He", None),
        TokenLogprob("llo", -1.0, (TokenLogprob("llo", -1.0), TokenLogprob("y", -2.5))),
    )


def test_logprobs_of_a_completion_without_rivals():
    data = samples.completion()
    data["choices"][0]["logprobs"] = {
        "tokens": ["He"],
        "token_logprobs": [-0.5],
        "top_logprobs": None,
    }
    assert parse_completion(reply(data)).choices[0].logprobs == (TokenLogprob("He", -0.5),)


def test_logprobs_of_a_chat():
    rival = {"token": "y", "logprob": -2, "bytes": [121]}
    entry = {"token": "He", "logprob": -0.5, "bytes": [72, 101], "top_logprobs": [rival]}
    expected = (TokenLogprob("He", -0.5, (TokenLogprob("y", -2.0),)),)
    data = samples.chat()
    data["choices"][0]["logprobs"] = {"content": [entry], "refusal": None}
    assert parse_chat_completion(reply(data)).choices[0].logprobs == expected
    chunk = {"choices": [{"delta": {}, "logprobs": {"content": [entry]}}]}
    assert parse_chat_chunk(chunk).choices[0].logprobs == expected


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"choices": []},
        {"choices": None},
        {"choices": {}},
        {"choices": ["Hello"]},
        {"choices": [{"index": 0}]},
        {"choices": [{"text": 1, "message": 1}]},
        {"choices": [{"text": None, "message": None}]},
        {"choices": [{"text": "", "message": {"content": ["a"]}, "index": "0"}]},
        {"choices": [{"text": "", "message": {}, "finish_reason": 1}]},
        {"choices": [{"text": "", "message": {}}], "usage": 7},
        {"choices": [{"text": "", "message": {}}], "usage": {"prompt_tokens": "7"}},
        {"choices": [{"text": "", "message": {}}], "id": 7},
        {"choices": [{"text": "", "message": {}, "logprobs": {"tokens": ["a"], "content": [1]}}]},
        {"choices": [{"text": "", "message": {}, "logprobs": [1]}]},
    ],
)
@pytest.mark.parametrize("parse", [parse_completion, parse_chat_completion])
def test_wrong_shapes_are_protocol_errors_that_name_the_request(parse, data):
    with pytest.raises(ProtocolError) as caught:
        parse(reply(data))
    assert caught.value.request_id == "req-1"


@pytest.mark.parametrize("top", [["a"], {"a": "b"}])
def test_wrong_rivals_are_protocol_errors(top):
    logprobs = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [top]}
    with pytest.raises(ProtocolError):
        parse_completion(reply({"choices": [{"text": "a", "logprobs": logprobs}]}))


@pytest.mark.parametrize("choice", [{}, {"delta": None, "text": None}, {"delta": [], "text": []}])
@pytest.mark.parametrize("parse", [parse_completion_chunk, parse_chat_chunk])
def test_wrong_chunks_are_protocol_errors(parse, choice):
    with pytest.raises(ProtocolError):
        parse({"choices": [choice]})


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
