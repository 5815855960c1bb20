"""The base of the bodies of requests: a strict model, and types whose errors have words of our own."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

#: The largest count or token id. Larger ones make no sense, and would overflow a 32-bit integer in the
#: engine.
MAX_INT = 2**31 - 1


def invalid(param: str, message: str) -> PydanticCustomError:
    """An error about the field `param`, for checks that look at several fields."""
    return PydanticCustomError("invalid_value", "{message}", {"param": param, "message": message})


def _refuse(value: object) -> None:
    if value not in (None, False, "", [], {}):
        raise PydanticCustomError("unsupported_parameter", "not supported by this server")


#: A field of OpenAI's that Penstock does not have. Only null and empty values are accepted.
Unsupported = Annotated[None, PlainValidator(_refuse), WithJsonSchema({"type": "null"})]


class Only:
    """A validator for a field of another server that Penstock does not have: it accepts null and the values
    that change nothing."""

    def __init__(self, *neutral: object) -> None:
        self._neutral = neutral

    def __call__(self, value: object) -> object:
        # The type counts as well, because 0 equals False.
        if value is None or any(value == each and type(value) is type(each) for each in self._neutral):
            return value
        allowed = " or ".join(map(repr, self._neutral))
        message = f"not supported by this server, unless it is {allowed}"
        raise PydanticCustomError("unsupported_parameter", "{message}", {"message": message})


OnlyOne = Annotated[float | None, BeforeValidator(Only(1, 1.0)), WithJsonSchema({"enum": [1, None]})]
OnlyZero = Annotated[float | None, BeforeValidator(Only(0, 0.0)), WithJsonSchema({"enum": [0, None]})]
OnlyTrue = Annotated[bool | None, BeforeValidator(Only(True))]
OnlyFalse = Annotated[bool | None, BeforeValidator(Only(False))]


def _check_text(value: str) -> str:
    """Refuses half a surrogate pair, which JSON can hold: it is no character and can't be tokenized."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError(
            "invalid_text", "has half a surrogate pair, which is no character"
        ) from None
    return value


Text = Annotated[str, AfterValidator(_check_text)]
Count = Annotated[int, Field(ge=0, le=MAX_INT)]
PositiveCount = Annotated[int, Field(ge=1, le=MAX_INT)]


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _leave_null_out(cls, body: Any) -> Any:
        """A member that is null counts as absent, also one that is unknown: client packages dump every member
        that they know. A member that has to be there stays, so that the error says what it must be."""
        if not isinstance(body, dict) or None not in body.values():
            return body
        required = _required(cls)
        return {name: value for name, value in body.items() if value is not None or name in required}


@cache
def _required(form: type[BaseModel]) -> frozenset[str]:
    """The names in JSON of the members that have to be there."""
    fields = form.model_fields.items()
    return frozenset(field.alias or name for name, field in fields if field.is_required())


def kind_of_text(value: object) -> str:
    """The tag of a field that is a text or a list."""
    return "list" if isinstance(value, list) else "string"
