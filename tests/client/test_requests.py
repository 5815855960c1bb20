import pytest

from penstock_client.requests import (
    chat_request,
    completion_request,
    detokenize_request,
    tokenize_request,
)
from penstock_client.results import Message, ToolCall
from penstock_client.schemas import tool_result


def test_a_bare_prompt_leaves_all_choices_to_the_server():
    request = completion_request("Once", {})
    assert (request.method, request.path) == ("POST", "/v1/completions")
    assert request.body == {"prompt": "Once", "stream": False}


def test_every_parameter_is_sent_under_its_name():
    params = {
        "model": "tiny",
        "max_tokens": 8,
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 4,
        "use_beam_search": True,
        "best_of": 4,
        "length_penalty": 0.5,
        "early_stopping": "never",
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 0,
        "stop": ["\n", "END"],
        "n": 2,
        "logprobs": 3,
        "echo": True,
        "priority": -1,
        "prompt_logprobs": 0,
        "return_token_ids": True,
    }
    assert completion_request("Once", params).body == {**params, "prompt": "Once", "stream": False}


def test_none_means_not_given():
    body = completion_request("Once", {"seed": None, "temperature": 0.0, "extra": None}).body
    assert body == {"prompt": "Once", "stream": False, "temperature": 0.0}


@pytest.mark.parametrize("prompt", [["a", "b"], [1, 2], [[1], [2, 3]]])
def test_prompts_may_be_several_or_token_ids(prompt):
    assert completion_request(prompt, {}).body["prompt"] == prompt


def test_token_ids_of_logit_bias_become_json_keys():
    body = completion_request("Once", {"logit_bias": {17: -100, "18": 1.5}}).body
    assert body["logit_bias"] == {"17": -100, "18": 1.5}


def test_streams_ask_for_usage_unless_told_otherwise():
    body = completion_request("Once", {}, stream=True).body
    assert body == {"prompt": "Once", "stream": True, "stream_options": {"include_usage": True}}
    options = {"include_usage": False}
    body = completion_request("Once", {"extra": {"stream_options": options}}, stream=True).body
    assert body["stream_options"] == options


def test_extra_is_sent_as_it_is():
    body = completion_request("Once", {"extra": {"min_tokens": 3, "user": None}}).body
    assert body == {"prompt": "Once", "stream": False, "min_tokens": 3, "user": None}


@pytest.mark.parametrize("field", ["prompt", "stream", "seed"])
def test_extra_may_not_repeat_a_field(field):
    with pytest.raises(ValueError, match=field):
        completion_request("Once", {"seed": 1, "extra": {field: 2}})


def test_schemas_are_sent_as_the_server_reads_them():
    body = chat_request("Hi", {"response_format": {"type": "integer"}}).body
    assert body["response_format"]["json_schema"]["schema"] == {"type": "integer"}
    body = completion_request("Once", {"structured_outputs": {"regex": "a+"}}).body
    assert body["structured_outputs"] == {"regex": "a+"}


def test_a_timeout_is_not_sent():
    request = completion_request("Once", {"timeout": 5})
    assert (request.timeout_s, "timeout" in request.body) == (5.0, False)
    assert completion_request("Once", {}).timeout_s is None


@pytest.mark.parametrize("timeout", [0, -1.0, "5", float("nan")])
def test_wrong_timeouts_are_refused(timeout):
    with pytest.raises(ValueError, match="timeout"):
        completion_request("Once", {"timeout": timeout})


def test_tokenize():
    assert tokenize_request("Hi", {}).body == {"prompt": "Hi"}
    messages = [{"role": "user", "content": "Hi"}]
    body = tokenize_request(messages, {"add_generation_prompt": False}).body
    assert body == {"messages": messages, "add_generation_prompt": False}
    with pytest.raises(TypeError, match=r"^tokenize\(\) got an unexpected"):
        tokenize_request("Hi", {"max_tokens": 1})
    request = detokenize_request((1, 2), None)
    assert (request.path, request.body) == ("/detokenize", {"tokens": [1, 2]})


def test_extra_must_be_a_mapping():
    with pytest.raises(TypeError, match="extra"):
        completion_request("Once", {"extra": ["min_tokens"]})


@pytest.mark.parametrize(
    ("build", "stream", "method"),
    [
        (completion_request, False, "complete"),
        (completion_request, True, "stream_complete"),
        (chat_request, False, "chat"),
        (chat_request, True, "stream_chat"),
    ],
)
def test_unknown_keyword_is_a_type_error_that_names_the_method(build, stream, method):
    with pytest.raises(TypeError, match=rf"^{method}\(\) got an unexpected .* 'temprature'"):
        build("Once", {"temprature": 1.0}, stream=stream)


def test_chats_and_completions_have_their_own_keywords():
    with pytest.raises(TypeError, match="echo"):
        chat_request("Hi", {"echo": True})
    with pytest.raises(TypeError, match="top_logprobs"):
        completion_request("Once", {"top_logprobs": 1})


def test_a_string_is_what_the_user_says():
    request = chat_request("Hi", {"logprobs": True, "top_logprobs": 2}, stream=True)
    assert (request.method, request.path) == ("POST", "/v1/chat/completions")
    assert request.body == {
        "messages": [{"role": "user", "content": "Hi"}],
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_an_answer_can_be_part_of_the_next_conversation():
    answer = Message("assistant", "Hello", raw={"role": "assistant", "tool_calls": []})
    body = chat_request([{"role": "user", "content": "Hi"}, answer], {}).body
    assert body["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello", "tool_calls": []},
    ]


def test_calls_and_their_results_can_be_part_of_the_next_conversation():
    call = ToolCall("call_1", "weather", "{}")
    messages = [Message("assistant", None, (call,)), tool_result(call, "sunny")]
    function = {"name": "weather", "arguments": "{}"}
    assert chat_request(messages, {}).body["messages"] == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]


@pytest.mark.parametrize("messages", [{"role": "user", "content": "Hi"}, ["Hi"], [None]])
def test_what_is_no_message_is_refused(messages):
    with pytest.raises(TypeError, match="list of messages"):
        chat_request(messages, {})
