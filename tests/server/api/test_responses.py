"""/v1/responses, from the request's bytes to the answer's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from fakes import FakeAsyncEngine, FakeModel
from penstock.errors import EngineDead, InvalidParameter
from penstock.generation.beam_search import BeamParams
from penstock.generation.grammars.grammar import Grammar
from penstock_server.prompts import inputs

from ..conftest import MakeClient


def respond(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/responses", json={"input": "Hi"} | fields)


def prompts(engine: FakeAsyncEngine) -> list[str]:
    return [bytes(stream.prompt).decode() for stream in engine.streams]


@pytest.mark.parametrize("path", ["/responses", "/v1/responses"])
def test_an_answer(client: TestClient, engine: FakeAsyncEngine, path: str) -> None:
    body = {"input": "Hi", "model": "tiny", "instructions": "Be kind", "max_output_tokens": 30}
    answer = client.post(path, json=body).json()
    assert answer["output"][0]["content"][0]["text"] == "Hello!"
    assert answer["id"].startswith("resp_") and answer["model"] == "tiny"
    assert prompts(engine) == ["system: Be kind\nuser: Hi\nassistant:"]
    assert engine.streams[0].params.max_tokens == 30


def test_what_is_asked_of_the_sampler_arrives(client: TestClient, engine: FakeAsyncEngine) -> None:
    respond(
        client, temperature=0.3, top_p=0.5, top_k=4, seed=1, stop=["x"], bad_words=["no"], speculation=False
    )
    params = engine.streams[0].params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.3, 0.5, 4, 1)
    assert params.speculation is False
    assert params.stop == ("x",) and params.bad_words == (tuple(b"no"), tuple(b" no"))


def test_a_beam_search_gives_the_best_answer(client: TestClient, engine: FakeAsyncEngine) -> None:
    fields = {"use_beam_search": True, "best_of": 5, "length_penalty": 2.0, "early_stopping": "never"}
    assert respond(client, **fields).json()["output"][0]["content"][0]["text"] == "Hello!"
    events = respond(client, stream=True, **fields).text
    assert events.count("response.output_text.delta") == 2, "one event, which names itself twice"
    assert [stream.params.beams for stream in engine.streams] == [BeamParams(5, 1, 2.0, "never")] * 2
    for wrong, param in (({"best_of": 2}, "best_of"), (fields | {"temperature": 0.5}, "temperature")):
        refused = respond(client, **wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_reasoning_effort_goes_to_the_template(client: TestClient, engine: FakeAsyncEngine) -> None:
    reasoning = {"effort": "low", "summary": "detailed", "context": "auto", "mode": "standard"}
    respond(client, reasoning=reasoning, text={"verbosity": "high"}, chat_template_kwargs={"x": 1})
    said = "('enable_thinking', True), ('reasoning_effort', 'low'), ('verbosity', 'high'), ('x', 1)"
    assert f"[{said}]" in prompts(engine)[0]
    refused = respond(client, reasoning={"mode": "pro"}).json()["error"]
    assert refused["param"] == "reasoning.mode" and "standard" in refused["message"]


@pytest.mark.inner
def test_a_stream_names_its_events_and_ends_by_itself(client: TestClient) -> None:
    answer = respond(client, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    names = [block[0].removeprefix("event: ") for block in blocks]
    assert names[0] == "response.created" and names[-1] == "response.completed"
    assert "[DONE]" not in answer.text
    assert all(name in block[1] for name, block in zip(names, blocks, strict=True))


def test_errors_before_and_in_an_answer(make_client: MakeClient) -> None:
    client = make_client(FakeAsyncEngine(lambda *_: ["Hel", EngineDead("secret")]))
    assert respond(client).status_code == 503
    assert respond(client, model="other").status_code == 404
    too_long = respond(client, input="x" * 2000)
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert '"response.failed"' in respond(client, stream=True).text
    assert client.post("/v1/responses", content=b"{}").status_code == 415


def test_an_answer_that_is_given_up_is_aborted(make_client: MakeClient) -> None:
    engine = FakeAsyncEngine(lambda *_: ["Hel", EngineDead("secret")])
    respond(make_client(engine))
    assert [stream.is_aborted for stream in engine.streams] == [True]


def test_a_model_without_chat_template_says_so(make_client: MakeClient) -> None:
    client = make_client(FakeAsyncEngine(model=FakeModel(has_chat_template=False)))
    answer = respond(client)
    assert answer.status_code == 400 and "chat template" in answer.json()["error"]["message"]


def test_messages_that_a_template_refuses_are_the_input(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template's own error names `messages`, which this route does not have."""

    def refuse(*_: Any, **fields: Any) -> list[int]:
        raise InvalidParameter("messages", "no system messages here")

    monkeypatch.setattr(inputs, "render_chat", refuse)
    for fields in ({}, {"truncation": "auto"}):
        error = respond(make_client(FakeAsyncEngine()), **fields).json()["error"]
        assert (error["param"], error["message"]) == ("input", "no system messages here")


@pytest.mark.parametrize(
    "fields", [{"metadata": {"a": "\ud800"}}, {"metadata": {"\ud800": ""}}, {"user": "\ud800"}]
)
def test_what_comes_back_in_the_answer_is_text(client: TestClient, fields: dict[str, Any]) -> None:
    """Half a surrogate pair can be read, but not written again: such an answer would be a 500."""
    content = json.dumps({"input": "Hi"} | fields)
    answer = client.post("/v1/responses", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and "surrogate" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/resp_1"),
        ("GET", "/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/v1/responses/resp_1/input_items"),
    ],
)
def test_nothing_is_stored(client: TestClient, method: str, path: str) -> None:
    answer = client.request(method, path)
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "response_not_found" and "keeps none" in error["message"]


def test_other_methods(client: TestClient) -> None:
    wrong = client.put("/v1/responses", json={})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


def test_tokens_of_an_input_are_counted(client: TestClient) -> None:
    answer = client.post("/v1/responses/input_tokens", json={"input": "Hi"}).json()
    assert answer == {"object": "response.input_tokens", "input_tokens": len("user: Hi\nassistant:")}


CONVERSATION = [
    {"role": "system", "content": "Be kind"},
    {"role": "user", "content": "a" * 40},
    {"role": "assistant", "content": "b" * 40},
    {"role": "user", "content": "c" * 40},
    {"role": "assistant", "content": "d" * 40},
    {"role": "user", "content": "e" * 40},
]


@pytest.mark.parametrize(
    ("max_model_len", "first"),
    [(291, "a"), (290, "c"), (192, "c"), (191, "e"), (93, "e"), (92, None)],
)
def test_old_turns_are_dropped_on_request(
    make_client: MakeClient, max_model_len: int, first: str | None
) -> None:
    """Whole it has 271 tokens, from c on 172, from e on 73; each beside 20 of the answer."""
    engine = FakeAsyncEngine(model=FakeModel(max_model_len=max_model_len))
    fields = {"input": CONVERSATION, "truncation": "auto", "max_output_tokens": 20}
    answer = respond(make_client(engine), **fields).json()
    if first is None:
        assert answer["error"]["code"] == "context_length_exceeded"
    else:
        assert answer["truncation"] == "auto"
        assert prompts(engine)[0].startswith(f"system: Be kind\nuser: {first * 40}")


def test_long_texts_are_not_even_read(make_client: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens have one character: of 1000 turns with 100 each, a context of 1000 has room for ten at most."""
    read: list[int] = []
    render = inputs.render_chat

    def counted(tokenizer: Any, messages: list[Any], **fields: Any) -> list[int]:
        read.append(len(messages))
        return render(tokenizer, messages, **fields)

    monkeypatch.setattr(inputs, "render_chat", counted)
    client = make_client(FakeAsyncEngine())
    turns = [{"role": "user", "content": "x" * 100}] * 1000
    refused = respond(client, input=turns)
    assert refused.json()["error"]["code"] == "context_length_exceeded" and not read
    assert respond(client, input=turns, truncation="auto").status_code == 200
    assert read and max(read) <= 10
    # They can be counted, as far as /tokenize goes.
    counted_tokens = client.post("/v1/responses/input_tokens", json={"input": turns[:20]})
    assert counted_tokens.json()["input_tokens"] > 2000
    too_long = client.post("/v1/responses/input_tokens", json={"input": turns})
    assert too_long.json()["error"]["code"] == "string_above_max_length"


def test_nothing_is_dropped_otherwise(make_client: MakeClient) -> None:
    client = make_client(FakeAsyncEngine(model=FakeModel(max_model_len=100)))
    for truncation in ("disabled", None):
        answer = respond(client, input=CONVERSATION, truncation=truncation)
        assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_form_binds_the_answer(client: TestClient, engine: FakeAsyncEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "n", "schema": schema}
    answer = respond(client, text={"format": form})
    assert engine.streams[0].params.grammar == Grammar.json_schema(schema)
    assert answer.json()["text"]["format"] == form
    respond(client, text={"format": {"type": "json_object"}})
    assert engine.streams[1].params.grammar == Grammar.json_object()


def test_a_form_that_is_wrong_is_named(client: TestClient) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "no such type"}}
    answer = respond(client, text={"format": form})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "text.format")
    assert error["message"].startswith("text.format: ")


TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}]


def calling(make_client: MakeClient, *script: str) -> TestClient:
    return make_client(FakeAsyncEngine(lambda *_: script), tool_call_parser="hermes")


def test_a_call_is_an_item(make_client: MakeClient) -> None:
    text = 'Well. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    answer = respond(calling(make_client, text), tools=TOOLS).json()
    message, call = answer["output"]
    assert message["content"][0]["text"].strip() == "Well."
    assert (call["type"], call["name"], call["status"]) == ("function_call", "f", "completed")
    assert json.loads(call["arguments"]) == {"a": 1} and call["call_id"] != call["id"]
    assert answer["tools"][0]["name"] == "f"
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
    following = [{"role": "user", "content": "Hi"}, *answer["output"], result]
    assert respond(calling(make_client, "Two."), input=following, tools=TOOLS).status_code == 200


def test_calls_in_a_stream(make_client: MakeClient) -> None:
    script = ["Well. ", "<tool_c", 'all>{"name": "f", "argum', 'ents": {"a"', ": 1}}</tool_call>"]
    lines = respond(calling(make_client, *script), tools=TOOLS, stream=True).text.split("\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    without_deltas = [kind for kind in kinds if not kind.endswith("delta")]
    assert without_deltas == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    arguments = "".join(
        event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"
    )
    *_, item, completed = events
    assert item["item"]["arguments"] == arguments and json.loads(arguments) == {"a": 1}
    assert completed["response"]["output"][1] == item["item"]


@pytest.mark.parametrize("fields", [{"input": "x" * 1000}, {"input": "x" * 9000}, {"max_output_tokens": 990}])
def test_a_stream_without_room_fails_in_an_event(client: TestClient, fields: dict[str, Any]) -> None:
    """As at OpenAI: Codex leaves out old items when it reads the event, and gives up at a 400."""
    answer = respond(client, **{"input": "Hi"} | fields, stream=True)
    assert answer.status_code == 200
    lines = answer.text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [event["type"] for event in events] == [
        f"response.{kind}" for kind in ("created", "in_progress", "failed")
    ]
    assert [event["sequence_number"] for event in events] == [0, 1, 2]
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "context_length_exceeded")
    assert "maximum context length is 1000 tokens" in failed["error"]["message"] and failed["output"] == []


def test_a_call_that_is_forced(make_client: MakeClient) -> None:
    client = calling(make_client, '{"a": 1}')
    answer = respond(client, tools=TOOLS, tool_choice={"type": "function", "name": "f"}).json()
    (call,) = answer["output"]
    assert (call["name"], call["arguments"]) == ("f", '{"a": 1}')
    assert answer["tool_choice"] == {"type": "function", "name": "f"}


def test_a_tool_that_can_not_be_enforced_is_named_as_this_route_has_it(client: TestClient) -> None:
    bad = {"type": "function", "name": "g", "parameters": {"properties": {"a": {"not": {}}}}}
    answer = respond(client, tools=[*TOOLS, bad], tool_choice="required")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools.1.parameters")
