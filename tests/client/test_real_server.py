"""Both clients and a real server on the demo model: what a script of answers can't show."""

import re
import time
import urllib.request
import uuid

import pydantic
import pytest

from penstock_client import BadRequest, ContextOverflow, NotFound, function_tool

from .fake_server import PATIENCE_S

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
WEATHER = function_tool("weather", "The weather in a city", CITY)


@pytest.fixture
def client(make_client, live_server):
    return make_client(live_server.url, model=None)


def metric(url: str, pattern: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        return float(re.search(rf"^{pattern}.* (\S+)$", answer.read().decode(), re.MULTILINE)[1])


@pytest.mark.parametrize("method", ["stream_complete", "stream_chat"])
def test_leaving_early_frees_the_sequence(client, live_server, method):
    aborted = r'vllm:request_success_total.*finished_reason="abort"'
    deadline = time.monotonic() + PATIENCE_S
    while metric(live_server.url, "vllm:num_requests_running"):  # of another test that left early
        assert time.monotonic() < deadline
    num_aborted = metric(live_server.url, aborted)
    client.peek(getattr(client, method)("Once", max_tokens=400, ignore_eos=True), 1)
    while metric(live_server.url, aborted) == num_aborted:
        assert time.monotonic() < deadline
    assert metric(live_server.url, aborted) == num_aborted + 1
    while metric(live_server.url, "vllm:num_requests_running"):  # the engine learns of it between layers
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0, "max_tokens": 20},
        {"n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 8},
        {"logprobs": 2, "max_tokens": 6, "seed": 1},
        {"stop": ["e"], "max_tokens": 40, "seed": 2},
    ],
)
def test_a_streamed_completion_is_the_same(client, params):
    plain = client.complete("Once upon a time", **params)
    streamed = client.result(client.stream_complete("Once upon a time", **params))
    assert streamed.choices == plain.choices
    assert streamed.usage.completion_tokens == plain.usage.completion_tokens
    assert len(plain.choices) == params.get("n", 1)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0, "max_tokens": 20},
        {"logprobs": True, "top_logprobs": 2, "n": 2, "seed": 3, "max_tokens": 8},
    ],
)
def test_a_streamed_chat_is_the_same(client, params):
    plain = client.chat("Who are you?", **params)
    assert client.result(client.stream_chat("Who are you?", **params)).choices == plain.choices
    assert (plain.choices[0].logprobs is not None) == params.get("logprobs", False)


def test_streamed_tool_calls_are_the_same(client):
    params = {"tools": [WEATHER], "tool_choice": "required", "temperature": 0, "max_tokens": 60}
    plain = client.chat("Is it warm in Oslo?", parallel_tool_calls=False, **params)
    stream = client.stream_chat("Is it warm in Oslo?", parallel_tool_calls=False, **params)
    streamed = client.result(stream)
    assert plain.finish_reason == streamed.finish_reason == "tool_calls"
    (ours,), (theirs,) = streamed.tool_calls, plain.tool_calls
    assert (ours.name, ours.arguments) == (theirs.name, theirs.arguments)
    assert ours.name == "weather" and ours.parsed_arguments()["city"] in ("Oslo", "Rome")
    assert stream.tool_calls == streamed.tool_calls


def test_a_pydantic_model_is_a_response_format(client):
    class Pet(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=10)
        age: int = pydantic.Field(ge=0, le=30)

    answer = client.chat("Who is Rex?", response_format=Pet, max_tokens=100)
    assert isinstance(answer.parse(Pet), Pet)
    answer = client.complete("It is", structured_outputs={"choice": ["hot", "cold"]})
    assert answer.text in ("hot", "cold")
    wrapped = client.complete("It is", structured_outputs={"json": Pet}, max_tokens=100)
    assert isinstance(wrapped.parse(Pet), Pet)


def test_errors(client, live_server):
    with pytest.raises(ContextOverflow):
        client.complete("word " * 2000, max_tokens=5)
    with pytest.raises(NotFound):
        client.complete("hello", model="nobody")
    with pytest.raises(BadRequest) as caught:
        client.complete("hello", temperature=-1.0)
    assert caught.value.param == "temperature"
    assert caught.value.request_id is not None
    assert client.sleeps == []


def test_extra_fields_reach_the_server(client):
    with pytest.raises(BadRequest, match="no_such_field"):
        client.complete("hello", extra={"no_such_field": 1})
    assert client.complete("hello", max_tokens=3, extra={"user": "me"}).text


def test_tokens(client):
    text = "Once upon a time"
    tokens = client.tokenize(text, return_token_strs=True)
    assert tokens.count == len(tokens.token_ids) == len(tokens.token_strs)
    assert tokens.count == client.complete(text, max_tokens=1).usage.prompt_tokens
    assert tokens.max_model_len == 512
    bare = client.tokenize(text, add_special_tokens=False)
    assert client.detokenize(bare.token_ids) == text
    chat = client.tokenize([{"role": "user", "content": text}])
    assert chat.count == client.chat(text, max_tokens=1).usage.prompt_tokens


def test_log_probabilities_of_a_prompt(client):
    params = {"prompt_logprobs": 1, "return_token_ids": True, "max_tokens": 1, "temperature": 0}
    (choice,) = client.complete("Once upon a time", **params).choices
    assert choice.prompt_token_ids == client.tokenize("Once upon a time").token_ids
    assert choice.prompt_logprobs[0] is None
    assert all(
        token_id in position
        for token_id, position in zip(choice.prompt_token_ids[1:], choice.prompt_logprobs[1:], strict=True)
    )
    (result,) = client.collect(client.batch(["Once upon a time"], **params))
    assert result.unwrap().choices == (choice,)


def test_log_probabilities_of_a_chat(client):
    params = {"prompt_logprobs": 0, "return_token_ids": True, "max_tokens": 2, "temperature": 0}
    answer = client.chat("Who are you?", **params)
    assert len(answer.prompt_logprobs) == len(answer.prompt_token_ids) == answer.usage.prompt_tokens
    del params["prompt_logprobs"]
    streamed = client.result(client.stream_chat("Who are you?", **params))
    assert streamed.prompt_token_ids == answer.prompt_token_ids
    assert streamed.choices == answer.choices
    assert len(answer.choices[0].token_ids) == 2


def test_echo_with_log_probabilities(client):
    params = {"echo": True, "logprobs": 1, "max_tokens": 2, "temperature": 0}
    plain = client.complete("Once upon", **params)
    assert plain.text.startswith("Once upon")
    assert plain.choices[0].logprobs[0].logprob is None
    assert client.result(client.stream_complete("Once upon", **params)).choices == plain.choices


def test_a_beam_search(client):
    """Its answers are the best of what greedy decoding and narrower searches find."""
    params = {"max_tokens": 8, "ignore_eos": True, "logprobs": 0}
    search = {"use_beam_search": True, "best_of": 6, "n": 3}
    found = client.complete("Once upon", **params, **search)
    totals = [sum(token.logprob for token in choice.logprobs) for choice in found.choices]
    greedy = client.complete("Once upon", temperature=0, **params)
    assert len({choice.text for choice in found.choices}) == 3 and totals == sorted(totals, reverse=True)
    assert totals[0] >= sum(token.logprob for token in greedy.choices[0].logprobs)
    assert found.usage.completion_tokens == 24
    assert client.result(client.stream_complete("Once upon", **params, **search)).choices == found.choices


def test_cached_tokens(client):
    prompt = "The same beginning, long enough to fill a block or two, and then some more of it. " * 3
    mine, other = uuid.uuid4().hex, uuid.uuid4().hex
    client.complete(prompt, max_tokens=1, cache_salt=mine)
    assert client.complete(prompt, max_tokens=1, cache_salt=mine).usage.cached_tokens > 0
    assert client.complete(prompt, max_tokens=1, cache_salt=other).usage.cached_tokens == 0


#: Keywords that no other test here sends, each with a value that any server takes.
COMMON = {
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.0,
    "repetition_penalty": 1.1,
    "no_repeat_ngram_size": 0,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {17: 1.0},
    "stop_token_ids": [0],
    "include_stop_str_in_output": False,
    "min_tokens": 1,
    "allowed_token_ids": [17, 18],
    "bad_words": ["x"],
    "skip_special_tokens": True,
    "priority": -1,
    "truncate_prompt_tokens": -1,
    "return_tokens_as_token_ids": True,
    "request_id": "mine",
    "user": "me",
}
CHAT = {
    "max_completion_tokens": 2,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "chat_template_kwargs": {"x": 1},
    "reasoning_effort": "low",
}


def test_the_server_takes_every_keyword(client):
    assert client.complete("Once", **COMMON, add_special_tokens=True, max_tokens=2).finish_reason
    answer = client.chat("Hi", **COMMON, **CHAT)
    assert answer.finish_reason and "mine" in answer.id
