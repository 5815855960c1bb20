import json

import pytest

from penstock_client.chunks import ToolCallDelta
from penstock_client.errors import ProtocolError
from penstock_client.exchange import Reply
from penstock_client.parsing import (
    parse_chat_chunk,
    parse_chat_completion,
    parse_completion,
    parse_completion_chunk,
)
from penstock_client.requests import _messages
from penstock_client.results import PromptLogprob, ToolCall, Usage

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
        {"choices": [{"text": 1, "message": {"tool_calls": [{"id": "a"}]}}]},
        {"choices": [{"text": 1, "message": {"tool_calls": [{"function": {"arguments": "{}"}}]}}]},
        {"choices": [{"text": "", "message": {}, "token_ids": ["a"]}]},
        {"choices": [{"text": "", "message": {}, "prompt_logprobs": [1]}], "prompt_logprobs": [1]},
    ],
)
@pytest.mark.parametrize("parse", [parse_completion, parse_chat_completion])
def test_wrong_shapes_are_protocol_errors_that_name_the_request(parse, data):
    with pytest.raises(ProtocolError) as caught:
        parse(reply(data))
    assert caught.value.request_id == "req-1"


CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}


def test_tool_calls():
    data = samples.chat()
    data["choices"][0]["message"] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    answer = parse_chat_completion(reply(data))
    assert answer.tool_calls == (ToolCall("call_1", "weather", '{"city": "Oslo"}'),)
    assert answer.tool_calls[0].parsed_arguments() == {"city": "Oslo"}
    assert answer.tool_calls[0].raw == CALL


def test_pieces_of_tool_calls():
    first = {"index": 1, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    later = {"index": 1, "function": {"arguments": '{"ci'}}
    chunk = parse_chat_chunk({"choices": [{"delta": {"tool_calls": [first, later]}}]})
    assert chunk.choices[0].delta.tool_calls == (
        ToolCallDelta(1, "call_1", "weather"),
        ToolCallDelta(1, arguments='{"ci'),
    )


def test_what_vllm_adds_where_asked_for():
    choice = {
        "text": "a",
        "stop_reason": "END",
        "token_ids": [5],
        "prompt_token_ids": [1, 2],
        "prompt_logprobs": [None, {"2": {"logprob": -1, "rank": 3, "decoded_token": "x"}}],
    }
    parsed = parse_completion(reply({"choices": [choice]})).choices[0]
    assert (parsed.stop_reason, parsed.token_ids, parsed.prompt_token_ids) == ("END", (5,), (1, 2))
    assert parsed.prompt_logprobs == (None, {2: PromptLogprob(-1.0, 3, "x")})
    logprobs = choice.pop("prompt_logprobs")
    chat = {
        "choices": [{"message": {}, "stop_reason": 7, "token_ids": [5]}],
        "prompt_token_ids": [1, 2],
        "prompt_logprobs": logprobs,
    }
    answer = parse_chat_completion(reply(chat))
    assert (answer.choices[0].stop_reason, answer.choices[0].token_ids) == (7, (5,))
    assert (answer.prompt_token_ids, answer.prompt_logprobs) == ((1, 2), parsed.prompt_logprobs)


@pytest.mark.parametrize("choice", [{}, {"delta": None, "text": None}, {"delta": [], "text": []}])
@pytest.mark.parametrize("parse", [parse_completion_chunk, parse_chat_chunk])
def test_wrong_chunks_are_protocol_errors(parse, choice):
    with pytest.raises(ProtocolError):
        parse({"choices": [choice]})


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_has_either_name(name):
    message = {"role": "assistant", "content": None, name: "Hm."}
    usage = {"completion_tokens": 5, "completion_tokens_details": {"reasoning_tokens": 3}}
    answer = parse_chat_completion(reply({"id": "x", "choices": [{"message": message}], "usage": usage}))
    assert (answer.message.reasoning, answer.text) == ("Hm.", "")
    assert answer.usage.reasoning_tokens == 3
    # The message goes back as a part of the conversation.
    (sent,) = _messages([answer.message])
    assert sent["reasoning_content"] == "Hm."
