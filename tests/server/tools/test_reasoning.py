"""Reasoning on its way from the chat template to the client: in chats and responses, whole and streamed,
counted and bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import (
    ResponseCompletedEvent,
    ResponseReasoningItem,
    ResponseReasoningTextDeltaEvent,
    ResponseStreamEvent,
)
from pydantic import TypeAdapter
from starlette.testclient import TestClient
from tests.server.conftest import MakeClient, sse_events

from conftest import save_byte_tokenizer
from fakes import FakeAsyncEngine, FakeModel, model_of
from penstock import SamplingParams, Tokenizer
from penstock_server.prompts.questions import Question, read_chat, read_response
from penstock_server.protocol.requests import ChatCompletionRequest
from penstock_server.protocol.responses_request import ResponsesRequest
from penstock_server.settings.chat_rules import ChatRules, ReasoningChoice
from penstock_server.tools.reasoning import Reasoning, detect_format

USER = {"role": "user", "content": "Hi"}
THINK = "{{ '<think>' }} and {{ '</think>' }}"
TEMPLATES = {
    "think": THINK,
    "mistral": "[THINK]{{ thinking }}[/THINK]",
    "seed": "<seed:think>",
    "granite": "Write 'Here is my thought process:' first",
    "harmony": "<|start|>assistant<|channel|>analysis<|message|>",
    None: "{{ messages }}",
}
ANSWER = ["<thi", "nk>Hm", ", so.", "</think>", "\n\nFour", "."]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def thinking_model(template: str = THINK) -> FakeModel:
    model = FakeModel()
    model.tokenizer.tool_template = template
    return model


def client_of(make_client: MakeClient, *script: str, template: str = THINK, **settings: Any) -> TestClient:
    return make_client(FakeAsyncEngine(lambda *_: script, thinking_model(template)), **settings)


def chat(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/chat/completions", json={"messages": [USER]} | fields)


@pytest.mark.parametrize(("format", "template"), TEMPLATES.items())
def test_the_format_is_the_templates(format: str | None, template: str) -> None:
    assert detect_format(thinking_model(template).tokenizer) == format  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "choice", "last_turn", "expected"),
    [
        ("assistant\n<think>\n", "auto", None, ("think", True)),
        ("assistant\n", "auto", None, ("think", False)),
        ("assistant\n", "think", None, ("think", True)),
        ("assistant\n<think>\n\n</think>\n\n", "auto", None, None),
        ("assistant\n<think></think>", "think", None, None),
        ("user: what is <think>?\nassistant\n", "auto", None, ("think", False)),
        ("assistant\n", "none", None, None),
        ("assistant\n", "granite", None, ("granite", False)),
        ("assistant\n", "mistral", None, ("mistral", True)),
        ("<|start|>assistant", "harmony", None, ("harmony", True)),
        ("<think>Hm", "auto", "<think>Hm", ("think", True)),
        ("<think>Hm</think>Four", "auto", "<think>Hm</think>Four", None),
        ("It is", "auto", "It is", ("think", False)),
    ],
)
def test_what_the_prompt_says_of_the_thinking(
    prompt: str, choice: ReasoningChoice, last_turn: str | None, expected: tuple[str, bool] | None
) -> None:
    tokenizer: Any = thinking_model().tokenizer
    found = Reasoning.of(tokenizer, choice, list(prompt.encode()), last_turn)
    assert (found and (found.format, found.is_open)) == expected


def test_a_whole_answer(make_client: MakeClient) -> None:
    body = chat(client_of(make_client, *ANSWER)).json()
    message = body["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == "Hm, so."
    assert message["content"] == "\n\nFour." and body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("Hm, so.")
    hidden = chat(client_of(make_client, *ANSWER), include_reasoning=False).json()["choices"][0]["message"]
    assert hidden["content"] == "\n\nFour." and not {"reasoning", "reasoning_content"} & hidden.keys()
    left = chat(client_of(make_client, *ANSWER, reasoning_parser="none")).json()["choices"][0]["message"]
    assert left["content"] == "".join(ANSWER) and "reasoning" not in left
    cut = chat(client_of(make_client, *ANSWER), max_tokens=9).json()["choices"][0]
    assert (cut["message"]["content"], cut["message"]["reasoning"]) == (None, "Hm")
    # What comes back from a client is understood.
    assert chat(client_of(make_client, "Five."), messages=[USER, message, USER]).status_code == 200


def test_a_streamed_answer(make_client: MakeClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = chat(client_of(make_client, *ANSWER), stream=True, stream_options=options, n=2)
    *chunks, last, done = sse_events(answer.text)
    assert done == "[DONE]"
    for index in range(2):
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm, so."
        assert "".join(delta.get("reasoning") or "" for delta in deltas) == "Hm, so."
        assert "".join(delta.get("content") or "" for delta in deltas) == "\n\nFour."
        order = [key for delta in deltas for key in ("reasoning", "content") if delta.get(key)]
        assert order == sorted(order, reverse=True) and len(order) > 3
    counts = [c["usage"]["completion_tokens_details"]["reasoning_tokens"] for c in chunks]
    assert counts[-1] == len("Hm, so.") and 0 in counts
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 * len("Hm, so.")


def respond(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/responses", json={"input": "Hi"} | fields)


def test_the_openai_package_reads_it(make_client: MakeClient) -> None:
    """Its types have the items and events of reasoning; a chat's reasoning is an extra field."""
    chunks = sse_events(chat(client_of(make_client, *ANSWER), stream=True).text)[:-1]
    deltas = [ChatCompletionChunk.model_validate(chunk).choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm, so."
    lines = respond(client_of(make_client, *ANSWER), stream=True).text.split("\n")
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    adapter: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
    events = [adapter.validate_python(each) for each in data]
    thoughts = [event.delta for event in events if isinstance(event, ResponseReasoningTextDeltaEvent)]
    assert "".join(thoughts) == "Hm, so."
    done = events[-1]
    assert isinstance(done, ResponseCompletedEvent)
    thought = done.response.output[0]
    assert isinstance(thought, ResponseReasoningItem) and thought.content is not None
    assert thought.content[0].text == "Hm, so."


def test_a_response_has_an_item_of_reasoning(make_client: MakeClient) -> None:
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 0}
    body = respond(client_of(make_client, *ANSWER), **logprobs).json()
    thought, message = body["output"]
    assert (thought["type"], thought["summary"], thought["status"]) == ("reasoning", [], "completed")
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm, so."}]
    (text,) = message["content"]
    assert text["text"] == "\n\nFour."
    assert "".join(each["token"] for each in text["logprobs"]) == "\n\nFour."
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] == len("Hm, so.")
    following = [{"role": "user", "content": "Hi"}, *body["output"], {"role": "user", "content": "And?"}]
    assert respond(client_of(make_client, "Five."), input=following).status_code == 200

    lines = respond(client_of(make_client, *ANSWER), stream=True).text.split("\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [kind for kind in kinds if not kind.endswith("delta")] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.done", "content_part.done"),
        *("output_item.done", "completed"),
    ]
    thoughts = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(thoughts) == "Hm, so." and len(thoughts) > 1
    assert events[-1]["response"]["output"][0]["content"] == thought["content"]


def test_calls_behind_the_thinking(make_client: MakeClient) -> None:
    script = ["<think>I call.", '<tool_call>{"name": "f", "arguments": {}}', "</tool_call>"]
    client = client_of(make_client, *script, tool_call_parser="hermes")
    choice = chat(client, tools=TOOLS).json()["choices"][0]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("I call.", None)
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"
    assert choice["finish_reason"] == "tool_calls"
    forced = ["<think>I must.", "</think>", '[{"name": "f", "parameters": {}}]']
    choice = chat(client_of(make_client, *forced), tools=TOOLS, tool_choice="required").json()["choices"][0]
    assert choice["message"]["reasoning"] == "I must." and len(choice["message"]["tool_calls"]) == 1


def test_harmony_on_its_way_to_the_client(make_client: MakeClient) -> None:
    script = [
        "<|channel|>analysis<|message|>I ca",
        "ll.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|mess",
        'age|>{"a":',
        " 1}",
    ]
    template = "{{ tools }}" + TEMPLATES["harmony"]
    choice = chat(client_of(make_client, *script, template=template), tools=TOOLS).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("f", '{"a": 1}')
    assert choice["message"]["reasoning"] == "I call." and choice["finish_reason"] == "tool_calls"
    named = {"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": TOOLS}
    message = chat(client_of(make_client, *script, template=template), **named).json()["choices"][0][
        "message"
    ]
    assert [each["function"]["arguments"] for each in message["tool_calls"]] == ['{"a": 1}']
    final = ["<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", "<|channel|>final<|message|>Four."]
    message = chat(client_of(make_client, *final, template=template)).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Four.")
    unread = client_of(make_client, *script, template=template, reasoning_parser="none")
    message = chat(unread, tools=TOOLS).json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1


def ask(template: str = THINK, **fields: Any) -> Question:
    body = ChatCompletionRequest.model_validate({"messages": [USER]} | fields)
    return read_chat(model_of(thinking_model(template)), body, ChatRules())


def params_of(**fields: Any) -> SamplingParams:
    return ask(**fields).params[0]


def test_a_grammar_begins_behind_the_thinking() -> None:
    assert params_of().thinking is None
    thinking = params_of(response_format={"type": "json_object"}).thinking
    assert thinking is not None and (thinking.opener, thinking.closer) == ("<think>", "</think>")
    assert thinking.max_tokens is None and not thinking.is_open
    assert params_of(tools=TOOLS, tool_choice="required").thinking is not None
    assert params_of(template="plain", response_format={"type": "json_object"}).thinking is None
    harmony = params_of(template=TEMPLATES["harmony"], response_format={"type": "json_object"}).thinking
    assert harmony is not None and harmony.is_open
    assert bytes(harmony.forced + harmony.lead).endswith(b"<|channel|>final<|message|>")


def test_a_budget_of_harmony_ends_a_whole_message() -> None:
    """The limit has room for the head; without any thinking, the first message is the answer."""
    none, some = (params_of(template=TEMPLATES["harmony"], thinking_token_budget=n).thinking for n in (0, 5))
    assert none is not None and some is not None
    assert (none.max_tokens, bytes(none.forced)) == (0, b"<|channel|>final")
    assert some.max_tokens == 8
    assert bytes(some.forced + some.lead) == b"<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("fields", "budget", "is_enabled"),
    [
        ({"thinking_token_budget": 5}, 5, None),
        ({"max_thinking_tokens": 6}, 6, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, 7, True),
        ({"thinking": {"type": "disabled"}}, 0, False),
        ({"thinking": {"type": "adaptive"}}, None, None),
        ({"reasoning_effort": "none"}, 0, False),
        ({"reasoning_effort": "high"}, None, True),
        ({"thinking_token_budget": 5, "reasoning_effort": "none"}, 0, False),
    ],
)
def test_budgets(fields: dict[str, Any], budget: int | None, is_enabled: bool | None) -> None:
    thinking = params_of(**fields).thinking
    assert (thinking and thinking.max_tokens) == budget
    if thinking is not None:
        assert bytes(thinking.forced) == b"</think>"
    body = ChatCompletionRequest.model_validate({"messages": [USER]} | fields)
    assert body.as_conversation.template_kwargs.get("enable_thinking") == is_enabled


def test_budgets_of_responses() -> None:
    for fields, budget in (({"thinking_token_budget": 5}, 5), ({"reasoning": {"effort": "none"}}, 0)):
        body = ResponsesRequest.model_validate({"input": "Hi"} | fields)
        thinking = read_response(model_of(thinking_model()), body, ChatRules()).params[0].thinking
        assert thinking is not None and thinking.max_tokens == budget


def test_markers_that_are_special_tokens_are_in_the_text(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    backend = Tokenizer.load(tmp_path).backend
    backend.add_special_tokens({"extra_special_tokens": ["[THINK]", "[/THINK]"]})
    special = Tokenizer(backend, frozenset({1}))
    reasoning = Reasoning("mistral", False, special)
    params = SamplingParams(skip_special_tokens=True)
    assert not reasoning.bind(params, None).skip_special_tokens
    assert Reasoning("think", False, special).bind(params, None).skip_special_tokens
    counter = reasoning.counter()
    counter.add(special.encode("[THINK]ab c[/THINK]It is.", add_special_tokens=False))
    thought = special.encode("ab c", add_special_tokens=False)
    assert (counter.num_tokens, counter.num_before_answer) == (len(thought), len(thought) + 2)
    bound = reasoning.bind(SamplingParams(), 3).thinking
    assert bound is not None and len(bound.forced) == 1 and bound.opener_id is not None
    assert json.dumps(bound.token_ids)
