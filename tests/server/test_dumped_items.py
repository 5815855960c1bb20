"""What clients send back: the server's own answers as the real packages dump them, null members included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest
from pydantic import BaseModel

from fakes import FakeAsyncEngine, FakeModel, Script
from penstock.generation.requests.generation_request import SamplingParams

from .test_openai_package import LiveServer
from .tools.chat_templates import HERMES

ANSWER = (
    "<think>Hm.</think>I look.\n<tool_call>\n{"
    + '"name": "look", "arguments": {"at": "x"}'
    + "}\n</tool_call>"
)
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
ASKED: dict[str, Any] = {"role": "user", "content": "Hi"}
MORE: dict[str, Any] = {"role": "user", "content": "More"}
SHOWN = "\nassistant: I look.\n"


class Place(BaseModel):
    at: str


STRICT = Place.model_json_schema() | {"additionalProperties": False}


def script_of(prompt: list[int], params: SamplingParams) -> Script:
    return ["Done."] if b"More" in bytes(prompt) else [ANSWER]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    model = FakeModel(max_model_len=4000)
    model.tokenizer.tool_template = HERMES + "{{ '<think>' }} and {{ '</think>' }}"
    with LiveServer(FakeAsyncEngine(script_of, model), api_key=()) as server:
        yield server


def prompt(server: LiveServer) -> str:
    return bytes(server.engine.streams[-1].prompt).decode()


def strange(dumped: Any) -> Any:
    """The dump of a newer package: each object has one more member, which is null."""
    if isinstance(dumped, list):
        return [strange(item) for item in dumped]
    if not isinstance(dumped, dict) or "at" in dumped:  # the arguments are the model's own
        return dumped
    return {name: strange(value) for name, value in dumped.items()} | {"not_known_yet": None}


# -- openai: chat -------------------------------------------------------------------------------


@pytest.fixture
def chat(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="key", max_retries=0) as client:
        yield client


def chat_message(client: openai.OpenAI, kind: str) -> Any:
    fields: dict[str, Any] = {"model": "tiny", "messages": [ASKED], "tools": TOOLS}
    if kind == "stream":
        with client.chat.completions.stream(**fields) as stream:
            return stream.get_final_completion().choices[0].message
    if kind == "parse":
        strict = [{"type": "function", "function": FUNCTION | {"strict": True, "parameters": STRICT}}]
        return client.chat.completions.parse(**fields | {"tools": strict}).choices[0].message
    return client.chat.completions.create(**fields).choices[0].message


@pytest.mark.parametrize("is_newer", [False, True])
@pytest.mark.parametrize("kind", ["create", "stream", "parse"])
def test_a_message_of_openais_package(
    chat: openai.OpenAI, server: LiveServer, kind: str, is_newer: bool
) -> None:
    message = chat_message(chat, kind)
    assert message.tool_calls[0].function.name == "look" and message.reasoning_content == "Hm."
    dumped = message.model_dump()
    assert dumped["audio"] is None and dumped["function_call"] is None
    dumped = strange(dumped) if is_newer else dumped
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "seen", "name": None}
    answer = chat.chat.completions.create(model="tiny", messages=[ASKED, dumped, result, MORE], tools=TOOLS)
    assert answer.choices[0].message.content == "Done." and SHOWN in prompt(server)
    assert "tool: seen" in prompt(server)


def test_a_refusal_a_parsed_answer_and_one_with_annotations(chat: openai.OpenAI, server: LiveServer) -> None:
    from openai.types.chat import ChatCompletionMessage, ParsedChatCompletionMessage

    yes = {"role": "assistant", "content": "Yes."}
    source = {"start_index": 0, "end_index": 1, "title": "t", "url": "u"}
    cited = {"type": "url_citation", "url_citation": source}
    parsed = ParsedChatCompletionMessage[Place](role="assistant", content='{"at": "x"}', parsed=Place(at="x"))
    for message, shown in (
        (ChatCompletionMessage(role="assistant", refusal="No."), "assistant: No."),
        (ChatCompletionMessage.model_validate(yes | {"annotations": [cited]}), "assistant: Yes."),
        (parsed, 'assistant: {"at": "x"}'),
    ):  # fmt: skip
        messages: list[Any] = [ASKED, strange(message.model_dump()), MORE]
        answer = chat.chat.completions.create(model="tiny", messages=messages, logprobs=True)
        assert answer.choices[0].message.content == "Done." and shown in prompt(server)


def test_null_is_no_value_for_what_must_be_there(chat: openai.OpenAI) -> None:
    for wrong, place in (
        ({"role": None, "content": "x"}, "messages.0.role"),
        ({"role": "user", "content": None}, "messages.0"),
        ({"role": "assistant", "tool_calls": [{"id": None, "function": {"name": "f", "arguments": "{}"}}]},
         "messages.0.tool_calls.0.id"),
    ):  # fmt: skip
        messages: list[Any] = [wrong]
        with pytest.raises(openai.BadRequestError) as refused:
            chat.chat.completions.create(model="tiny", messages=messages)
        assert refused.value.param == place
    with pytest.raises(openai.BadRequestError, match="no such field"):
        chat.chat.completions.create(model="tiny", messages=[{**ASKED, "not_known_yet": 1}])  # type: ignore[typeddict-unknown-key,list-item,misc]


# -- openai: responses --------------------------------------------------------------------------


@pytest.mark.parametrize("is_newer", [False, True])
@pytest.mark.parametrize("kind", ["create", "stream", "parse", "logprobs"])
def test_items_of_openais_package(chat: openai.OpenAI, server: LiveServer, kind: str, is_newer: bool) -> None:
    fields: dict[str, Any] = {"model": "tiny", "input": [ASKED], "tools": [{"type": "function", **FUNCTION}]}
    if kind == "stream":
        with chat.responses.stream(**fields) as stream:
            response: Any = stream.get_final_response()
    elif kind == "parse":
        flat = {"type": "function", **FUNCTION, "strict": True, "parameters": STRICT}
        response = chat.responses.parse(**fields | {"tools": [flat]})
    elif kind == "logprobs":
        del fields["tools"]
        response = chat.responses.create(**fields, include=["message.output_text.logprobs"])
    else:
        response = chat.responses.create(**fields)
    items = [item.model_dump() for item in response.output]
    assert [item["type"] for item in items][:2] == ["reasoning", "message"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "seen", "id": None}
        for item in items
        if item["type"] == "function_call"
    ]
    sent = strange(items) if is_newer else items
    answer = chat.responses.create(model="tiny", input=[ASKED, *sent, *results, MORE])  # type: ignore[list-item]
    assert answer.output_text == "Done." and "assistant: I look." in prompt(server)
    assert bool(results) == ("tool: seen" in prompt(server)) == (kind != "logprobs")


# -- anthropic ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_newer", [False, True])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_blocks_of_anthropics_package(server: LiveServer, is_streamed: bool, is_newer: bool) -> None:
    tools: list[Any] = [{"name": "look", "input_schema": SCHEMA}]
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "tools": tools}
    with anthropic.Anthropic(base_url=server.root, api_key="key", max_retries=0) as client:
        if is_streamed:
            with client.messages.stream(messages=[ASKED], **fields) as stream:  # type: ignore[list-item]
                message: Any = stream.get_final_message()
        else:
            message = client.messages.create(messages=[ASKED], **fields)
        blocks = [block.model_dump() for block in message.content]
        assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
        result = {"type": "tool_result", "tool_use_id": blocks[2]["id"], "content": "seen", "is_error": None}
        sent = strange(blocks) if is_newer else blocks
        messages = [
            ASKED,
            {"role": "assistant", "content": sent},
            {"role": "user", "content": [result]},
            MORE,
        ]
        answer = client.messages.create(messages=messages, **fields)
    assert answer.content[0].text == "Done." and SHOWN in prompt(server) and "tool: seen" in prompt(server)


# -- ollama -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_newer", [False, True])
def test_a_message_of_ollamas_package(server: LiveServer, is_newer: bool) -> None:
    client = ollama.Client(host=server.root)
    message = client.chat("tiny", [ASKED], tools=TOOLS).message
    assert message.tool_calls and message.thinking == "Hm."
    dumped = strange(message.model_dump()) if is_newer else message.model_dump()
    result = {"role": "tool", "content": "seen", "tool_name": "look", "images": None}
    answer = client._client.post(
        "/api/chat",
        json={"model": "tiny", "messages": [ASKED, dumped, result, MORE], "tools": TOOLS, "stream": False},
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["message"]["content"] == "Done." and SHOWN in prompt(server)
    assert "x-penstock-ignored" not in answer.headers
