"""The OpenAI routes, from the request's bytes to the answer's."""

from __future__ import annotations

import asyncio
import base64
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save
from starlette.testclient import TestClient
from torch import Tensor

from fakes import FakeAsyncEngine, FakeModel, FakeStream, Script
from penstock.async_engine import EngineStatus
from penstock.errors import EngineDead, QueueFull, TooFewAnswers
from penstock.generation.beam_search import BeamParams
from penstock.generation.requests.generation_request import SamplingParams, ValidRequest
from penstock_server.answers.formats import ChatFormat
from penstock_server.answers.responses_format import ResponsesFormat
from penstock_server.tools import schemas, templates

from ..conftest import MakeClient, sse_events

MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/chat/completions", json={"messages": MESSAGES} | fields)


def complete(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/completions", json={"prompt": "Hi"} | fields)


def test_a_path_is_a_name_that_no_list_shows(make_client: MakeClient, engine: FakeAsyncEngine) -> None:
    client = make_client(engine, model="/models/tiny")
    for name in ("tiny", "/models/tiny"):
        assert complete(client, model=name).json()["model"] == "tiny"
    assert "/models/" not in client.get("/v1/models").text


@pytest.mark.parametrize("send", [chat, complete])
def test_another_model_is_not_found(client: TestClient, send: Any) -> None:
    answer = send(client, model="gpt-4")
    assert answer.status_code == 404
    detail = answer.json()["error"]
    assert (detail["code"], detail["param"]) == ("model_not_found", "model")
    assert "gpt-4" in detail["message"] and "tiny" in detail["message"]


@pytest.mark.parametrize("send", [chat, complete])
def test_while_loading_clients_are_told_to_come_back(make_client: MakeClient, send: Any) -> None:
    engine = FakeAsyncEngine()
    engine.status = EngineStatus("loading", 3, 12)
    answer = send(make_client(engine))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    detail = answer.json()["error"]
    assert detail["code"] == "model_loading" and "3 of 12 layers" in detail["message"]


@pytest.mark.parametrize("send", [chat, complete])
def test_a_dead_engine_answers_errors(make_client: MakeClient, send: Any) -> None:
    engine = FakeAsyncEngine()
    engine.status = EngineStatus("dead", 4, 4, "out of luck")
    answer = send(make_client(engine))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")


def test_chat(client: TestClient, engine: FakeAsyncEngine) -> None:
    answer = chat(client, model="tiny").json()
    assert answer["model"] == "tiny"
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Hello!",
        "refusal": None,
    }
    (stream,) = engine.streams
    assert bytes(stream.prompt).decode() == "user: Hi\nassistant:"
    assert stream.params.max_tokens is None


def test_chat_max_completion_tokens_wins(client: TestClient, engine: FakeAsyncEngine) -> None:
    chat(client, max_tokens=3)
    chat(client, max_tokens=3, max_completion_tokens=4)
    assert [stream.params.max_tokens for stream in engine.streams] == [3, 4]
    choice = chat(client, max_tokens=2).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("He", "length")


def test_completion_defaults_to_16_tokens(client: TestClient, engine: FakeAsyncEngine) -> None:
    assert complete(client).json()["choices"][0]["text"] == "Hello!"
    complete(client, max_tokens=100)
    complete(client, prompt="x" * 990)
    assert [stream.params.max_tokens for stream in engine.streams] == [16, 100, 10]


def test_context_overflow(client: TestClient) -> None:
    for answer in (complete(client, prompt="x" * 1000), complete(client, max_tokens=1000)):
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert answer.json()["error"]["n_ctx"] == 1000
    assert answer.json()["error"]["n_prompt_tokens"] == 2


def test_an_overflow_is_told_before_a_stream_begins(client: TestClient) -> None:
    answer = complete(client, prompt="x" * 1000, stream=True)
    assert answer.status_code == 400 and answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("send", [chat, complete])
@pytest.mark.parametrize("streams", [False, True])
def test_a_full_queue_is_told_and_takes_all_of_a_request_or_nothing(
    make_client: MakeClient, send: Any, streams: bool
) -> None:
    class Full(FakeAsyncEngine):
        def submit(self, request: ValidRequest) -> FakeStream:
            if len(self.streams) == 2:
                raise QueueFull("2 requests wait", 17)
            return super().submit(request)

    engine = Full()
    answer = send(make_client(engine), n=3, stream=streams)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "17")
    detail = answer.json()["error"]
    assert (detail["type"], detail["code"], detail["param"]) == ("server_error", "overloaded", None)
    assert "2 requests wait" in detail["message"]
    assert [stream.is_aborted for stream in engine.streams] == [True, True]


@pytest.mark.parametrize("send", [chat, complete])
def test_more_answers_than_the_queue_could_ever_take(make_client: MakeClient, send: Any) -> None:
    engine = FakeAsyncEngine()
    engine.max_requests = 3
    client = make_client(engine)
    assert send(client, n=3).status_code == 200
    refused = send(client, n=4)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")


def test_several_prompts_and_choices(make_client: MakeClient) -> None:
    engine = FakeAsyncEngine(lambda prompt, params: [f"{bytes(prompt).decode()}/{params.seed}"])
    answer = complete(make_client(engine), prompt=["a", "b"], n=2, seed=5, echo=True).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["aa/5", "aa/6", "bb/5", "bb/6"]
    assert answer["usage"]["prompt_tokens"] == 2


def test_too_many_answers(client: TestClient) -> None:
    answer = complete(client, prompt=["a"] * 1024, n=2)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


def test_token_ids_as_prompt(client: TestClient, engine: FakeAsyncEngine) -> None:
    complete(client, prompt=[72, 105])
    assert engine.streams[0].prompt == [72, 105]
    for unfit in ([70000], "", ["Hi", ""]):
        answer = complete(client, prompt=unfit, echo=True)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    unfit = complete(client, logit_bias={"70000": 1})
    assert (unfit.status_code, unfit.json()["error"]["param"]) == (400, "logit_bias")


def test_models_defaults_hold_where_the_request_is_silent(make_client: MakeClient) -> None:
    engine = FakeAsyncEngine()
    engine.model.default_sampling = {"temperature": 0.6}
    client = make_client(engine)
    chat(client)
    chat(client, temperature=0)
    assert [stream.params.temperature for stream in engine.streams] == [0.6, 0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
        ({"functions": [{"name": "x"}]}, "functions"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"made_up": 1}, "made_up"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"top_logprobs": 1}, "top_logprobs"),
    ],
)
def test_wrong_fields_are_named(client: TestClient, fields: dict[str, Any], param: str) -> None:
    answer = chat(client, **fields)
    assert answer.status_code == 400
    detail = answer.json()["error"]
    assert detail["param"] == param, detail
    assert detail["type"] == "invalid_request_error" and param in detail["message"]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        '"x"',
        "null",
        '{"prompt": "x", "temperature": NaN}',
        '{"prompt": "\\ud800"}',
        '{"\\ud800": 1}',
        "[" * 100_000,
        '{"prompt": "x", "seed": ' + "9" * 5000 + "}",
        b"\xff\xfe",
    ],
)
def test_bodies_that_are_no_request(client: TestClient, body: Any) -> None:
    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_other_content_types(client: TestClient, kind: str | None) -> None:
    headers = {"Content-Type": kind} if kind else {}
    answer = client.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "unsupported_media_type"
    ours = {"Content-Type": "application/json; charset=utf-8"}
    assert client.post("/v1/completions", content=b'{"prompt": "x"}', headers=ours).status_code == 200


@pytest.mark.inner
def test_chat_stream(client: TestClient) -> None:
    answer = chat(client, stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = sse_events(answer.text)
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == "Hello!"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 7


def test_completion_stream_of_several_choices(client: TestClient) -> None:
    *chunks, done = sse_events(complete(client, stream=True, n=2, prompt=["a", "b"]).text)
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == dict.fromkeys(range(4), "Hello!") and done == "[DONE]"


def failing(prompt: list[int], params: SamplingParams) -> Script:
    return ["Hel", EngineDead("secret")]


def test_an_error_in_a_stream_is_an_event(make_client: MakeClient) -> None:
    answer = complete(make_client(FakeAsyncEngine(failing)), stream=True)
    assert answer.status_code == 200
    first, error, done = sse_events(answer.text)
    assert first["choices"][0]["text"] == "Hel" and done == "[DONE]"
    assert error["error"]["code"] == "engine_dead" and "secret" not in answer.text


def test_an_error_in_a_whole_answer_is_a_status(make_client: MakeClient) -> None:
    engine = FakeAsyncEngine(failing)
    answer = complete(make_client(engine), n=2)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
    assert all(stream.is_aborted for stream in engine.streams)


def test_silence_in_a_stream_is_filled_with_comments(make_client: MakeClient) -> None:
    gate = asyncio.Event()
    client = make_client(FakeAsyncEngine(lambda *_: ["a", gate, "b"]), sse_keep_alive=0.001)
    assert client.portal is not None
    with client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        body = ""
        for text in answer.iter_text():
            body += text
            if ": keep-alive\n\n" in body:
                client.portal.call(gate.set)
    assert body.index(": keep-alive") < body.index("[DONE]")


def test_logprobs_in_both_shapes(client: TestClient) -> None:
    content = chat(client, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == "Hello!"
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 6
    logprobs = complete(client, logprobs=0).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list("Hello!") and logprobs["text_offset"] == list(range(6))
    assert logprobs["top_logprobs"][0] == {"H": -0.25}


def test_a_model_without_chat_template_says_what_to_do(make_client: MakeClient) -> None:
    client = make_client(FakeAsyncEngine(model=FakeModel(has_chat_template=False)))
    answer = chat(client)
    assert answer.status_code == 400
    assert "chat template" in answer.json()["error"]["message"]


def test_stop_reason_is_told(client: TestClient) -> None:
    choice = complete(client, stop_token_ids=[7]).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 7)


def test_echo_with_logprobs_tells_the_prompts_as_well(client: TestClient, engine: FakeAsyncEngine) -> None:
    choice = complete(client, echo=True, logprobs=1).json()["choices"][0]
    assert choice["text"] == "HiHello!"
    assert choice["logprobs"]["tokens"] == list("HiHello!")
    assert choice["logprobs"]["text_offset"] == list(range(8))
    assert choice["logprobs"]["token_logprobs"] == [None, -0.75] + [-0.25] * 6
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {"i": -0.75, "z": -0.5}]
    assert "prompt_logprobs" not in choice or choice["prompt_logprobs"] is None
    first, *rest, _ = sse_events(complete(client, echo=True, logprobs=1, stream=True).text)
    assert first["choices"][0]["logprobs"]["tokens"] == list("HiHel")
    assert rest[0]["choices"][0]["logprobs"]["text_offset"] == [5, 6]
    assert [stream.params.prompt_logprobs for stream in engine.streams] == [1, 1]


@pytest.mark.parametrize("is_stream", [False, True])
def test_each_choice_tells_the_prompt_though_one_scores_it(
    client: TestClient, engine: FakeAsyncEngine, is_stream: bool
) -> None:
    answer = complete(client, echo=True, logprobs=1, n=2, stream=is_stream)
    chunks = sse_events(answer.text)[:-1] if is_stream else [answer.json()]
    told: dict[int, list[float | None]] = {}
    for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
        told.setdefault(choice["index"], choice["logprobs"]["token_logprobs"])
    assert [scores[:3] for scores in told.values()] == [[None, -0.75, -0.25]] * 2
    assert [stream.params.prompt_logprobs for stream in engine.streams] == [1, None]


def test_choices_share_one_grammar(client: TestClient, engine: FakeAsyncEngine) -> None:
    """The very object: what is compiled of it is compiled once."""
    complete(client, n=3, seed=1, structured_outputs={"regex": "a+"})
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    chat(client, n=3, seed=1, tools=[tool], tool_choice="required")
    for streams in (engine.streams[:3], engine.streams[3:]):
        first = streams[0].params.grammar
        assert first is not None and len(streams) == 3
        assert all(stream.params.grammar is first for stream in streams)


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_what_takes_long_is_not_done_on_the_event_loop(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Reading tools, compiling what they demand, and writing a whole answer."""
    threads: dict[str, str] = {}

    def note(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def noted(*arguments: Any) -> Any:
            threads[name] = threading.current_thread().name
            return function(*arguments)

        monkeypatch.setattr(owner, name, noted)

    for owner, name in (
        (templates, "detect_style"),
        (schemas, "calls_grammar"),
        (ChatFormat, "whole"),
        (ResponsesFormat, "whole"),
    ):
        note(owner, name)
    function = {"name": "f", "parameters": {"type": "object"}}
    tool = {"type": "function"} | ({"function": function} if path[0] == "c" else function)
    body = {"messages": [{"role": "user", "content": "Hi"}]} if path[0] == "c" else {"input": "Hi"}
    answer = client.post(f"/v1/{path}", json=body | {"tools": [tool], "tool_choice": "required"})
    assert answer.status_code == 200
    assert threads["detect_style"].startswith("text") and threads["calls_grammar"].startswith("text")
    assert threads["whole"].startswith("asyncio")  # a thread of its pool


def test_scoring(client: TestClient, engine: FakeAsyncEngine) -> None:
    answer = complete(client, prompt=["ab", "c"], echo=True, logprobs=0, max_tokens=0).json()
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "c"]
    assert [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]] == [[None, -0.75], [None]]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 0)
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert [stream.params.max_tokens for stream in engine.streams] == [0, 0]


def test_prompt_logprobs_have_vllms_shape(client: TestClient) -> None:
    entry = {
        "105": {"logprob": -0.75, "rank": 9, "decoded_token": "i"},
        "122": {"logprob": -0.5, "rank": 1, "decoded_token": "z"},
    }
    answer = complete(client, prompt_logprobs=1, max_tokens=0).json()
    assert answer["choices"][0]["prompt_logprobs"] == [None, entry]
    told = chat(client, prompt_logprobs=0).json()["prompt_logprobs"]
    assert len(told) == len("user: Hi\nassistant:") and told[0] is None
    # The larger of two wishes is computed, each is told what it wished.
    both = complete(client, prompt_logprobs=0, echo=True, logprobs=2).json()["choices"][0]
    assert list(both["prompt_logprobs"][1]) == ["105"]
    assert len(both["logprobs"]["top_logprobs"][1]) == 3


def test_token_ids_of_prompts_and_answers(client: TestClient) -> None:
    hello = [*b"Hello!", 256]
    one, two = complete(client, prompt=["a", "b"], return_token_ids=True).json()["choices"]
    assert (one["prompt_token_ids"], two["prompt_token_ids"]) == ([97], [98])
    assert one["token_ids"] == two["token_ids"] == hello
    answer = chat(client, return_token_ids=True).json()
    assert answer["choices"][0]["token_ids"] == hello
    assert bytes(answer["prompt_token_ids"]) == b"user: Hi\nassistant:"
    assert chat(client).json()["prompt_token_ids"] is None


def test_token_ids_in_a_stream(client: TestClient) -> None:
    *chunks, _ = sse_events(complete(client, return_token_ids=True, stream=True).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice.get("prompt_token_ids") for choice in choices] == [[72, 105], None, None, None]
    assert sum((choice["token_ids"] for choice in choices), []) == [*b"Hello!", 256]
    role, *chunks, _ = sse_events(chat(client, return_token_ids=True, stream=True).text)
    assert bytes(role["prompt_token_ids"]) == b"user: Hi\nassistant:"
    assert sum((chunk["choices"][0]["token_ids"] for chunk in chunks), []) == [*b"Hello!", 256]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("send", "logprobs"), [(chat, True), (complete, 1)])
def test_each_token_id_has_its_logprob(client: TestClient, send: Any, logprobs: Any, stream: bool) -> None:
    """The end token's as well, though it is not told of without ids."""

    def told(**fields: Any) -> tuple[list[int], list[str]]:
        fields |= {"logprobs": logprobs, "return_tokens_as_token_ids": True, "stream": stream}
        answer = send(client, **fields)
        parts = sse_events(answer.text)[:-1] if stream else [answer.json()]
        choices = [part["choices"][0] for part in parts]
        ids = [each for choice in choices for each in choice.get("token_ids") or []]
        found = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
        if send is complete:
            return ids, [name for each in found for name in each["tokens"]]
        return ids, [token["token"] for each in found for token in each["content"]]

    ids, names = told(return_token_ids=True)
    assert ids == [*b"Hello!", 256] and names == [f"token_id:{each}" for each in ids]
    assert told()[1] == names[:-1]


def test_tokens_as_token_ids(client: TestClient) -> None:
    fields = {"return_tokens_as_token_ids": True}
    logprobs = complete(client, logprobs=1, **fields).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][0] == "token_id:72" and "token_id:122" in logprobs["top_logprobs"][0]
    content = chat(client, logprobs=True, **fields).json()["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == "token_id:72"


@pytest.mark.parametrize("send", [chat, complete])
def test_usage_with_every_chunk(client: TestClient, send: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = sse_events(send(client, stream=True, stream_options=options).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"] == 7
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}
    if send is chat:
        assert counts[0] == 0 < counts[1]  # the chunk that only names the role


def test_tokens_as_token_ids_for_all(make_client: MakeClient, engine: FakeAsyncEngine) -> None:
    client = make_client(engine, return_tokens_as_token_ids=True)
    assert complete(client, logprobs=1).json()["choices"][0]["logprobs"]["tokens"][0] == "token_id:72"
    plain = complete(client, logprobs=1, return_tokens_as_token_ids=False).json()
    assert plain["choices"][0]["logprobs"]["tokens"][0] == "H"
    fields = {"input": "Hi", "include": ["message.output_text.logprobs"]}
    response = client.post("/v1/responses", json=fields).json()
    assert response["output"][0]["content"][0]["logprobs"][0]["token"] == "token_id:72"


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
@pytest.mark.parametrize("send", [chat, complete])
def test_usage_for_all(make_client: MakeClient, engine: FakeAsyncEngine, send: Any, options: Any) -> None:
    client = make_client(engine, enable_force_include_usage=True)
    *chunks, last, _ = sse_events(send(client, stream=True, **options).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert last["choices"] == [] and counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize("send", [chat, complete])
def test_a_request_may_name_itself(client: TestClient, send: Any) -> None:
    answer = send(client, request_id="mine:7")
    assert answer.json()["id"].endswith("-mine:7")


@pytest.mark.parametrize("send", [chat, complete])
def test_words_and_tokens_arrive_at_the_engine(
    client: TestClient, engine: FakeAsyncEngine, send: Any
) -> None:
    send(client, bad_words=["no"], allowed_token_ids=[72, 101], no_repeat_ngram_size=2)
    (stream,) = engine.streams
    assert stream.params.bad_words == (tuple(b"no"), tuple(b" no"))
    assert stream.params.allowed_token_ids == (72, 101) and stream.params.no_repeat_ngram_size == 2
    refused = send(client, allowed_token_ids=[257])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "allowed_token_ids")


@pytest.mark.parametrize("send", [chat, complete])
def test_a_beam_search_is_one_request_for_all_its_answers(
    client: TestClient, engine: FakeAsyncEngine, send: Any
) -> None:
    fields = {"use_beam_search": True, "n": 2, "best_of": 5, "length_penalty": 2.0, "early_stopping": "never"}
    whole = send(client, **fields).json()
    (stream,) = engine.streams
    assert stream.params.beams == BeamParams(5, 2, 2.0, "never")
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["stop", "stop"]
    # Tokens that are returned count; a prompt counts once.
    one = send(client).json()["usage"]
    assert whole["usage"]["prompt_tokens"] == one["prompt_tokens"]
    assert whole["usage"]["completion_tokens"] == 2 * one["completion_tokens"]
    *chunks, usage, done = sse_events(
        send(client, **fields, stream=True, stream_options={"include_usage": True}).text
    )
    assert done == "[DONE]" and usage["usage"] == whole["usage"]
    ends = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(ends) == [0, 1]


@pytest.mark.parametrize("send", [chat, complete])
def test_what_a_beam_search_does_not_take_is_a_400_with_its_name(client: TestClient, send: Any) -> None:
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 128}, "best_of"),
        ({"length_penalty": 11}, "length_penalty"),
    ]
    for fields, param in refusals:
        answer = send(client, use_beam_search=True, **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), fields


def test_a_search_that_finds_too_few_answers_is_a_400(make_client: MakeClient) -> None:
    engine = FakeAsyncEngine(lambda prompt, params: [TooFewAnswers(2, 3)])
    answer = complete(make_client(engine), use_beam_search=True, n=3)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    assert "allows 2 answers" in answer.json()["error"]["message"]


def test_a_prompt_may_be_cut(client: TestClient, engine: FakeAsyncEngine) -> None:
    assert complete(client, prompt="x" * 2000).status_code == 400
    assert complete(client, prompt="x" * 2000, truncate_prompt_tokens=-1).status_code == 200
    messages = [{"role": "user", "content": "x" * 4001}]
    for route, fields in (
        ("completions", {"prompt": "x" * 4001}),
        ("chat/completions", {"messages": messages}),
    ):
        refused = client.post(f"/v1/{route}", json=fields | {"truncate_prompt_tokens": 2})
        assert refused.status_code == 400
        assert "cuts prompts of at most 4000. Send the part" in refused.json()["error"]["message"]
    answer = complete(client, prompt="abc", truncate_prompt_tokens=2, echo=True).json()
    assert answer["choices"][0]["text"] == "bcHello!"
    assert [len(stream.prompt) for stream in engine.streams] == [999, 2]


def test_no_request_has_prompts_scored_without_end(make_client: MakeClient) -> None:
    client = make_client(FakeAsyncEngine(model=FakeModel(max_model_len=5000)))
    prompts = ["x" * 4000] * 33
    refused = complete(client, prompt=prompts, echo=True, logprobs=1, max_tokens=0)
    assert refused.status_code == 400 and "smaller n" in refused.json()["error"]["message"]
    assert complete(client, prompt=prompts[:2], max_tokens=1).status_code == 200


def test_nobody_puts_himself_first_unless_the_owner_says_so(client: TestClient) -> None:
    assert complete(client, priority=0).status_code == 200
    bodies = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}
    for path, body in bodies.items():
        error = client.post(path, json=body | {"priority": -1}).json()["error"]
        assert error["param"] == "priority" and "--scheduling-policy" in error["message"]


@pytest.mark.parametrize("send", [chat, complete])
def test_priority_and_salt_arrive_at_the_engine(
    make_client: MakeClient, engine: FakeAsyncEngine, send: Any
) -> None:
    client = make_client(engine, scheduling_policy="priority")
    send(client, priority=-3, cache_salt="mine")
    send(client)
    client.post("/v1/responses", json={"input": "x", "priority": 5, "cache_salt": "ours"})
    told = [(stream.request.priority, stream.request.cache_salt) for stream in engine.streams]
    assert told == [(-3, "mine"), (0, ""), (5, "ours")]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": ["x", "y" * 5000]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "y" * 2500}] * 2}),
    ],
)
def test_a_text_that_can_not_fit_is_not_tokenized(
    client: TestClient, engine: FakeAsyncEngine, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    """That could take long, and all other texts would wait for it."""
    encoded: list[str] = []
    monkeypatch.setattr(engine.model.tokenizer, "encode", lambda text, *_: encoded.append(text))
    answer = client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400 and not encoded
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded" and "5000 characters" in error["message"]


LONG = "y" * 600_000
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": f'{{"x": "{LONG}"}}'}}
CALLED = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "ok"},
]
DESCRIBED = [{"type": "function", "function": {"name": "f", "description": LONG}}]
TALK = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("path", "fields", "code"),
    [
        ("v1/chat/completions", {"messages": CALLED}, "context_length_exceeded"),
        ("v1/chat/completions", {"messages": TALK, "tools": DESCRIBED}, "context_length_exceeded"),
        (
            "v1/chat/completions",
            {"messages": TALK, "chat_template_kwargs": {"mood": LONG}},
            "context_length_exceeded",
        ),
        ("v1/responses", {"input": TALK, "chat_template_kwargs": {"mood": LONG}}, "context_length_exceeded"),
        (
            "v1/responses",
            {"input": TALK, "chat_template_kwargs": {"mood": LONG}, "truncation": "auto"},
            "context_length_exceeded",
        ),
        (
            "v1/responses/input_tokens",
            {"input": TALK, "chat_template_kwargs": {"mood": LONG}},
            "string_above_max_length",
        ),
        ("tokenize", {"messages": CALLED}, "string_above_max_length"),
        ("tokenize", {"messages": TALK, "tools": DESCRIBED}, "string_above_max_length"),
    ],
)
def test_a_conversation_is_long_by_all_that_the_prompt_has(
    client: TestClient,
    engine: FakeAsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: Any,
    code: str,
) -> None:
    """Calls, tools and variables of the template are tokenized as the turns' texts are."""
    encode, longest = engine.model.tokenizer.encode, [0]

    def measured(text: str, *options: Any) -> list[int]:
        longest.append(len(text))
        return encode(text, *options)

    monkeypatch.setattr(engine.model.tokenizer, "encode", measured)
    answer = client.post(f"/{path}", json=fields)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code), answer.text[:500]
    assert max(longest) < len(LONG)


def encoded(vectors: Tensor) -> str:
    return base64.b64encode(save({"prompt": vectors})).decode()


def test_vectors_are_prompts_of_their_own(make_client: MakeClient, engine: FakeAsyncEngine) -> None:
    """They come before those of `prompt`, as in vLLM, unless the prompt follows them."""
    client, one, two = make_client(engine), encoded(torch.ones(3, 8)), encoded(torch.zeros(2, 8))
    for fields, expected in (
        ({"prompt": "", "prompt_embeds": one}, [(3, [])]),
        ({"prompt": None, "prompt_embeds": [one, two]}, [(3, []), (2, [])]),
        ({"prompt": "Hi", "prompt_embeds": [one, two]}, [(3, []), (2, []), (0, [72, 105])]),
        ({"prompt": "Hi", "prompt_embeds": one, "prompt_follows_embeds": True}, [(3, [72, 105])]),
    ):
        before = len(engine.streams)
        answer = complete(client, **fields)
        requests = [stream.request for stream in engine.streams[before:]]
        found = [
            (each.num_prompt_tokens - len(each.prompt_token_ids), list(each.prompt_token_ids))
            for each in requests
            if each is not None
        ]
        assert found == expected
        body = answer.json()
        assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
        assert body["usage"]["prompt_tokens"] == sum(count + len(ids) for count, ids in expected)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_embeds": "not base64!"}, "prompt_embeds"),
        ({"prompt_embeds": "aGVsbG8="}, "prompt_embeds"),
        ({"prompt_embeds": encoded(torch.ones(3, 9))}, "prompt_embeds"),
        ({"prompt_embeds": encoded(torch.ones(3))}, "prompt_embeds"),
        ({"prompt_embeds": encoded(torch.ones(3, 8)), "echo": True}, "echo"),
        ({"prompt_embeds": encoded(torch.ones(3, 8)), "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_embeds": encoded(torch.ones(3, 8)), "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
        ({"prompt_follows_embeds": True}, "prompt_follows_embeds"),
        ({"prompt_embeds": "aGVsbG8=", "prompt": "", "prompt_follows_embeds": True}, "prompt_follows_embeds"),
        ({"prompt_embeds": ["", ""], "prompt_follows_embeds": True}, "prompt_follows_embeds"),
    ],
)
def test_vectors_that_are_refused(client: TestClient, fields: Any, param: str) -> None:
    answer = complete(client, **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_too_many_vectors_are_refused(client: TestClient) -> None:
    answer = complete(client, prompt="", prompt_embeds=encoded(torch.ones(1000, 8)))
    assert answer.status_code == 400 and "1000 tokens" in answer.json()["error"]["message"]


def test_echo_is_refused_where_a_prompt_is_seen_both_ways(
    make_client: MakeClient, engine: FakeAsyncEngine
) -> None:
    engine.engine.spec = replace(engine.engine.spec, sees_prompt_both_ways=True)
    answer = complete(make_client(engine), echo=True)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "echo"
