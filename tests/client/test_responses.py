"""respond and stream_respond: what is sent, how answers are read, and a real server's answers."""

import pytest

from penstock_client import AnswerCutOff, StreamError, function_tool, tool_result
from penstock_client.params import ResponseParams
from penstock_server.protocol.responses_request import ResponsesRequest

from . import samples
from .fake_server import Answer, Events

CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Oslo"}'}
MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]}
THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}


def response(*output, status="completed"):
    usage = {
        "input_tokens": 5, "output_tokens": 2, "total_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3}, "output_tokens_details": {"reasoning_tokens": 1},
    }  # fmt: skip
    return {"id": "resp_1", "model": "tiny", "created_at": 7, "status": status, "output": [*output],
            "usage": usage}  # fmt: skip


def event(kind, **fields):
    return f"event: {kind}\n".encode() + samples.event({"type": kind, **fields})


def test_respond(client, server):
    server.script += [Answer.json(response(THOUGHT, CALL)), Answer.json(response(MESSAGE))]
    weather = function_tool("weather", "The weather", {"type": "object"})
    answer = client.respond("Is it warm?", tools=[weather], reasoning_effort="low", max_output_tokens=9)
    (call,) = answer.tool_calls
    assert (call.id, call.name, call.parsed_arguments()) == ("call_1", "weather", {"city": "Oslo"})
    assert (answer.reasoning, answer.text, answer.usage.cached_tokens) == ("Hm.", "", 3)
    assert answer.usage.reasoning_tokens == 1
    history = [{"role": "user", "content": "Is it warm?"}, *answer.output, tool_result(call, "9 degrees")]
    assert client.respond(history, response_format={"type": "integer"}).text == "Hello"
    first, second = (received.body for received in server.received)
    assert first["tools"] == [{"type": "function", **weather["function"]}] and first["input"] == "Is it warm?"
    assert first["reasoning"] == {"effort": "low"}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "9 degrees"}
    assert second["input"][1:] == [THOUGHT, CALL, result]
    form = {"type": "json_schema", "name": "answer", "schema": {"type": "integer"}, "strict": True}
    assert second["text"] == {"format": form}


def test_a_stream_ends_with_its_last_event(client, server):
    blocks = [
        event("response.created", response=response()),
        event("response.output_text.delta", delta="Hel"),
        event("response.output_text.delta", delta="lo"),
        event("response.completed", response=response(MESSAGE)),
    ]
    server.script += [Events(blocks), Events(blocks[:2], "end")]
    stream = client.stream_respond("Hi")
    chunks = client.drain(stream).chunks
    assert [chunk.text for chunk in chunks] == ["", "Hel", "lo", ""]
    assert client.result(stream).text == stream.text == "Hello"
    assert (stream.finish_reason, stream.usage.total_tokens) == ("completed", 7)
    assert "before its" in str(client.drain(client.stream_respond("Hi")).error)


def test_a_stream_that_fails(client, server):
    failed = {"error": {"code": "server_error", "message": "no disk"}}
    server.script.append(Events([event("response.failed", response=failed)]))
    error = client.drain(client.stream_respond("Hi")).error
    assert isinstance(error, StreamError) and "no disk" in str(error)


def test_json_that_was_cut_off(client, server):
    cut = {"type": "message", "content": [{"type": "output_text", "text": '{"a": '}]}
    server.script.append(Answer.json(response(cut, status="incomplete")))
    with pytest.raises(AnswerCutOff) as caught:
        client.respond("Hi").parse()
    assert caught.value.text == '{"a": '


def test_a_real_server(make_client, live_server):
    client = make_client(live_server.url, model=None)
    asked = {"max_output_tokens": 12, "temperature": 0}
    whole = client.respond("Who are you?", **asked)
    streamed = client.result(client.stream_respond("Who are you?", **asked))
    assert whole.text == streamed.text != "" and whole.usage.completion_tokens == 12
    assert (whole.status, streamed.status) == ("incomplete", "incomplete")


def test_the_server_knows_every_keyword():
    ours = {"extra", "timeout", "response_format", "reasoning_effort"}
    assert ResponseParams.__optional_keys__ - set(ResponsesRequest.model_fields) == ours
