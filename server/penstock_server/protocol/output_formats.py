"""The form that an answer shall have: OpenAI's response_format, vLLM's structured_outputs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from penstock_server.protocol.wire import Text, Unsupported, Wire


def _refuse_guided(value: object) -> None:
    if value is not None:
        raise PydanticCustomError(
            "unsupported_parameter",
            'not supported by this server; send structured_outputs instead, such as {"json": SCHEMA}, '
            '{"regex": "..."}, {"choice": [...]} or {"grammar": "..."}',
        )


#: vLLM's name for structured_outputs, before 0.12.
Guided = Annotated[None, PlainValidator(_refuse_guided), WithJsonSchema({"type": "null"})]


class TextFormat(Wire):
    type: Literal["text"]


class JsonObjectFormat(Wire):
    """With a schema, as llama-server and others have it, the same as JsonSchemaFormat."""

    type: Literal["json_object"]
    json_schema: dict[str, Any] | None = Field(None, alias="schema")


class NamedSchema(Wire):
    """`name` and `strict` change nothing: the answer follows the schema in any case."""

    name: Text | None = None
    description: Text | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Wire):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class FlatSchemaFormat(Wire):
    """As in response_format, with the schema's members beside the type."""

    type: Literal["json_schema"]
    name: Text
    json_schema: dict[str, Any] = Field(alias="schema")
    description: Text | None = None
    strict: bool | None = None


#: Of chat and completions; of /v1/responses.
ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat
AnswerFormat = TextFormat | JsonObjectFormat | FlatSchemaFormat


class StructuredOutputs(Wire):
    """vLLM's. One of the first five says what the answer must be."""

    json_schema: dict[str, Any] | Text | None = Field(None, alias="json")
    regex: Text | None = Field(None, description="In Rust's syntax, without look-around.")
    choice: Annotated[list[Text], Field(min_length=1)] | None = None
    grammar: Text | None = Field(None, description="llguidance's Lark, or GBNF.")
    json_object: bool | None = None
    disable_any_whitespace: bool | None = Field(None, description="true if null, unlike vLLM's")
    disable_additional_properties: bool | None = Field(None, description="true if null, unlike vLLM's")
    whitespace_pattern: Text | None = None
    structural_tag: Unsupported = None

    @model_validator(mode="after")
    def _check_combinations(self) -> StructuredOutputs:
        is_json = self.json_schema is not None or self.json_object
        others = [value for value in (self.regex, self.choice, self.grammar) if value is not None]
        if len(others) + (self.json_schema is not None) + bool(self.json_object) != 1:
            raise PydanticCustomError(
                "invalid_value", "takes exactly one of json, regex, choice, grammar and json_object"
            )
        for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
            if getattr(self, name) and not is_json:
                raise PydanticCustomError("invalid_value", "{name} is for json only", {"name": name})
        return self
