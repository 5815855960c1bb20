"""A session in the form in which Codex CLI sends it to /v1/responses: its tools of all kinds, the items of
its answers back in the input, and the events that it reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from fakes import FakeAsyncEngine, FakeModel, Script
from penstock.generation.requests.generation_request import SamplingParams

from .conftest import MakeClient
from .tools.chat_templates import HERMES

SESSION = "019a0000-0000-7000-8000-000000000001"
OBJECT = {"type": "object", "properties": {"query": {"type": "string"}}, "additionalProperties": False}
SHELL = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command in a PTY.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"cmd": {"type": "string", "description": "Shell command."}},
        "required": ["cmd"],
        "additionalProperties": False,
    },
}
SEARCH = {"type": "function", "name": "search", "description": "", "strict": False, "parameters": OBJECT}
TOOLS: list[dict[str, Any]] = [
    SHELL,
    {
        "type": "namespace",
        "name": "mcp__docs",
        "description": "Docs.",
        "tools": [SEARCH | {"defer_loading": True}],
    },
    {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": OBJECT},
    {"type": "web_search", "external_web_access": False, "search_content_types": ["text"]},
    {"type": "image_generation", "output_format": "png"},
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
    },
    {"type": "local_shell"},
]
LEFT_OUT = (
    "tools.2 (tool_search), tools.3 (web_search), tools.4 (image_generation), tools.5 (custom), "
    "tools.6 (local_shell)"
)


def message(role: str, *texts: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


def script_of(prompt: list[int], params: SamplingParams) -> Script:
    """First a command, then a search in the documentation, then words."""
    text = bytes(prompt).decode()
    call = '<tool_call>\n{{"name": "{}", "arguments": {{"{}": "{}"}}}}\n</tool_call>'
    if "tool: a.py" not in text:
        answer = "I look.\n" + call.format("exec_command", "cmd", "ls")
    elif "tool: nothing" not in text:
        answer = call.format("mcp__docs__search", "query", "a.py")
    else:
        answer = "Done."
    return [answer[i : i + 6] for i in range(0, len(answer), 6)]


class Codex:
    """As much of Codex as sends requests and keeps the history."""

    def __init__(self, client: TestClient) -> None:
        self._client = client
        self.ignored = ""
        self.history = [
            message("developer", "<permissions>Ask first.</permissions>"),
            message("user", "# AGENTS.md", "<environment_context>bash</environment_context>"),
            message("user", "What is here?"),
        ]

    def turn(self, **fields: Any) -> list[dict[str, Any]]:
        """The items that the model answers with; they are part of the history then."""
        body = {
            "model": "tiny",
            "instructions": "You are Codex.",
            "input": self.history,
            "tools": TOOLS,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto", "context": "all_turns"},
            "store": False,
            "stream": True,
            "stream_options": {"reasoning_summary_delivery": "sequential_cutoff"},
            "include": ["reasoning.encrypted_content"],
            "service_tier": "priority",
            "prompt_cache_key": SESSION,
            "text": {"verbosity": "medium"},
            "client_metadata": {"x-codex-installation-id": "i", "session_id": SESSION},
            "access_programs": ["preview"],
        }
        headers = {"originator": "codex_cli_rs", "session-id": SESSION, "Accept": "text/event-stream"}
        answer = self._client.post("/v1/responses", json=body | fields, headers=headers)
        assert answer.status_code == 200, answer.text
        self.ignored = answer.headers.get("x-penstock-ignored", "")
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.completed"
        assert events[-1]["response"]["usage"]["total_tokens"] > 0
        items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        for item in items:  # Codex sends ids and statuses of its own servers alone
            self.history.append({key: item[key] for key in item if key not in ("id", "status")})
        return items

    def result(self, call: dict[str, Any], output: Any) -> None:
        self.history.append({"type": "function_call_output", "call_id": call["call_id"], "output": output})


@pytest.fixture
def engine() -> FakeAsyncEngine:
    model = FakeModel(max_model_len=10_000)
    model.tokenizer.tool_template = HERMES
    return FakeAsyncEngine(script_of, model)


def test_a_session(make_client: MakeClient, engine: FakeAsyncEngine) -> None:
    codex = Codex(make_client(engine))
    said, command = codex.turn()
    assert codex.ignored == LEFT_OUT
    assert (said["type"], said["content"][0]["text"].strip()) == ("message", "I look.")
    assert (command["name"], json.loads(command["arguments"])) == ("exec_command", {"cmd": "ls"})
    assert "namespace" not in command
    codex.result(command, "a.py")
    (search,) = codex.turn()
    assert (search["namespace"], search["name"]) == ("mcp__docs", "search"), "as Codex knows it"
    codex.result(search, [{"type": "input_text", "text": "nothing"}])
    (last,) = codex.turn()
    assert last["content"][0]["text"] == "Done."
    schema = {"type": "json_schema", "strict": True, "name": "codex_output_schema", "schema": OBJECT}
    codex.turn(tools=[], text={"format": schema})
    assert codex.ignored == ""
    prompt = bytes(engine.streams[-1].prompt).decode()
    assert prompt.startswith("system: You are Codex.\n\n<permissions>")


def test_tools_that_can_not_be_offered_can_be_refused(
    make_client: MakeClient, engine: FakeAsyncEngine
) -> None:
    client = make_client(engine, refuse_unsupported_tools=True)
    error = client.post("/v1/responses", json={"input": "x", "tools": TOOLS}).json()["error"]
    assert error["param"] == "tools.2" and "tools.5 (custom)" in error["message"]
    assert client.post("/v1/responses", json={"input": "x", "tools": TOOLS[:2]}).status_code == 200


def test_an_answer_that_is_not_streamed_has_namespaces_too(
    make_client: MakeClient, engine: FakeAsyncEngine
) -> None:
    items = [message("user", "tool: a.py")]
    answer = make_client(engine).post("/v1/responses", json={"input": items, "tools": TOOLS}).json()
    (call,) = answer["output"]
    assert (call["namespace"], call["name"]) == ("mcp__docs", "search")
    assert [tool["type"] for tool in answer["tools"]] == [tool["type"] for tool in TOOLS]
