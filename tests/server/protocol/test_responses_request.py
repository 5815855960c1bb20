"""Bodies of /v1/responses: what is understood, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from openai.types.responses import input_token_count_params, response_create_params
from pydantic import ValidationError

from penstock_server.protocol import responses_request
from penstock_server.protocol.requests import ChatCompletionRequest
from penstock_server.protocol.responses_request import ResponsesRequest


def request(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"input": "Hi"} | fields)


def refused(**fields: Any) -> dict[str, Any]:
    with pytest.raises(ValidationError) as caught:
        request(**fields)
    return dict(caught.value.errors()[0])


def turns(body: ResponsesRequest) -> list[tuple[str, str]]:
    return [(turn.role, turn.text) for turn in body.as_conversation.turns]


def test_text_is_a_users_message() -> None:
    assert turns(request()) == [("user", "Hi")]
    assert turns(request(instructions="Be kind")) == [("system", "Be kind"), ("user", "Hi")]


@pytest.mark.parametrize("items", [[], ["x"], [{"role": "tool", "content": "x"}], None, 7])
def test_no_input(items: Any) -> None:
    assert refused(input=items)["loc"][0] == "input"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("conversation", {"id": "conv_1"}),
        ("background", True),
        ("prompt", {"id": "pmpt_1"}),
        ("tools", [{"name": "f"}]),
        ("tool_choice", {"type": "web_search_preview"}),
        ("context_management", [{"type": "compaction"}]),
        ("moderation", {"model": "m"}),
        ("image", {"context_compression": "auto"}),
        ("truncation", "some"),
        ("include", ["made.up"]),
        ("max_output_tokens", 0),
        ("top_logprobs", 21),
        ("metadata", {"a": 1}),
        ("made_up", 1),
        ("cache_salt", ""),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name: str, value: Any) -> None:
    assert refused(**{name: value})["loc"][0] == name


@pytest.mark.parametrize("tool", [{"type": "web_search"}, {"type": "mcp", "server_label": "x", "name": "y"}])
def test_tools_that_are_no_functions_are_named_and_nothing_else_is_said(tool: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate(
            {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
        )
    (error,) = caught.value.errors()
    assert error["loc"] == ("tools", 0, "type")
    assert error["msg"].startswith(f"tools of the type '{tool['type']}' are not supported by this server")
    body = request(tools=[TOOL, tool])
    assert body.unsupported_tools == [f"tools.1 ({tool['type']})"]
    assert [function.name for function in body.as_conversation.tools.functions] == ["f"]
    assert "tool_choice" in refused(tools=[tool], tool_choice="required")["ctx"]["param"]


def test_functions_of_namespaces_have_names_of_their_own() -> None:
    inner = [TOOL, {"type": "custom", "name": "patch"}, TOOL | {"name": "g" * 60}]
    body = request(
        tools=[
            {"type": "web_search"},
            {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": inner},
            {"type": "namespace", "name": "functions", "tools": [TOOL | {"defer_loading": True}]},
        ],
        input=[
            {"role": "user", "content": "x"},
            CALL | {"namespace": "mcp__files"},
            RESULT,
        ],
    )
    offer = body.as_conversation.tools
    first, second, third = (function.name for function in offer.functions)
    assert (first, third) == ("mcp__files__f", "f") and len(second) == 64
    assert offer.places == ("tools.1.tools.0", "tools.1.tools.2", "tools.2.tools.0")
    assert body.unsupported_tools == ["tools.0 (web_search)", "tools.1.tools.1 (custom)"]
    assert body.namespaced[first] == ("mcp__files", "f") and body.namespaced[second][1] == "g" * 60
    assert body.as_conversation.turns[1].calls[0].name == first
    assert refused(tools=[{"type": "namespace", "name": "a", "tools": [TOOL, TOOL]}])["ctx"]["param"] == (
        "tools.0.tools.1.name"
    )


def test_what_is_about_stored_responses_says_so() -> None:
    assert "keeps no responses" in refused(previous_response_id="resp_1")["msg"]
    request(previous_response_id=None, conversation=None, background=False)


def test_combinations() -> None:
    assert refused(stream_options={"include_obfuscation": True})["ctx"]["param"] == "stream_options"
    assert refused(top_logprobs=2)["ctx"]["param"] == "top_logprobs"
    assert request(top_logprobs=2, include=["message.output_text.logprobs"]).num_logprobs == 2
    assert request(include=["reasoning.encrypted_content"]).num_logprobs is None


def test_accepted_without_effect_as_the_module_says() -> None:
    body = request(
        store=True,
        user="u",
        safety_identifier="s",
        service_tier="flex",
        prompt_cache_key="k",
        prompt_cache_options={"mode": "implicit"},
        prompt_cache_retention="24h",
        max_tool_calls=3,
    )
    assert responses_request.__doc__ is not None
    for name in body.model_fields_set - {"input"}:
        assert name in responses_request.__doc__


def test_null_counts_as_absent() -> None:
    optional = [name for name, field in ResponsesRequest.model_fields.items() if not field.is_required()]
    assert request(**dict.fromkeys(optional)).model_dump() == request().model_dump()


def test_every_field_of_the_openai_package_has_its_place() -> None:
    """None falls to extra="forbid": each is honoured, refused as unsupported, or accepted as documented."""
    known = set(ResponsesRequest.model_fields)
    assert set(response_create_params.ResponseCreateParamsBase.__annotations__) <= known
    counting = set(input_token_count_params.InputTokenCountParams.__annotations__)
    assert counting - known == {"personality"}  # which would change what the model is told


def test_the_form_of_an_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    flat = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    form = request(text={"format": flat}).format
    assert form is not None and form.model_dump(by_alias=True) == flat | {"description": None}
    for kind in ("text", "json_object"):
        form = request(text={"format": {"type": kind}}).format
        assert form is not None and form.type == kind
    assert refused(text={"format": {"type": "grammar"}})["loc"][:2] == ("text", "format")
    assert refused(text={"format": {"type": "json_schema", "name": "n"}})["loc"][-1] == "schema"


TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": True}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "id": "fc_1"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "42"}


def test_tools_and_their_choice_are_those_of_chat() -> None:
    """But for the field that they stand in."""
    reference = {"type": "function", "name": "f"}
    nested = {"type": "function", "function": {"name": "f"}}
    allowed: dict[str, Any] = {"mode": "auto", "tools": [reference]}
    members = {name: value for name, value in TOOL.items() if name != "type"}
    for choice, in_chat in (
        (None, None),
        ("none", "none"),
        ("required", "required"),
        (reference, nested),
        (
            {"type": "allowed_tools"} | allowed,
            {"type": "allowed_tools", "allowed_tools": allowed | {"tools": [nested]}},
        ),
    ):
        ours = request(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False).as_conversation.tools
        chat = {"messages": [{"role": "user", "content": "Hi"}], "parallel_tool_calls": False}
        chat |= {"tools": [{"type": "function", "function": members}], "tool_choice": in_chat}
        theirs = ChatCompletionRequest.model_validate(chat).as_conversation.tools
        assert [function.model_dump(exclude={"type"}) for function in ours.functions] == [
            function.model_dump() for function in theirs.functions
        ]
        assert ours.places == ("tools.0",)
        assert replace(ours, functions=(), places=()) == replace(theirs, functions=(), field="tools.{}")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL, TOOL]}, "tools.1.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"input": [RESULT]}, "input"),
        ({"input": [CALL, CALL]}, "input"),
        ({"tools": [TOOL], "include": ["message.output_text.logprobs"]}, "include"),
    ],
)
def test_tools_that_do_not_fit_together(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields)["ctx"]["param"] == param
