"""How a model is shown tools, the calls that it made and their results.

A template that knows tools and writes calls in a format that we read gets them as transformers' templates
expect them. With any other we say in plain words what tools there are, and ask for calls in Hermes' format;
earlier calls are shown in it too, and results as what the user says.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.errors import InvalidParameter, RequestError
from penstock_server.protocol.tools import Function, is_too_deep
from penstock_server.settings.settings import ParserChoice
from penstock_server.tools.parsers import (
    PYTHON_TAG,
    TOOL_CALL,
    TOOL_CALL_END,
    TOOL_CALLS,
    ParserName,
)

#: A message as a template gets it.
TemplateMessage = dict[str, Any]

#: Of calls in XML and of lists of calls between tags: beside them, the marks that we know say something else.
_FOREIGN = ("<function=", "<arg_key>", "<invoke", "<tool_calls>")

_NO_PARAMETERS = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class ToolStyle:
    #: Who reads the model's calls; None: nobody does.
    parser: ParserName | None
    #: Whether the chat template itself shows tools.
    is_native: bool


def detect_style(template: str, choice: ParserChoice) -> ToolStyle:
    """By what the text of a chat template says. A parser that was chosen is taken with any template that
    shows tools at all."""
    shows_tools = re.search(r"\btools\b", template) is not None
    format = _format_of(template) if choice == "auto" else choice
    is_native = shows_tools and format is not None
    if format == "none":
        return ToolStyle(None, is_native)
    return ToolStyle(format if is_native else "hermes", is_native)


def _format_of(template: str) -> ParserName | None:
    """None: one that no parser here reads."""
    if TOOL_CALLS in template:
        return "mistral"
    if any(mark in template for mark in _FOREIGN):
        return None
    if TOOL_CALL in template:
        return "hermes"
    has_llamas_headers = "<|start_header_id|>" in template or "<|header_start|>" in template
    if PYTHON_TAG in template or (has_llamas_headers and '"parameters": ' in template):
        return "llama3"
    return None


def template_tools(tools: Sequence[Function]) -> list[dict[str, Any]]:
    """All of them with all members: templates rely on it."""
    functions = [
        {
            "name": tool.name,
            "description": tool.description or "",
            "parameters": tool.parameters or _NO_PARAMETERS,
        }
        for tool in tools
    ]
    return [{"type": "function", "function": function} for function in functions]


def native_messages(messages: Sequence[TemplateMessage], parser: ParserName | None) -> list[TemplateMessage]:
    """With arguments as objects, which is what templates expect, and with a name in each result."""
    names: dict[str, str] = {}
    shown = []
    for message in messages:
        if calls := message.get("tool_calls"):
            names |= {call["id"]: call["function"]["name"] for call in calls}
            shown += _native_calls(message, parser)
        elif (call_id := message.get("tool_call_id")) is not None:
            result = {"name": names.get(call_id, "")} | message
            shown.append(result | {"tool_call_id": _native_id(call_id, parser)})
        else:
            shown.append(message)
    return shown


def _native_calls(message: TemplateMessage, parser: ParserName | None) -> list[TemplateMessage]:
    """Llama's templates refuse several calls in a message, so that each gets its own."""
    calls = [_native_call(call, parser) for call in message["tool_calls"]]
    if parser != "llama3":
        return [message | {"tool_calls": calls}]
    others: list[TemplateMessage] = [
        {"role": "assistant", "content": "", "tool_calls": [call]} for call in calls
    ]
    return [message | {"tool_calls": calls[:1]}, *others[1:]]


def _native_call(call: dict[str, Any], parser: ParserName | None) -> dict[str, Any]:
    function = call["function"]
    arguments = _parsed(function["arguments"])
    return {
        "id": _native_id(call["id"], parser),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _native_id(call_id: str, parser: ParserName | None) -> str:
    """Mistral's templates refuse ids that are not nine letters and digits: another gets a stand-in, always
    the same one."""
    if parser != "mistral" or re.fullmatch(r"[a-zA-Z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _parsed(arguments: str) -> Any:
    """No arguments are an empty object. What a model wrote amiss, or what was cut off, stays as it is."""
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return arguments if is_too_deep(parsed) else parsed


# -- in plain words -----------------------------------------------------------------------------

_EXAMPLE = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


def describe(tools: Sequence[Function], forced: Literal["no", "calls", "call"] | Function) -> str:
    """What the model is told of its tools, and how to call them."""
    lines = [json.dumps(each["function"], ensure_ascii=False) for each in template_tools(tools)]
    match forced:
        case Function(name=name):
            how = f"Answer with the arguments for {name}, as a JSON object and nothing else."
        case "calls":
            how = f"Answer with a JSON list of calls and nothing else, for example:\n[{_FORCED_EXAMPLE}]"
        case "call":
            how = f"Answer with one call as JSON and nothing else, for example:\n{_FORCED_EXAMPLE}"
        case _:
            how = (
                "To call one, write its name and arguments as JSON between tags, and stop after the last "
                f"call:\n{_tagged(_EXAMPLE)}\nIts result will come between <tool_response> and "
                "</tool_response>. Answer in plain text where no tool is needed."
            )
    return "You can call tools. They are, one per line:\n" + "\n".join(lines) + "\n" + how


_FORCED_EXAMPLE = _EXAMPLE.replace("arguments", "parameters")


def _tagged(call: str) -> str:
    return f"{TOOL_CALL}\n{call}\n{TOOL_CALL_END}"


def plain_messages(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Calls and results as text, for a template that knows only users and assistants. Results become one
    message with what the user says next: templates want turns to alternate."""
    shown: list[TemplateMessage] = []
    is_after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        plain = _plain_result(message) if is_result else _plain_calls(message)
        if shown and is_after_result and plain["role"] == "user":
            shown[-1] = shown[-1] | {"content": f"{shown[-1]['content']}\n{plain['content']}"}
        else:
            shown.append(plain)
        is_after_result = is_result
    return shown


def _plain_result(message: TemplateMessage) -> TemplateMessage:
    return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}


def _plain_calls(message: TemplateMessage) -> TemplateMessage:
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    texts = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls", ()):
        function = {
            "name": call["function"]["name"],
            "arguments": _parsed(call["function"]["arguments"]),
        }
        texts.append(_tagged(json.dumps(function, ensure_ascii=False)))
    return plain | {"content": "\n".join(texts)}


def render_described(
    render: Callable[[list[TemplateMessage]], list[int]], messages: list[TemplateMessage], text: str
) -> list[int]:
    """The prompt with `text` where the template shows it. Raises what `render` does, and InvalidParameter if
    the template shows it nowhere."""
    without = render(messages)
    for place in (with_system, with_first_user):
        try:
            token_ids = render(place(messages, text))
        except RequestError:  # many templates refuse a system's message, others leave it out
            continue
        if token_ids != without:
            return token_ids
    message = (
        "this model's chat template has no place for them: it shows neither tools nor a system's message"
    )
    raise InvalidParameter("tools", message)


def with_system(messages: Sequence[TemplateMessage], text: str) -> list[TemplateMessage]:
    """`text` at the end of the system's message."""
    if messages and messages[0]["role"] == "system":
        first = messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def with_first_user(messages: Sequence[TemplateMessage], text: str) -> list[TemplateMessage]:
    """`text` in front of what the user says first: for templates that have no system."""
    for index, message in enumerate(messages):
        if message["role"] == "user":
            told = message | {"content": f"{text}\n\n{message['content']}"}
            return [*messages[:index], told, *messages[index + 1 :]]
    return [{"role": "user", "content": text}, *messages]
