"""Calls with the real `openai` package, whole and streamed, over a socket; the model is a script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessage

from fakes import FakeAsyncEngine, FakeModel, Script
from penstock.generation.requests.generation_request import SamplingParams

from ..test_openai_package import LiveServer
from .chat_templates import HERMES

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
TOOLS: list[Any] = [WEATHER, NOW]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
REPEATED = ["Paris", "Par", "Parma", "Paris", "Rome", *["Rome"] * 11]
PARIS = '{"city": "Paris"}'
CALL = f'<tool_call>{{"name": "weather", "arguments": {PARIS}}}</tool_call>'
NOW_CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def answer_to(prompt: list[int], params: SamplingParams) -> Script:
    """What the prompt asks for, a few letters at a time."""
    text = bytes(prompt).decode()
    if "tools off" in text:
        answer = "Hello!"
    elif "again" in text:
        # What a small model writes: the first call that is there twice is behind a near miss.
        calls = [f'{{"name":"weather","parameters":{{"city":"{city}"}}}}' for city in REPEATED]
        return [char for char in f"[{','.join(calls)}]"]
    elif params.grammar is not None and "minItems" in params.grammar.text:
        answer = f'[{{"name":"weather","parameters":{PARIS}}},{{"name":"now","parameters":{{}}}}]'
    elif params.grammar is not None and params.grammar.kind == "json_schema":
        answer = PARIS if '"anyOf"' not in params.grammar.text else '{"name":"now","parameters":{}}'
    elif "plain" in text:
        answer = "a < b, or <tool"
    else:
        answer = f"Let me see.\n{CALL}\n{NOW_CALL}" if "talk" in text else f"{CALL}\n{NOW_CALL}"
    return [answer[i : i + 3] for i in range(0, len(answer), 3)]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    model = FakeModel(max_model_len=2_000_000)
    model.tokenizer.tool_template = HERMES
    with LiveServer(FakeAsyncEngine(answer_to, model)) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="key", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, is_streamed: bool, says: str = "Hi", **fields: Any) -> list[Any]:
    """The choices, those of a stream added up by the package itself."""
    messages: list[Any] = [{"role": "user", "content": says}]
    fields = {"tools": TOOLS} | fields
    if not is_streamed:
        return list(client.chat.completions.create(model="tiny", messages=messages, **fields).choices)
    with client.chat.completions.stream(model="tiny", messages=messages, **fields) as stream:
        return list(stream.get_final_completion().choices)


def calls_of(message: ChatCompletionMessage) -> list[tuple[str, str]]:
    calls: list[Any] = message.tool_calls or []
    assert all(call.type == "function" and call.id.startswith("call_") for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    return [(call.function.name, call.function.arguments) for call in calls]


BOTH = [("weather", PARIS), ("now", "{}")]
STREAMED = pytest.mark.parametrize("is_streamed", [False, True])


@STREAMED
@pytest.mark.parametrize(
    ("fields", "content", "calls", "finish_reason"),
    [
        ({}, None, BOTH, "tool_calls"),
        ({"says": "talk"}, "Let me see.", BOTH, "tool_calls"),
        ({"says": "plain"}, "a < b, or <tool", [], "stop"),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, None, BOTH[:1], "tool_calls"),
        ({"tool_choice": "required"}, None, BOTH, "tool_calls"),
        ({"tool_choice": "required", "parallel_tool_calls": False}, None, BOTH[1:], "tool_calls"),
        ({"tool_choice": NAMED}, None, BOTH[:1], "stop"),
        ({"tool_choice": "none", "says": "tools off"}, "Hello!", [], "stop"),
        ({"tools": openai.omit, "says": "talk"}, f"Let me see.\n{CALL}\n{NOW_CALL}", [], "stop"),
    ],
)
def test_every_choice(
    client: openai.OpenAI,
    is_streamed: bool,
    fields: dict[str, Any],
    content: str | None,
    calls: list[Any],
    finish_reason: str,
) -> None:
    choices = ask(client, is_streamed, n=2, **fields)
    assert [choice.index for choice in choices] == [0, 1]
    for choice in choices:
        assert (choice.message.content, calls_of(choice.message)) == (content, calls)
        assert choice.finish_reason == finish_reason


@STREAMED
def test_a_repeated_call_ends_the_list(client: openai.OpenAI, server: LiveServer, is_streamed: bool) -> None:
    (choice,) = ask(client, is_streamed, "again", tool_choice="required")
    expected = [("weather", f'{{"city":"{city}"}}') for city in ("Paris", "Par", "Parma")]
    assert calls_of(choice.message) == expected and choice.finish_reason == "tool_calls"
    assert server.engine.streams[-1].is_aborted


@STREAMED
def test_so_it_does_in_responses(client: openai.OpenAI, is_streamed: bool) -> None:
    flat: Any = [{"type": "function", **WEATHER["function"]}]
    fields: Any = {"model": "tiny", "input": "again", "tools": flat, "tool_choice": "required"}
    if is_streamed:
        with client.responses.stream(**fields) as stream:
            answer = stream.get_final_response()
    else:
        answer = client.responses.create(**fields)
    assert answer.status == "completed"
    assert [json.loads(item.arguments)["city"] for item in answer.output] == ["Paris", "Par", "Parma"]  # type: ignore[union-attr]


@STREAMED
def test_a_call_that_is_cut_off(client: openai.OpenAI, is_streamed: bool) -> None:
    """The package's own helper for streams would raise for it."""
    fields: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 54}
    if is_streamed:
        chunks = list(client.chat.completions.create(**fields, stream=True))
        deltas = [chunk.choices[0].delta for chunk in chunks]
        arguments = "".join(d.tool_calls[0].function.arguments or "" for d in deltas if d.tool_calls)
        reason: Any = chunks[-1].choices[0].finish_reason
    else:
        choice = client.chat.completions.create(**fields).choices[0]
        ((_, arguments),) = calls_of(choice.message)
        reason = choice.finish_reason
    assert (arguments, reason) == ('{"city": "', "length")


def test_the_shape_of_a_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "talk"}], tools=TOOLS, stream=True
        )
    )
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": None}
    text = [delta["content"] for delta in deltas[1:] if "content" in delta]
    assert len(text) > 1 and "".join(text) == "Let me see."
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    for index, name in enumerate(("weather", "now")):
        first, *rest = [call for call in calls if call["index"] == index]
        assert first["function"] == {"name": name, "arguments": ""} and first["type"] == "function"
        assert all(call.keys() == {"index", "function"} for call in rest)
        assert all(call["function"].keys() == {"arguments"} for call in rest)
        assert len(rest) > (1 if name == "weather" else 0)
    assert deltas[-1] == {} and chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_whole_conversation(client: openai.OpenAI, server: LiveServer) -> None:
    """The answer goes back as it came, with the results, as everyone's loop does it."""
    (choice,) = ask(client, False)
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"result {index}"}
        for index, call in enumerate(choice.message.tool_calls)
    ]
    conversation = [*MESSAGES, choice.message, *results]
    parts = {"role": "tool", "tool_call_id": results[0]["tool_call_id"]}
    conversation.append(parts | {"content": [{"type": "text", "text": "in parts"}]})
    client.chat.completions.create(model="tiny", messages=conversation, tools=TOOLS)
    prompt = bytes(server.engine.streams[-1].prompt).decode()
    assert "tool: result 0\ntool: result 1\ntool: in parts\n" in prompt and "'weather'" in prompt


def test_logprobs_go_along(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS, logprobs=True)
    assert whole.choices[0].logprobs is not None
    expected = [token.token for token in whole.choices[0].logprobs.content or ()]
    chunks = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS, logprobs=True, stream=True
    )
    found = [c.choices[0].logprobs for c in chunks]
    assert [t.token for logprobs in found if logprobs for t in logprobs.content or ()] == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 129}}]}, "tools.0.function.name"),
        ({"tools": [NOW, NOW]}, "tools.1.function.name"),
        ({"tools": [NOW] * 129}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
        ({"tools": [NOW | {"made_up": 1}]}, "tools.0.made_up"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice.type"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"functions": [{"name": "x"}]}, "functions"),
        ({"function_call": {"name": "x"}}, "function_call"),
    ],
)
def test_what_is_refused_by_name(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, False, **fields)
    assert caught.value.param == param
    if "function" in param and "functions" in fields:
        assert "tools" in caught.value.message


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "array"},
        {"properties": []},
        {"properties": {"a": "string"}},
        {"required": "a"},
        {"$defs": 1},
        {"properties": {"a": {"type": "strin"}}},
        {"properties": {"a": {"$ref": "#/$defs/none"}}},
    ],
)
def test_invalid_schemas_are_named(client: openai.OpenAI, parameters: Any) -> None:
    bad = {"type": "function", "function": {"name": "bad", "parameters": parameters}}
    for choice in ("required", {"type": "function", "function": {"name": "bad"}}):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, False, tools=[NOW, bad], tool_choice=choice)
        assert caught.value.param == "tools.1.function.parameters"


def test_schemas_may_be_too_large(client: openai.OpenAI) -> None:
    large = {"type": "function", "function": {"name": "f", "parameters": {"const": "x" * 1_000_000}}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, False, tools=[large], tool_choice="required")
    assert caught.value.param == "tools"


def test_a_response_format_leaves_the_choice_to_the_model(client: openai.OpenAI, server: LiveServer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["here"]}}}
    ask(client, False, response_format=form)
    grammar = server.engine.streams[-1].params.grammar
    assert grammar is not None and '"here"' in grammar.text and "<tool_call>" in grammar.text
    ask(client, False, response_format=form, tool_choice="required")
    grammar = server.engine.streams[-1].params.grammar
    assert grammar is not None and '"here"' not in grammar.text
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, False, extra_body={"structured_outputs": {"regex": "a+"}})
    assert caught.value.param == "tool_choice"


def test_allowed_tools(client: openai.OpenAI, server: LiveServer) -> None:
    names = [{"type": "function", "function": {"name": "now"}}]
    for mode in ("auto", "required"):
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": names}}
        ask(client, False, tool_choice=allowed)
        stream = server.engine.streams[-1]
        assert "weather" not in bytes(stream.prompt).decode()
        assert (stream.params.grammar is not None) == (mode == "required")
    with pytest.raises(openai.BadRequestError, match="other"):
        allowed["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "other"}}]  # type: ignore[index]
        ask(client, False, tool_choice=allowed)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "tool_call_id": "never", "content": "x"}, "messages.1.tool_call_id"),
        ({"role": "tool", "content": "x"}, "messages.1"),
        ({"role": "user", "content": "x", "tool_calls": [NAMED]}, "messages.1"),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "now", "arguments": ""}}]
                * 2,
            },
            "messages.1.tool_calls",
        ),
    ],
)
def test_messages_that_do_not_fit(client: openai.OpenAI, message: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=[*MESSAGES, message])
    assert str(caught.value.param).startswith(param)


def test_arguments_are_json(client: openai.OpenAI) -> None:
    (choice,) = ask(client, True, tool_choice=NAMED)
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Paris"}
