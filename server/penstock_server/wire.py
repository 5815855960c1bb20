"""What the bodies of requests are made of: strict models, and types with an error of their own."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

#: Counts and token ids beyond this are nonsense, and would overflow a 32-bit integer further down.
MAX_INT = 2**31 - 1


def invalid(param: str, message: str) -> PydanticCustomError:
    """An error about the field `param`, for checks that look at several fields."""
    return PydanticCustomError("invalid_value", "{message}", {"param": param, "message": message})


def _refuse(value: object) -> None:
    if value not in (None, False, "", [], {}):
        raise PydanticCustomError("unsupported_parameter", "not supported by this server")


#: A field of OpenAI's that we do not have: only "nothing" is accepted.
Unsupported = Annotated[None, PlainValidator(_refuse), WithJsonSchema({"type": "null"})]


def _check_text(value: str) -> str:
    """JSON can hold half a surrogate pair, which is no character and can't be tokenized."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("invalid_text", "has a character that is no Unicode") from None
    return value


Text = Annotated[str, AfterValidator(_check_text)]
Count = Annotated[int, Field(ge=0, le=MAX_INT)]
PositiveCount = Annotated[int, Field(ge=1, le=MAX_INT)]


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
