"""The items of /v1/responses: which are understood, and the turns that they are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from penstock_server.protocol.conversation import Turn
from penstock_server.protocol.responses_request import ResponsesRequest

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "id": "fc_1"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "42"}


def request(items: list[Any]) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"input": items})


def turns_of(items: list[Any]) -> tuple[Turn, ...]:
    return request(items).as_conversation.turns


def test_items_of_all_spellings() -> None:
    answer = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
    }
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    items = [{"role": "developer", "content": "Be kind"}, answer, refusal, {"role": "user", "content": parts}]
    assert [(turn.role, turn.text) for turn in turns_of(items)] == [
        ("system", "Be kind"),
        ("assistant", "Hello"),
        ("assistant", "No."),
        ("user", "a\nb"),
    ]


@pytest.mark.parametrize(
    ("item", "name"),
    [
        ({"type": "telepathy_call", "id": "x"}, "telepathy_call"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input_image"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}, "input_file"),
    ],
)
def test_items_and_parts_of_other_types_are_named(item: Any, name: str) -> None:
    with pytest.raises(ValidationError, match=f"'{name}' (items|parts) are not supported"):
        request([item])


def test_calls_are_part_of_the_assistants_message() -> None:
    said = {"role": "assistant", "content": "Let me see."}
    second, result = CALL | {"call_id": "c2"}, RESULT | {"call_id": "c2", "output": [PART]}
    user, last = {"role": "user", "content": "x"}, CALL | {"call_id": "c3"}
    _, first, one, two, third = turns_of([user, said, CALL, second, RESULT, result, last])
    assert first.text == "Let me see." and [call.call_id for call in first.calls] == ["c1", "c2"]
    assert [(each.role, each.call_id, each.text) for each in (one, two)] == [
        ("tool", "c1", "42"),
        ("tool", "c2", "7"),
    ]
    assert third.role == "assistant" and third.calls


PART = {"type": "input_text", "text": "7"}


def test_reasoning_is_part_of_the_assistants_message_behind_it() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Short."}]}
    whole = thought | {"content": [{"type": "reasoning_text", "text": each} for each in ("One.", "Two.")]}
    empty = {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": None}
    user = {"role": "user", "content": "x"}
    said = {"role": "assistant", "content": "Yes."}
    turns = turns_of([user, thought, whole, empty, said, user, thought, CALL, RESULT, empty, said])
    told = [(each.role, each.reasoning, each.text) for each in turns]
    assert told == [
        ("user", None, "x"),
        ("assistant", "Short.\nOne.\nTwo.", "Yes."),
        ("user", None, "x"),
        ("assistant", "Short.", ""),
        ("tool", None, "42"),
        ("assistant", None, "Yes."),
    ]
    assert [call.call_id for call in turns[3].calls] == ["c1"]
    secret = thought | {"summary": [], "encrypted_content": "abc"}
    assert len(turns_of([user, secret, said])) == 2, "only OpenAI can read it"


def test_what_tools_of_openais_own_left_behind() -> None:
    """Calls of texts and of commands are calls with arguments; other items are left out."""
    user = {"role": "user", "content": "x", "internal_chat_message_metadata_passthrough": {"turn_id": "t"}}
    patch = {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** \u00e9"}
    patched = {"type": "custom_tool_call_output", "call_id": "c2", "name": "apply_patch", "output": "done"}
    action = {"type": "exec", "command": ["ls"]}
    shell = {"type": "local_shell_call", "call_id": "c3", "status": "completed", "action": action}
    listed = RESULT | {"call_id": "c3"}
    searched = {"type": "web_search_call", "status": "completed", "action": {"type": "search"}}
    body = request([user, patch, patched, searched, shell, listed])
    turns = body.as_conversation.turns
    assert [turn.role for turn in turns] == ["user", "assistant", "tool", "assistant", "tool"]
    (called,), (asked,) = turns[1].calls, turns[3].calls
    assert (called.name, json.loads(called.arguments)) == ("apply_patch", {"input": "*** \u00e9"})
    assert (asked.name, json.loads(asked.arguments)) == ("local_shell", action)
    assert body.unsupported_items == ["input.3 (web_search_call)"]


def test_calls_that_openai_sent_to_mcp_servers_come_with_their_results() -> None:
    called = {
        "type": "mcp_call",
        "id": "m1",
        "name": "f",
        "server_label": "s",
        "arguments": "{}",
        "output": "4",
    }
    failed = called | {"id": "m2", "output": None, "error": {"code": 5}, "approval_request_id": None}
    turns = turns_of([{"role": "user", "content": "x"}, called, failed])
    assert [(turn.role, turn.text, turn.call_id) for turn in turns[1:]] == [
        ("assistant", "", None),
        ("tool", "4", "m1"),
        ("assistant", "", None),
        ("tool", 'Error: {"code": 5}', "m2"),
    ]
    assert turns[1].calls[0].name == "s__f"


@pytest.mark.parametrize("names", [{"call_id": "c3"}, {"id": "lsc_1"}])
def test_outputs_of_a_local_shell_name_the_call_or_its_item(names: dict[str, str]) -> None:
    shell = {"type": "local_shell_call", "id": "lsc_1", "call_id": "c3", "action": {"type": "exec"}}
    turns = turns_of([shell, {"type": "local_shell_call_output", "output": "a"} | names])
    assert [(turn.role, turn.text, turn.call_id) for turn in turns] == [
        ("assistant", "", None),
        ("tool", "a", "c3"),
    ]


@pytest.mark.parametrize(
    "kind", ["compaction", "computer_call", "computer_call_output", "mcp_approval_request"]
)
def test_other_vendors_items_are_left_out_and_named(kind: str) -> None:
    body = request([{"role": "user", "content": "x"}, {"type": kind, "id": "i", "anything": [1]}])
    assert len(body.as_conversation.turns) == 1 and body.unsupported_items == [f"input.1 ({kind})"]


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"type": "item_reference", "id": "msg_1"}, "send the item itself"),
        ({"type": "local_shell_call_output", "output": "a"}, "call_id is missing"),
        ({"role": "user", "content": None}, "content is missing"),
    ],
)
def test_what_no_answer_can_come_from_is_refused(item: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        request([item])


def test_an_assistants_message_may_have_no_content() -> None:
    turns = turns_of([{"role": "user", "content": "x"}, {"role": "assistant", "content": None}, CALL, RESULT])
    assert [turn.role for turn in turns] == ["user", "assistant", "tool"] and turns[1].calls


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"k" * 65: "v"}},
        {"metadata": {"k": "v" * 513}},
        {"metadata": {str(number): "v" for number in range(17)}},
        {"user": "u" * 513},
    ],
)
def test_what_comes_back_in_the_answer_is_short(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="at most"):
        ResponsesRequest.model_validate({"input": "x"} | fields)
