"""BodyValidator: makes the body of a request of JSON, and stops early where the JSON is wrong.

pydantic alone finds every mistake: a list of a million wrong items takes ten seconds and gigabytes for a
million errors, of which an answer names three. Here a list ends with its first wrong item, and an object with
far too many members is refused before anything in it is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError, SchemaValidator

from penstock_server.protocol.other_parts import Leniency

Body = TypeVar("Body", bound=BaseModel)

#: The most members of an object that names things, such as `metadata`, where the field has no limit of its
#: own.
MAX_MEMBERS = 1024
#: The most unknown members of an object that has fields and takes no others: each is an error of its own.
#: Where unknown ones are left out, they are MAX_MEMBERS.
MAX_UNKNOWN = 32
#: The most characters of the name that says which of several kinds an object is (`type`). pydantic puts an
#: unknown name into its message several times.
MAX_TAG_CHARS = 256
#: The most characters of a member's name. Each error, and the header that names what is left out, repeats it.
MAX_NAME_CHARS = 256
#: Keys of a schema of pydantic's that hold no schemas.
_NO_SCHEMAS = frozenset({"cls", "config", "metadata", "function", "serialization", "default", "expected"})


class BodyValidator(Generic[Body]):
    """Validates bodies of one kind."""

    def __init__(self, kind: type[Body]) -> None:
        # Prebuilt validators are those that pydantic made of the classes, without these limits.
        self._validator = SchemaValidator(_bounded(kind.__pydantic_core_schema__), _use_prebuilt=False)

    def validate(
        self, value: object, is_lenient: bool = False, takes_notes: bool = False
    ) -> tuple[Body, list[str]]:
        """The body, and the places of its unknown fields and the names of parts that notes stand for.
        is_lenient: unknown fields are left out. Otherwise they are errors, as all others are. takes_notes:
        notes stand for parts that are no text, see Leniency. Raises ValidationError."""
        leniency = Leniency(takes_notes)
        try:
            return self._validator.validate_python(value, context=leniency), leniency.places
        except ValidationError as error:
            kinds = {each["type"] for each in error.errors(include_url=False, include_input=False)}
            if not is_lenient or "extra_forbidden" not in kinds:
                raise
        leniency = Leniency(takes_notes)
        body: Body = self._validator.validate_python(value, extra="allow", context=leniency)
        return body, [*sorted(_take_unknown(body, "")), *leniency.places]


def _bounded(schema: Any, most_unknown: int = MAX_UNKNOWN) -> Any:
    """A schema of pydantic's core with limits for lists and objects at all places. most_unknown: of the model
    that the schema belongs to."""
    if isinstance(schema, list | tuple):
        return [_bounded(each, most_unknown) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if not isinstance(schema.get("type"), str):  # schemas by the names of fields or of a union's members
        return {name: _bounded(each, most_unknown) for name, each in schema.items()}
    if schema["type"] == "model":
        is_strict = schema.get("config", {}).get("extra_fields_behavior") == "forbid"
        most_unknown = MAX_UNKNOWN if is_strict else MAX_MEMBERS
    found = {
        key: each if key in _NO_SCHEMAS else _bounded(each, most_unknown) for key, each in schema.items()
    }
    match found:
        case {"type": "list"}:
            return found | {"fail_fast": True}
        case {"type": "dict", "values_schema": {"type": kind}} if kind != "any":
            return _checked_first(found, _at_most(found.get("max_length", MAX_MEMBERS)))
        case {"type": "model-fields", "fields": dict() as fields}:
            return _checked_first(found, _at_most(len(fields) + most_unknown))
        case {"type": "tagged-union", "discriminator": str() as name}:
            return _checked_first(found, _with_short_tag(name))
    return found


def _checked_first(schema: dict[str, Any], check: Callable[[Any], Any]) -> dict[str, Any]:
    reference = {"ref": schema.pop("ref")} if "ref" in schema else {}
    function = {"type": "no-info", "function": check}
    return {"type": "function-before", "function": function, "schema": schema} | reference


def _at_most(most: int) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > most:
            message = f"has {len(value)} members; at most {most} are taken"
        elif (longest := max(map(len, value), default=0)) > MAX_NAME_CHARS:
            message = f"has a member whose name has {longest} characters; at most {MAX_NAME_CHARS} are taken"
        else:
            return value
        raise PydanticCustomError("too_long", "{message}", {"message": message})

    return check


def _with_short_tag(name: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        tag = value.get(name) if isinstance(value, dict) else None
        if isinstance(tag, str) and len(tag) > MAX_TAG_CHARS:
            message = f"has a {name!r} of {len(tag)} characters, which is none of those that it may have"
            raise PydanticCustomError("union_tag_invalid", "{message}", {"message": message})
        return value

    return check


def _take_unknown(value: object, place: str) -> Iterator[str]:
    """Takes the unknown fields out of a body that was made with them, and says where they were."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, BaseModel):
                yield from _take_unknown(item, f"{place}{index}.")
    elif isinstance(value, BaseModel):
        if value.model_extra and value.model_config.get("extra") == "forbid":
            yield from (f"{place}{name}" for name in value.model_extra)
            value.model_extra.clear()
        for name, field in type(value).model_fields.items():
            inner = getattr(value, name)
            if isinstance(inner, BaseModel | list):
                yield from _take_unknown(inner, f"{place}{field.alias or name}.")
