"""/v1/messages and /v1/messages/count_tokens with the real `anthropic` package over a socket, and a session
in the form in which Claude Code sends it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from fakes import FakeAsyncEngine, FakeModel, Script
from penstock.errors import EngineDead
from penstock.generation.requests.generation_request import SamplingParams

from ..test_openai_package import LiveServer
from ..tools.chat_templates import HERMES

anthropic = pytest.importorskip("anthropic", reason="the extra dev has the package")

CALL = '<tool_call>\n{"name": "Read", "arguments": {"file_path": "/a.py"}}\n</tool_call>'
READ: dict[str, Any] = {
    "name": "Read",
    "description": "Reads a file.",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"file_path": {"type": "string"}},
        "required": ["file_path"],
        "additionalProperties": False,
    },
}
HI: list[Any] = [{"role": "user", "content": "Hi"}]


def script_of(prompt: list[int], params: SamplingParams) -> Script:
    text = bytes(prompt).decode()
    last = text.rpartition("user")[2]
    if "wait" in text:
        return ["Hel", asyncio.Event()]
    if "fail" in text:
        return ["Hel", EngineDead("secret")]
    if params.grammar is not None:
        return ['{"file_path"', ': "/b.py"}']
    if "Fix" in last and "tool:" not in last:
        answer = f"I read it.\n{CALL}"
        return [answer[i : i + 4] for i in range(0, len(answer), 4)]
    return ["Hel", "lo", "!"]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    model = FakeModel(max_model_len=20_000)
    model.tokenizer.tool_template = HERMES
    with LiveServer(FakeAsyncEngine(script_of, model), sse_keep_alive=0.05) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.root, api_key="key", max_retries=0, timeout=60) as client:
        yield client


def prompt_of(server: LiveServer) -> str:
    return bytes(server.engine.streams[-1].prompt).decode()


def ask(client: Any, is_streamed: bool = False, **fields: Any) -> Any:
    """The message; that of a stream is added up by the package itself."""
    fields = {"model": "tiny", "messages": HI, "max_tokens": 100} | fields
    if not is_streamed:
        return client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        return stream.get_final_message()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_message(client: Any, server: LiveServer, is_streamed: bool) -> None:
    answer = ask(
        client,
        is_streamed,
        system=[{"type": "text", "text": "Be kind", "cache_control": {"type": "ephemeral"}}],
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 40},  # of which the package knows no more
        stop_sequences=["END"],
        metadata={"user_id": "u"},
        service_tier="auto",
    )
    assert [block.model_dump(exclude_none=True) for block in answer.content] == [
        {"type": "text", "text": "Hello!"}
    ]
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == ("assistant", "end_turn", None)
    assert answer.id.startswith("msg_") and answer.model == "tiny"
    assert prompt_of(server) == "system: Be kind\nuser: Hi\nassistant:"
    params = server.engine.streams[-1].params
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (0.5, 0.9, 40, ("END",))
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(prompt_of(server))
    assert usage.output_tokens == 7


def test_guesses_can_be_turned_off(client: Any, server: LiveServer) -> None:
    for body, expected in ({}, True), ({"speculation": False}, False), ({"speculation": None}, True):
        ask(client, extra_body=body)
        assert server.engine.streams[-1].params.speculation is expected
    with pytest.raises(anthropic.BadRequestError, match="speculation"):
        ask(client, extra_body={"speculation": "off"})


@pytest.mark.parametrize("is_streamed", [False, True])
def test_where_an_answer_ends(client: Any, is_streamed: bool) -> None:
    assert ask(client, is_streamed, max_tokens=3).stop_reason == "max_tokens"
    full = ask(client, is_streamed, messages=[{"role": "user", "content": "x" * 19_974}], max_tokens=32_000)
    assert full.stop_reason == "end_turn", "a limit beyond the context is no reason to refuse"


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(("number", "maximum"), [(20_000, 19_999), (20_001, 20_000), (20_016, 20_000)])
def test_a_full_context_has_anthropics_own_sentence(
    client: Any, is_streamed: bool, number: int, maximum: int
) -> None:
    """Claude Code looks for it, and for the two numbers, and makes room then."""
    text = "x" * (number - len("user: \nassistant:"))
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, is_streamed, messages=[{"role": "user", "content": text}])
    error = caught.value.body
    assert error["error"] == {
        "type": "invalid_request_error",
        "message": f"prompt is too long: {number} tokens > {maximum} maximum",
    }
    assert error["type"] == "error" and error["request_id"]


def test_what_can_not_be_counted_is_too_long(client: Any) -> None:
    longer = [{"role": "user", "content": "x" * 30_000}]
    assert client.messages.count_tokens(model="tiny", messages=longer).input_tokens == 30_017
    for fields in ({"messages": [{"role": "user", "content": "x" * 70_000}]}, {"system": "x" * 70_000}):
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.count_tokens(**{"model": "tiny", "messages": HI} | fields)
        said = caught.value.body["error"]["message"]
        assert (found := re.fullmatch(r"prompt is too long: (\d+) tokens > 20000 maximum", said)) is not None
        assert int(found[1]) >= 70_000


def test_the_begin_of_an_answer_can_be_given(client: Any, server: LiveServer) -> None:
    ask(client, messages=[*HI, {"role": "assistant", "content": "He"}])
    assert prompt_of(server).endswith("assistant: He...")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_calls_and_their_results(client: Any, server: LiveServer, is_streamed: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "Fix it"}]
    answer = ask(client, is_streamed, messages=messages, tools=[READ])
    text, call = answer.content
    assert (text.type, text.text.strip()) == ("text", "I read it.")
    assert (call.type, call.name, call.input) == ("tool_use", "Read", {"file_path": "/a.py"})
    assert answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "x = 1"}]}
    behind = {"type": "text", "text": "Thanks"}
    messages.append({"role": "assistant", "content": answer.content})
    messages.append({"role": "user", "content": [result, behind]})
    assert ask(client, is_streamed, messages=messages, tools=[READ]).content[0].text == "Hello!"
    assert "\ntool: x = 1\nuser: Thanks\n" in prompt_of(server)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_call_that_must_be_made(client: Any, is_streamed: bool) -> None:
    choice = {"type": "tool", "name": "Read", "disable_parallel_tool_use": True}
    answer = ask(client, is_streamed, tools=[READ], tool_choice=choice)
    assert answer.content[0].input == {"file_path": "/b.py"} and answer.stop_reason == "tool_use"


def test_a_call_that_is_no_json(client: Any, make_client: Any) -> None:
    model = FakeModel()
    model.tokenizer.tool_template = HERMES
    broken = '<tool_call>\n{"name": "Read", "arguments": {"file_path": x}}\n</tool_call>'
    test_client = make_client(FakeAsyncEngine(lambda *_: [broken], model))
    body = {"messages": HI, "max_tokens": 90, "tools": [READ]}
    (block,) = test_client.post("/v1/messages", json=body).json()["content"]
    assert block["input"] == {"INVALID_JSON": '{"file_path": x}'}


def test_a_form_that_the_answer_must_have(client: Any, server: LiveServer) -> None:
    form = {"type": "json_schema", "schema": READ["input_schema"]}
    answer = ask(client, output_config={"format": form, "effort": "low"})
    assert json.loads(answer.content[0].text) == {"file_path": "/b.py"}
    assert "('reasoning_effort', 'low')" in prompt_of(server)


def test_thinking_is_asked_for_and_shown_again(client: Any, server: LiveServer) -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    said = [thought, {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Hello"}]
    messages = [*HI, {"role": "assistant", "content": said}, {"role": "user", "content": "More"}]
    ask(client, messages=messages, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000)
    assert "[('enable_thinking', True)]" in prompt_of(server)
    ask(client, messages=messages, thinking={"type": "disabled"})
    assert "[('enable_thinking', False)]" in prompt_of(server)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_thinking_is_a_block_of_its_own(is_streamed: bool) -> None:
    model = FakeModel()
    model.tokenizer.tool_template = "{{ '<think>' }} and {{ '</think>' }}"
    script = ["<thi", "nk>Hm", ", so.", "</think>", "\n\nFour", "."]
    with LiveServer(FakeAsyncEngine(lambda *_: script, model), api_key=()) as server:
        client = anthropic.Anthropic(base_url=server.root, api_key="key", timeout=60)
        thinking, text = (answer := ask(client, is_streamed)).content
    assert (thinking.type, thinking.thinking, thinking.signature) == ("thinking", "Hm, so.", "")
    assert (text.type, text.text.strip()) == ("text", "Four.") and answer.stop_reason == "end_turn"
    assert 0 < answer.usage.output_tokens_details.thinking_tokens < answer.usage.output_tokens


def test_tokens_are_counted(client: Any) -> None:
    count = client.messages.count_tokens(model="tiny", messages=HI, system="Be kind").input_tokens
    assert count == len("system: Be kind\nuser: Hi\nassistant:")
    assert client.messages.count_tokens(model="tiny", messages=HI, tools=[READ]).input_tokens > count


def test_errors_are_those_of_the_package(client: Any, server: LiveServer) -> None:
    with pytest.raises(anthropic.NotFoundError, match="no model 'other'") as caught:
        ask(client, model="other")
    assert caught.value.body["error"]["type"] == "not_found_error" and caught.value.body["request_id"]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0.*'image' blocks"):
        ask(client, messages=[{"role": "user", "content": [image]}])
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    with pytest.raises(anthropic.BadRequestError, match="a result of 't'"):
        ask(client, messages=[{"role": "user", "content": [result | {"content": "x"}]}])
    with pytest.raises(anthropic.BadRequestError, match=r"tools\.2\.name"):
        ask(client, tools=[READ, {"type": "web_search_20250305", "name": "w"}, READ])
    with pytest.raises(anthropic.AuthenticationError):
        ask(client.with_options(api_key="wrong"))
    with pytest.raises(anthropic.APIStatusError, match="engine has stopped"):
        ask(client, messages=[{"role": "user", "content": "fail"}])
    with pytest.raises(anthropic.APIStatusError, match="engine has stopped"):
        ask(client, True, messages=[{"role": "user", "content": "fail"}])
    unknown = httpx2.post(f"{server.root}/v1/messages/batches", headers={"X-Api-Key": "key"})
    assert unknown.json()["type"] == "error" and unknown.json()["error"]["type"] == "not_found_error"


def test_pings_come_until_the_answer_goes_on(client: Any, server: LiveServer) -> None:
    """The stream begins with the message, and a client that leaves frees its sequence."""
    body = {"messages": [{"role": "user", "content": "wait"}], "max_tokens": 9, "stream": True}
    names = []
    with httpx2.stream(
        "POST", f"{server.root}/v1/messages", json=body, headers={"Authorization": "Bearer key"}
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("event: "):
                names.append(line.removeprefix("event: "))
            if names.count("ping") > 2:
                break
    assert names[:4] == ["message_start", "ping", "content_block_start", "content_block_delta"]
    server.wait_for_aborts(1)


# -- a session of Claude Code -------------------------------------------------------------------

CACHED = {"type": "ephemeral"}
HEADERS = {
    "Authorization": "Bearer key",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "user-agent": "claude-cli/2.1.0 (external, cli)",
    "x-app": "cli",
}
SYSTEM = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch=1a2b3;"},
    {"type": "text", "text": "You are Claude Code.", "cache_control": CACHED},
    {"type": "text", "text": "Use the tools.", "cache_control": CACHED | {"ttl": "1h"}},
]
NAMES = ("Bash", "Edit", "Glob", "Grep", "Task", "TodoWrite", "WebFetch", "Write", "mcp__github__list_issues")
TOOLS = [READ, *({**READ, "name": name, "eager_input_streaming": True} for name in NAMES)]


def claude_code(server: LiveServer, messages: list[Any], **fields: Any) -> httpx2.Response:
    body = {
        "model": "tiny",
        "messages": messages,
        "system": SYSTEM,
        "tools": [*TOOLS, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "metadata": {"user_id": '{"device_id":"d","session_id":"s"}'},
        "max_tokens": 32_000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "stream": True,
    }
    return httpx2.post(f"{server.root}/v1/messages?beta=true", json=body | fields, headers=HEADERS)


def events_of(answer: httpx2.Response) -> list[dict[str, Any]]:
    lines = answer.text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def test_a_session_of_claude_code(server: LiveServer) -> None:
    counted = httpx2.post(
        f"{server.root}/v1/messages/count_tokens?beta=true",
        json={"model": "tiny", "messages": HI, "tools": [], "system": SYSTEM},
        headers=HEADERS,
    )
    assert counted.json()["input_tokens"] > 0
    reminder = {"type": "text", "text": "<system-reminder>The date.</system-reminder>"}
    asked = {"type": "text", "text": "Fix it", "cache_control": CACHED}
    messages: list[Any] = [{"role": "user", "content": [reminder, asked]}]
    first = claude_code(server, messages)
    assert first.headers["x-penstock-ignored"] == f"tools.{len(TOOLS)} (web_search_20250305)"
    assert "billing" not in prompt_of(server) and "You are Claude Code.\nUse the tools." in prompt_of(server)
    events = events_of(first)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    started = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    pieces = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    text = "".join(piece.get("text", "") for piece in pieces)
    arguments = json.loads("".join(piece.get("partial_json", "") for piece in pieces))
    call = started[1] | {"input": arguments}
    messages += [
        {"role": "assistant", "content": [{"type": "text", "text": text}, call]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": call["id"],
                    "content": "no such file",
                    "is_error": True,
                    "cache_control": CACHED,
                }
            ],
        },
    ]
    second = events_of(claude_code(server, messages))
    assert [event["delta"]["text"] for event in second if event["type"] == "content_block_delta"] == [
        "Hel",
        "lo",
        "!",
    ]
    assert second[-2]["delta"]["stop_reason"] == "end_turn"
    assert "tool: Error: no such file" in prompt_of(server)
    title = claude_code(server, HI, tools=[], stream=False, max_tokens=512, thinking={"type": "disabled"})
    assert title.json()["content"][0]["text"] == "Hello!" and "x-penstock-ignored" not in title.headers
