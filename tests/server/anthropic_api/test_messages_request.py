"""Bodies of /v1/messages: every field of the real package has its place, and mistakes are named."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from penstock_server.anthropic_api import messages_request
from penstock_server.anthropic_api.messages_request import MessagesRequest, PromptRequest

TEXT = {"type": "text", "text": "x"}
CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "é"}}
USER = {"role": "user", "content": "x"}
RESULT = {"type": "tool_result", "tool_use_id": "t1"}


def request(**fields: Any) -> MessagesRequest:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
    return MessagesRequest.model_validate(body | fields)


def refused(**fields: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        request(**fields)
    return str(caught.value.errors()[0])


def test_tools_of_several_mcp_servers() -> None:
    tools = [{"name": f"mcp__{'s' * 80}__{each}", "input_schema": {"type": "object"}} for each in range(300)]
    assert len(request(tools=tools).tools or ()) == 300


def test_every_field_of_the_package_has_its_place() -> None:
    params = pytest.importorskip("anthropic.types.message_create_params", reason="the extra dev has it")
    beta = pytest.importorskip("anthropic.types.beta.message_create_params", reason="the extra dev has it")
    counting = pytest.importorskip("anthropic.types.message_count_tokens_params", reason="as above")
    known = set(MessagesRequest.model_fields)
    headers = {"workspace_id"}  # the package sends it as a header
    assert set(params.MessageCreateParamsBase.__annotations__) - known == headers
    assert set(counting.MessageCountTokensParams.__annotations__) - set(PromptRequest.model_fields) == headers
    unknown = set(beta.MessageCreateParamsBase.__annotations__) - known - headers
    assert unknown == {"billing_policy", "fallback_credit_token"}  # Anthropic's accounts


def test_accepted_without_effect_as_the_module_says() -> None:
    names = ("metadata", "service_tier", "inference_geo", "speed", "user_profile_id", "diagnostics")
    assert messages_request.__doc__ is not None
    assert all(name in messages_request.__doc__ for name in (*names, "cache_control", "context_management"))


def test_null_counts_as_absent() -> None:
    optional = [name for name, field in MessagesRequest.model_fields.items() if not field.is_required()]
    assert request(**dict.fromkeys(optional)).model_dump() == request().model_dump()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"mcp_servers": [{"url": "x"}]}, "not supported"),
        ({"stop": ["x"]}, "stop"),
        ({"stop_sequences": ["x", ""]}, "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, "no tools"),
        ({"tool_choice": {"type": "tool"}}, "has a name"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "assistant", "content": [TEXT, RESULT]}]}, "messages.0.content.1"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "no call before it"),
        ({"messages": [{"role": "assistant", "content": [CALL, CALL]}, USER]}, "two"),
        ({"messages": [{"role": "assistant", "content": [CALL]}]}, "send their results"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document' blocks"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "type"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        ({"messages": [{"role": "assistant", "content": [CALL | {"input": {"a": "\ud800"}}]}]}, "surrogate"),
        ({"tools": [{"name": "f"}]}, "input_schema"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "must be 'object'"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], said: str) -> None:
    assert said in refused(**fields)


def test_the_turns_that_messages_make() -> None:
    messages = [
        {"role": "user", "content": [TEXT, TEXT]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, TEXT, CALL]},
        {"role": "user", "content": [RESULT, {**RESULT, "tool_use_id": "t1", "content": "y"}, TEXT]},
        {"role": "system", "content": "Stop."},
    ]
    turns = request(messages=messages, system="Be kind").as_conversation.turns
    assert [(turn.role, turn.text) for turn in turns] == [
        ("system", "Be kind"),
        ("user", "x\nx"),
        ("assistant", "x"),
        ("tool", ""),
        ("tool", "y"),
        ("user", "x"),
        ("system", "Stop."),
    ]
    assert len(turns) == 7, "neighbours are one turn"
    assert turns[2].reasoning == "Hm." and turns[2].calls[0].arguments == '{"a": "é"}'


def test_blocks_of_anthropics_own_tools_are_left_out_and_named() -> None:
    search = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"encrypted_content": "e"}]}
    summary = {"type": "compaction", "content": "What was said."}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [summary, search, found, TEXT]},
        {"role": "user", "content": "y"},
    ]
    body = request(messages=messages)
    assert [turn.text for turn in body.as_conversation.turns] == ["x", "What was said.\nx", "y"]
    kinds = ("server_tool_use", "web_search_tool_result")
    assert body.unsupported_blocks == [f"messages.1.content.{n} ({kind})" for n, kind in enumerate(kinds, 1)]
    messages[0]["content"] = [found]
    assert "has no place for such a block" in refused(messages=messages)


def test_the_systems_blocks_are_texts() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
    assert "'image' blocks are not supported" in refused(system=[TEXT, image])
    document = {"type": "document", "source": {"type": "text", "data": "A rule."}}
    assert request(system=[TEXT, document]).as_conversation.turns[0].text == "x\nA rule."
