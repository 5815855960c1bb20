"""/api/chat and /api/generate with the real `ollama` package over a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from fakes import FakeAsyncEngine, FakeModel, Script
from penstock.errors import EngineDead
from penstock.generation.requests.generation_request import SamplingParams
from penstock_server.ollama_api.bodies import durations
from penstock_server.ollama_api.requests import ChatRequest
from penstock_server.telemetry.request_info import AnswerTimes, RequestInfo, current_request

from ..conftest import MakeClient
from ..test_openai_package import LiveServer
from ..tools.chat_templates import HERMES

ollama = pytest.importorskip("ollama", reason="the extra dev has the package")

CALLS = [
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n',
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
]
HI: list[Any] = [{"role": "user", "content": "Hi"}]


def weather(city: str) -> str:
    """The weather.

    Args:
      city: The city.
    """
    return f"Rain in {city}"


def script_of(prompt: list[int], params: SamplingParams) -> Script:
    text = bytes(prompt).decode()
    if "wait" in text:
        return ["Hel", asyncio.Event()]
    if "fail" in text:
        return ["Hel", EngineDead("secret")]
    if params.grammar is not None:
        return ['{"a"', ": 7}"]
    if "weather?" in text and "tool:" not in text:
        answer = "Let me see.\n" + "".join(CALLS)
        return [answer[i : i + 5] for i in range(0, len(answer), 5)]
    return ["Hel", "lo", "!"]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    model = FakeModel(max_model_len=2000)
    model.tokenizer.tool_template = HERMES
    with LiveServer(FakeAsyncEngine(script_of, model), api_key=(), sse_keep_alive=0.05) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Any:
    return ollama.Client(host=server.root)


def last(server: LiveServer) -> tuple[str, SamplingParams]:
    stream = server.engine.streams[-1]
    return bytes(stream.prompt).decode(), stream.params


def test_a_chat(client: Any, server: LiveServer) -> None:
    options = {
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.9,
        "repeat_penalty": 1.1,
        "seed": 7,
        "stop": ["END"],
        "num_predict": 30,
        "num_ctx": 2000,
        "num_gpu": 1,
    }
    answer = client.chat("tiny:latest", HI, options=options, keep_alive="5m", think=False)
    assert (answer.message.role, answer.message.content) == ("assistant", "Hello!")
    assert (answer.model, answer.done, answer.done_reason) == ("tiny", True, "stop")
    assert answer.prompt_eval_count == len(last(server)[0]) and answer.eval_count == 7
    spans = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
    assert all(isinstance(answer[span], int) and answer[span] >= 0 for span in spans)
    assert answer.total_duration >= answer.prompt_eval_duration + answer.eval_duration
    prompt, params = last(server)
    assert prompt.startswith("user: Hi\n[('enable_thinking', False)]")
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.5, 40, 0.9, 7)
    assert (params.repetition_penalty, params.stop, params.max_tokens) == (1.1, ("END",), 30)


def test_an_answer_of_one_step_has_an_eval_duration() -> None:
    """Programs tell tokens per second by dividing by it."""
    times = AnswerTimes(arrival=1.0, started=1.25, first=2.0, last=2.0, num_output_tokens=1)
    token = current_request.set(RequestInfo("id", num_prompt_tokens=2, answers=[times]))
    try:
        found = durations()
    finally:
        current_request.reset(token)
    assert (found["prompt_eval_duration"], found["eval_duration"]) == (500_000_000, 250_000_000)


def test_guesses_can_be_turned_off(client: Any, server: LiveServer) -> None:
    for options, expected in ({}, True), ({"speculation": False}, False), ({"speculation": True}, True):
        client.chat("tiny", HI, options=options)
        assert last(server)[1].speculation is expected
        client.generate("tiny", "Once", raw=True, options=options)
        assert last(server)[1].speculation is expected


def test_a_stream(client: Any) -> None:
    pieces = list(client.chat("tiny", HI, stream=True))
    assert [piece.message.content for piece in pieces] == ["Hel", "lo", "!", ""]
    assert [piece.done for piece in pieces] == [False] * 3 + [True]
    assert pieces[0].total_duration is None and pieces[-1].eval_count == 7


@pytest.mark.parametrize("is_streamed", [False, True])
def test_calls_and_their_results(client: Any, server: LiveServer, is_streamed: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "weather?"}]
    answer = client.chat("tiny", messages, tools=[weather], stream=is_streamed)
    pieces = list(answer) if is_streamed else [answer]
    assert "".join(piece.message.content for piece in pieces).strip() == "Let me see."
    calls = [call for piece in pieces for call in piece.message.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("weather", {"city": "Paris"}),
        ("weather", {"city": "Rome"}),
    ]
    messages.append({"role": "assistant", "content": "", "tool_calls": calls})
    for call in calls:
        content = weather(**call.function.arguments)
        messages.append({"role": "tool", "content": content, "tool_name": call.function.name})
    assert client.chat("tiny", messages, tools=[weather]).message.content == "Hello!"
    assert "\ntool: Rain in Paris\ntool: Rain in Rome\n" in last(server)[0]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_thinking_stands_apart(is_streamed: bool) -> None:
    model = FakeModel()
    model.tokenizer.tool_template = "{{ '<think>' }} and {{ '</think>' }}"
    script = ["<thi", "nk>Hm", ", so.", "</think>", "\n\nFour", "."]
    with LiveServer(FakeAsyncEngine(lambda *_: script, model), api_key=()) as server:
        client = ollama.Client(host=server.root)
        chat, text = (
            list(answer) if is_streamed else [answer]
            for answer in (
                client.chat("tiny", HI, stream=is_streamed),
                client.generate("tiny", "Hi", stream=is_streamed),
            )
        )
        assert "thinking" in client.show("tiny").capabilities
    assert "".join(piece.message.thinking or "" for piece in chat) == "Hm, so."
    assert "".join(piece.message.content for piece in chat).strip() == "Four."
    assert "".join(piece.thinking or "" for piece in text) == "Hm, so."
    assert "".join(piece.response for piece in text).strip() == "Four."


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"a": {"type": "integer"}}}])
def test_a_form_that_the_answer_must_have(client: Any, server: LiveServer, form: Any) -> None:
    assert json.loads(client.chat("tiny", HI, format=form).message.content) == {"a": 7}
    assert last(server)[1].grammar is not None
    assert json.loads(client.generate("tiny", "Hi", format=form).response) == {"a": 7}


def test_a_prompt(client: Any, server: LiveServer) -> None:
    answer = client.generate("tiny", "Hi", system="Be kind", think="low")
    assert (answer.response, answer.done_reason) == ("Hello!", "stop")
    assert last(server)[0].startswith("system: Be kind\nuser: Hi\n[('enable_thinking', True), ('reasoning")
    assert last(server)[1].max_tokens is None, "as many as there is room for"
    raw = client.generate("tiny", "Once", raw=True, options={"num_predict": 3}, stream=True)
    assert [(piece.response, piece.done_reason) for piece in raw] == [("Hel", None), ("", "length")]
    assert last(server)[0] == "Once"


def test_logprobs(client: Any) -> None:
    for ask in (
        client.chat("tiny", HI, logprobs=True, top_logprobs=2),
        client.generate("tiny", "Hi", logprobs=True),
    ):
        assert "".join(token.token for token in ask.logprobs) == "Hello!"
    pieces = list(client.chat("tiny", HI, logprobs=True, top_logprobs=2, stream=True))
    assert [len(token.top_logprobs) for piece in pieces for token in piece.logprobs or ()] == [2] * 6


def test_nothing_to_answer_asks_whether_the_model_is_there(client: Any, server: LiveServer) -> None:
    number = len(server.engine.streams)
    for answer in (
        client.generate("tiny", ""),
        client.chat("tiny", []),
        client.generate("tiny", keep_alive=0),
    ):
        assert (answer.done, answer.done_reason) == (True, "load")
    assert len(server.engine.streams) == number


def test_messages_without_room_are_left_out(client: Any, server: LiveServer) -> None:
    long = [{"role": "system", "content": "Be kind"}]
    for number in range(30):
        long += [{"role": "user", "content": f"{number} " + "x" * 90}, {"role": "assistant", "content": "Ok"}]
    long.append({"role": "user", "content": "last"})
    assert client.chat("tiny", long).message.content == "Hello!"
    prompt = last(server)[0]
    assert len(prompt) < 2000 and prompt.startswith("system: Be kind\nuser: ") and "user: last" in prompt
    body = {"model": "tiny", "messages": long, "truncate": False}
    refused = httpx2.post(f"{server.root}/api/chat", json=body)
    assert refused.status_code == 400 and "context" in refused.json()["error"]


def test_errors_are_those_of_the_package(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="no model 'other'") as caught:
        client.chat("other", HI)
    assert caught.value.status_code == 404
    for fields, said in (
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images are not supported"),
        ({"messages": HI, "options": {"typical_p": 0.5}}, r"options\.typical_p"),
        ({"messages": HI, "options": {"temperature": "hot"}}, r"options\.temperature"),
        ({"messages": HI, "options": {"speculation": "off"}}, r"options\.speculation"),
        ({"messages": [{"role": "user", "content": "fail"}]}, "engine has stopped"),
    ):
        with pytest.raises(ollama.ResponseError, match=said):
            client.chat("tiny", **fields)
    with pytest.raises(ollama.ResponseError, match="context: not supported"):
        client.generate("tiny", "x", context=[1])
    with pytest.raises(ollama.ResponseError, match="engine has stopped"):
        list(client.chat("tiny", [{"role": "user", "content": "fail"}], stream=True))


def test_unknown_options_are_left_out(server: LiveServer) -> None:
    options = {"made_up": 1, "num_thread": 4, "num_ctx": 9000}
    body = {"model": "tiny", "prompt": "x", "options": options, "stream": False}
    # As curl sends it, without a content type for JSON.
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = httpx2.post(f"{server.root}/api/generate", content=json.dumps(body), headers=form)
    assert answer.json()["response"] == "Hello!"
    ignored = "options.made_up, options.num_ctx (the context has 2000 tokens)"
    assert answer.headers["x-penstock-ignored"] == ignored
    headers = form | {"Origin": "http://example.org"}
    refused = httpx2.post(f"{server.root}/api/generate", content=json.dumps(body), headers=headers)
    assert refused.status_code == 415, "a page of another origin"


WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {}}}


@pytest.mark.parametrize("streams", [False, True])
def test_unknown_fields_are_left_out_and_named(server: LiveServer, streams: bool) -> None:
    """As the AI SDK's provider of Ollama sends them, which offers tools with a tool_choice."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "weather?", "extra": {"a": 1}}],
        "tools": [WEATHER],
        "tool_choice": "auto",
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 1,
        "max_output_tokens": 50,
        "think": False,
        "none": None,
        "stream": streams,
    }
    answer = httpx2.post(f"{server.root}/api/chat", json=body)
    assert answer.status_code == 200, answer.text
    messages = [json.loads(line)["message"] for line in answer.text.splitlines()]
    (call, _) = [call for message in messages for call in message.get("tool_calls", ())]
    assert call["function"]["arguments"] == {"city": "Paris"}
    ignored = "max_output_tokens, messages.0.extra, seed, temperature, tool_choice, top_p"
    assert answer.headers["x-penstock-ignored"] == ignored
    assert last(server)[1].temperature == 1
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Rain"}
    said = {"role": "assistant", "content": "", "tool_calls": [call | {"type": "function"}]}
    body |= {"messages": [*body["messages"], said, result], "stream": False}
    answer = httpx2.post(f"{server.root}/api/chat", json=body)
    assert answer.json()["message"]["content"] == "Hello!" and "tool: Rain" in last(server)[0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("generate", {"prompt": "x", "made_up": 1, "stream": False}),
        ("show", {"made_up": 1}),
    ],
)
def test_unknown_fields_on_other_routes(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    answer = httpx2.post(f"{server.root}/api/{path}", json={"model": "tiny"} | body)
    assert (answer.status_code, answer.headers["x-penstock-ignored"]) == (200, "made_up")
    wrong = httpx2.post(f"{server.root}/api/{path}", json={"made_up": 1, "model": 7} | body)
    assert wrong.status_code == 400 and "model" in wrong.json()["error"] and "made_up" not in wrong.text


def test_whole_numbers_may_be_floats(server: LiveServer) -> None:
    options = {"top_k": 40.0, "seed": 7.0, "num_predict": 3.0, "num_ctx": 2000.0, "repeat_last_n": 64.0}
    body = {"model": "tiny", "messages": HI, "logprobs": True, "top_logprobs": 2.0, "stream": False}
    answer = httpx2.post(f"{server.root}/api/chat", json=body | {"options": options})
    assert answer.json()["done_reason"] == "length", answer.text
    params = last(server)[1]
    assert (params.top_k, params.seed, params.max_tokens, params.logprobs) == (40, 7, 3, 2)
    assert all(type(number) is int for number in (params.top_k, params.seed, params.max_tokens))
    wrong = [("top_k", 40.5), ("seed", 7.25), ("num_predict", "3"), ("num_ctx", True)]
    wrong += [("seed", 1e300), ("seed", 2**63), ("num_ctx", 1e300), ("repeat_last_n", -1e300)]
    for name, value in wrong:
        content = json.dumps(body | {"options": {name: value}})
        refused = httpx2.post(f"{server.root}/api/chat", content=content)
        assert refused.status_code == 400 and f"options.{name}" in refused.json()["error"]


def test_a_result_without_an_earlier_call_is_shown(client: Any, server: LiveServer) -> None:
    for extra in ({}, {"tool_name": "weather"}, {"tool_call_id": "unknown"}, {"name": "weather"}):
        result = {"role": "tool", "content": "Rain"} | extra
        body = {"model": "tiny", "messages": [*HI, result], "stream": False}
        answer = httpx2.post(f"{server.root}/api/chat", json=body)
        assert answer.status_code == 200, answer.text
        assert "user: Hi\ntool: Rain\n" in last(server)[0]


@pytest.mark.parametrize("function", [{"name": "f"}, {"name": "f", "arguments": None}])
def test_a_call_without_arguments(function: dict[str, Any]) -> None:
    said = {"role": "assistant", "tool_calls": [{"function": function}]}
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}, said]}
    turns = ChatRequest.model_validate(body).as_conversation.turns
    assert [call.arguments for call in turns[1].calls] == ["{}"]


def test_a_result_belongs_to_the_call_of_its_id_or_name() -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": {}}}
    said = {"role": "assistant", "tool_calls": [call, call, {"function": {"name": "g", "arguments": {}}}]}
    results = [
        {"role": "tool", "content": "1", "tool_name": "g"},
        {"role": "tool", "content": "2", "tool_call_id": "a"},
        {"role": "tool", "content": "3", "tool_name": "f"},
        {"role": "tool", "content": "4", "tool_name": "f"},
    ]
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}, said, *results]}
    turns = ChatRequest.model_validate(body).as_conversation.turns
    assert [each.call_id for each in turns[1].calls] == ["a", "call_1_1", "call_1_2"]
    assert [turn.call_id for turn in turns[2:]] == ["call_1_2", "a", "call_1_1", "result_5"]
    assert [turn.name for turn in turns[2:]] == [None, None, None, "f"]


def test_a_silent_stream_has_lines_and_its_sequence_is_freed(server: LiveServer) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "wait"}]}
    with httpx2.stream("POST", f"{server.root}/api/chat", json=body) as answer:
        assert answer.headers["content-type"] == "application/x-ndjson"
        lines = answer.iter_lines()
        texts = [json.loads(next(lines))["message"]["content"] for _ in range(3)]
    assert texts == ["Hel", "", ""]
    server.wait_for_aborts(1)


def test_a_model_without_a_template_continues_the_prompt(make_client: MakeClient) -> None:
    engine = FakeAsyncEngine(model=FakeModel(has_chat_template=False))
    answer = make_client(engine).post(
        "/api/generate", json={"model": "tiny", "prompt": "Once", "stream": False}
    )
    assert answer.json()["response"] == "Hello!" and bytes(engine.streams[0].prompt) == b"Once"


def test_a_top_p_above_1_is_off_and_0_keeps_one_token(client: Any, server: LiveServer) -> None:
    for given, taken in ((1.5, 1.0), (0, 0.0)):
        options = {"top_p": given, "num_predict": 1}
        client.chat("tiny", [{"role": "user", "content": "Hi"}], options=options)
        assert server.engine.streams[-1].params.top_p == taken
