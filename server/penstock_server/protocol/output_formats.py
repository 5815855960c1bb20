"""The form that a request demands of its answer: OpenAI's response_format, vLLM's structured_outputs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from penstock_server.protocol.wire import Text, Unsupported, Wire


class TextFormat(Wire):
    type: Literal["text"]


class JsonObjectFormat(Wire):
    """Any JSON object. With a schema, as llama-server and others allow, the same as JsonSchemaFormat."""

    type: Literal["json_object"]
    json_schema: dict[str, Any] | None = Field(None, alias="schema")


class NamedSchema(Wire):
    """A schema. `name` and `strict` change nothing: the answer always follows the schema."""

    name: Text | None = None
    description: Text | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Wire):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class FlatSchemaFormat(Wire):
    """The format of /v1/responses: like JsonSchemaFormat, with the schema's members beside the type."""

    type: Literal["json_schema"]
    name: Text
    json_schema: dict[str, Any] = Field(alias="schema")
    description: Text | None = None
    strict: bool | None = None


#: The formats of chat and completions, and the formats of /v1/responses.
ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat
AnswerFormat = TextFormat | JsonObjectFormat | FlatSchemaFormat


class StructuredOutputs(Wire):
    """vLLM's field. Exactly one of the first five members says what the answer must be."""

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
