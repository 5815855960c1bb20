"""Wrong bodies end at their first mistakes; right ones are what pydantic alone makes of them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from penstock_server.anthropic_api.messages_request import MessagesRequest
from penstock_server.ollama_api.requests import ChatRequest
from penstock_server.protocol.body_validator import MAX_MEMBERS, MAX_UNKNOWN, BodyValidator
from penstock_server.protocol.requests import ChatCompletionRequest, CompletionRequest
from penstock_server.protocol.responses_request import ResponsesRequest

MESSAGE = {"role": "user", "content": "Hi"}


def mistakes(kind: type[BaseModel], body: Any) -> list[tuple[str, str]]:
    """(type, dotted place) of all errors."""
    with pytest.raises(ValidationError) as refused:
        BodyValidator(kind).validate(body)
    return [(each["type"], ".".join(map(str, each["loc"]))) for each in refused.value.errors()]


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        (CompletionRequest, {"prompt": "x", "stop_token_ids": [""] * 9}, ("int_type", "stop_token_ids.0")),
        (CompletionRequest, {"prompt": "x", "allowed_token_ids": [1, -1, -1]},
         ("greater_than_equal", "allowed_token_ids.1")),
        (CompletionRequest, {"prompt": [["x"]] * 9}, ("int_type", "prompt.token_id_lists.0.0")),
        (ChatCompletionRequest, {"messages": [MESSAGE, {"role": "user"}, {"role": "user"}]},
         ("missing_content", "messages.1")),
        (ChatCompletionRequest, {"messages": [MESSAGE | {"content": [{}] * 9}]},
         ("missing", "messages.0.content.list.0.type")),
        (ResponsesRequest, {"input": "x", "tools": [{"type": 1}] * 9}, None),
        (MessagesRequest, {"max_tokens": 1, "messages": [{"role": "x", "content": "y"}] * 9},
         ("literal_error", "messages.0.role")),
        (ChatRequest, {"model": "m", "messages": [{}] * 9}, ("missing", "messages.0.role")),
    ],
)  # fmt: skip
def test_a_list_ends_with_its_first_wrong_item(
    kind: type[BaseModel], body: Any, expected: tuple[str, str] | None
) -> None:
    found = mistakes(kind, body)
    assert len(found) <= 3
    if expected is not None:
        assert found == [expected]


@pytest.mark.parametrize(
    ("kind", "body", "place"),
    [
        (CompletionRequest, {"prompt": "x", "response_format": {"type": "n" * 300_000}}, "response_format"),
        (ResponsesRequest, {"input": "x", "text": {"format": {"type": "n" * 300_000}}}, "text.format"),
    ],
)
def test_the_name_of_a_kind_is_not_told_at_any_length(kind: type[BaseModel], body: Any, place: str) -> None:
    with pytest.raises(ValidationError) as refused:
        BodyValidator(kind).validate(body)
    (error,) = refused.value.errors()
    assert (error["type"], ".".join(map(str, error["loc"]))) == ("union_tag_invalid", place)
    assert "'type'" in error["msg"] and "300000 characters" in error["msg"] and len(error["msg"]) < 200


def test_objects_with_far_too_many_members() -> None:
    many = {f"a{number}": "x" for number in range(5000)}
    assert mistakes(CompletionRequest, {"prompt": "x"} | many) == [("too_long", "")]
    assert mistakes(CompletionRequest, {"prompt": "x", "logit_bias": many}) == [("too_long", "logit_bias")]
    assert mistakes(ResponsesRequest, {"input": "x", "metadata": many}) == [("too_long", "metadata")]
    kwargs = {"messages": [MESSAGE], "chat_template_kwargs": many}
    assert mistakes(ChatCompletionRequest, kwargs) == [("too_long", "chat_template_kwargs")]
    assert mistakes(ChatCompletionRequest, {"messages": [MESSAGE | many]}) == [("too_long", "messages.0")]
    assert (
        len(mistakes(CompletionRequest, {"prompt": "x"} | dict([*many.items()][:MAX_UNKNOWN]))) == MAX_UNKNOWN
    )


@pytest.mark.parametrize(
    ("kind", "body", "place"),
    [
        (CompletionRequest, {"prompt": "x", "n" * 300_000: 1}, ""),
        (ChatRequest, {"model": "m", "messages": [MESSAGE], "n" * 300_000: 1}, ""),
        (ResponsesRequest, {"input": "x", "metadata": {"n" * 300_000: "x"}}, "metadata"),
        (ChatCompletionRequest, {"messages": [MESSAGE | {"n" * 300_000: 1}]}, "messages.0"),
    ],
)
def test_a_members_name_is_not_told_at_any_length(kind: type[BaseModel], body: Any, place: str) -> None:
    for is_lenient in (False, True):
        with pytest.raises(ValidationError) as refused:
            BodyValidator(kind).validate(body, is_lenient)
        (error,) = refused.value.errors()
        assert ".".join(map(str, error["loc"])) == place
        assert "300000 characters" in error["msg"] and len(error["msg"]) < 200


def test_what_holds_any_json_has_no_such_limit() -> None:
    many = {f"a{number}": {"type": "string"} for number in range(2 * MAX_MEMBERS)}
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": many}},
    }
    body, unknown = BodyValidator(ChatCompletionRequest).validate({"messages": [MESSAGE], "tools": [tool]})
    assert body.tools is not None and body.tools[0].function.parameters is not None
    assert body.tools[0].function.parameters["properties"] == many and not unknown
    assert BodyValidator(CompletionRequest).validate({"prompt": "x", "metadata": many})[0].metadata == many


def test_right_bodies_are_what_pydantic_makes_of_them() -> None:
    body = {
        "messages": [MESSAGE] * 4096,
        "logit_bias": {str(each): 1 for each in range(1024)},
        "stop": ["a"] * 64,
    }
    assert BodyValidator(ChatCompletionRequest).validate(body)[0] == ChatCompletionRequest.model_validate(
        body
    )
    ids = {"prompt": [*range(100_000)], "stop_token_ids": [*range(100_000)]}
    assert BodyValidator(CompletionRequest).validate(ids)[0] == CompletionRequest.model_validate(ids)


def test_unknown_fields_are_taken_out_where_the_server_is_lenient() -> None:
    message = MESSAGE | {"content": [{"type": "text", "text": "Hi", "x": 1}], "y": {}}
    tool = {"type": "function", "function": {"name": "f", "z": 1}}
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}, "v": 1}}
    known = {"messages": [MESSAGE | {"content": [{"type": "text", "text": "Hi"}]}], "response_format": schema}
    body = {"messages": [message], "tools": [tool], "response_format": schema, "made_up": [1]}
    with pytest.raises(ValidationError):
        BodyValidator(ChatCompletionRequest).validate(body)
    found, unknown = BodyValidator(ChatCompletionRequest).validate(body, is_lenient=True)
    assert unknown == [
        "made_up", "messages.0.content.0.x", "messages.0.y", "response_format.json_schema.v",
        "tools.0.function.z",
    ]  # fmt: skip
    del schema["json_schema"]["v"], tool["function"]["z"]  # type: ignore[attr-defined]
    expected = ChatCompletionRequest.model_validate(known | {"tools": [tool]})
    assert found.model_dump() == expected.model_dump() and found == expected
    with pytest.raises(ValidationError):
        BodyValidator(ChatCompletionRequest).validate(body | {"temperature": "hot"}, is_lenient=True)


def test_tools_of_other_kinds_keep_their_members() -> None:
    tool = {"type": "web_search", "user_location": {"city": "Paris"}}
    body, unknown = BodyValidator(ResponsesRequest).validate(
        {"input": "x", "tools": [tool], "made_up": 1}, is_lenient=True
    )
    assert unknown == ["made_up"] and body.tools is not None and body.tools[0].model_dump() == tool


def test_ollamas_options_may_have_many_that_are_unknown() -> None:
    """They are left out anyway, and are no errors."""
    many = {f"a{number}": number for number in range(MAX_MEMBERS)}
    body = {"model": "m", "messages": [MESSAGE], "options": many | {"seed": 1}}
    made, _ = BodyValidator(ChatRequest).validate(body, is_lenient=True)
    assert made.options is not None and made.options.seed == 1
    body["options"] = many | {f"b{number}": 1 for number in range(MAX_MEMBERS)}
    assert mistakes(ChatRequest, body) == [("too_long", "options")]
