"""Messages and tools in the form that a model's chat template can show.

A template that knows tools, and writes calls in a format that a parser here reads, gets tools and calls as
transformers' templates expect them. With any other template a text describes the tools and asks for calls in
Hermes' format; earlier calls are shown in Hermes' format, too, and results as messages of the user.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.errors import InvalidParameter, TemplateLost
from penstock_server.protocol.json_cost import JsonCost
from penstock_server.protocol.tools import Function, is_too_deep
from penstock_server.settings.chat_rules import ParserChoice, ParserName
from penstock_server.tools.parsers import (
    FUNCTION,
    PYTHON_TAG,
    TOOL_CALL,
    TOOL_CALL_END,
    TOOL_CALLS,
)
from penstock_server.tools.parsing.deepseek import CALLS_BEGIN, example_call
from penstock_server.tools.parsing.harmony import CHANNEL, START
from penstock_server.tools.parsing.xml_calls import MINIMAX, SEED

#: A message as a template gets it.
TemplateMessage = dict[str, Any]

#: Marks of formats that no parser here reads: calls in other XML, and lists of calls between tags. A template
#: with one of them may use a mark of ours with another meaning.
_FOREIGN = ("<function=", "<invoke", "<tool_calls>")
#: A mark that one format alone has.
_OWN_MARKS: dict[str, ParserName] = {
    "<arg_key>": "glm45",
    MINIMAX: "minimax_m2",
    SEED: "seed_oss",
    "<parameter=": "qwen3_coder",
    CALLS_BEGIN: "deepseek_v3",
}

#: A template that writes arguments as JSON itself.
_WRITES_JSON = re.compile(r"arguments['\"]?\]?\s*\|\s*tojson")
_NO_PARAMETERS = {"type": "object", "properties": {}}

#: The most bytes that the arguments of a conversation's calls may take as JSON, and characters of them that
#: are few enough in any case: if each began a list, they would take about as much.
MAX_CALLS_BYTES, MAX_UNCOUNTED = 48 << 20, 1 << 16


@dataclass(frozen=True)
class ToolStyle:
    #: The parser of the model's calls; None: calls stay in the text.
    parser: ParserName | None
    #: Whether the chat template itself shows calls and results.
    is_native: bool
    #: Whether the template writes arguments as they are, so that they must be texts.
    takes_text: bool = False
    #: How a model is asked to write a call, where the chat template shows calls and no tools.
    example: str = ""


def detect_style(template: str, choice: ParserChoice) -> ToolStyle:
    """The style of a chat template, found in its text. A chosen parser is taken with every template that
    shows tools."""
    shows_tools = re.search(r"\btools\b", template) is not None
    format = _format_of(template) if choice == "auto" else choice
    is_native = shows_tools and format is not None
    if format == "none":
        return ToolStyle(None, is_native)
    takes_text = format == "deepseek_v3" and not _WRITES_JSON.search(template)
    if format == "deepseek_v3" and not shows_tools and CALLS_BEGIN in template:
        return ToolStyle(format, True, takes_text, example_call(is_fenced="```json" in template))
    return ToolStyle(format if is_native else "hermes", is_native, is_native and takes_text)


def _format_of(template: str) -> ParserName | None:
    """The format of calls in a template; None: a format that no parser here reads, or none."""
    if CHANNEL in template and START in template:
        return "harmony"
    if TOOL_CALLS in template:
        return "mistral"
    if f"{FUNCTION} name=" in template and "<param name=" in template:
        return "minicpm5"
    for mark, format in _OWN_MARKS.items():
        if mark in template:
            return format
    if any(mark in template for mark in _FOREIGN):
        return None
    if TOOL_CALL in template:
        return "hermes"
    has_llamas_headers = "<|start_header_id|>" in template or "<|header_start|>" in template
    if PYTHON_TAG in template or (has_llamas_headers and '"parameters": ' in template):
        return "llama3"
    return None


def template_tools(tools: Sequence[Function]) -> list[dict[str, Any]]:
    """The tools as chat templates expect them. Each has all members: templates rely on them."""
    functions = [
        {
            "name": tool.name,
            "description": tool.description or "",
            "parameters": tool.parameters or _NO_PARAMETERS,
        }
        for tool in tools
    ]
    return [{"type": "function", "function": function} for function in functions]


def check_calls(messages: Sequence[TemplateMessage]) -> None:
    """Raises InvalidParameter for calls whose arguments are few bytes as texts and would fill the memory as
    JSON: the limit of a body's own JSON does not see what stands in its texts."""
    texts = [call["function"]["arguments"] for each in messages for call in each.get("tool_calls") or ()]
    if sum(map(len, texts)) <= MAX_UNCOUNTED:
        return
    left = MAX_CALLS_BYTES
    for text in texts:
        left -= JsonCost.of(text.encode(errors="replace"), MAX_CALLS_BYTES, 1 << 30).num_bytes
        if left < 0:
            message = f"the arguments of calls would take more than {MAX_CALLS_BYTES} bytes of memory as JSON"
            raise InvalidParameter("messages", f"{message}; send fewer lists and objects in them")


def native_messages(
    messages: Sequence[TemplateMessage], parser: ParserName | None, takes_text: bool = False
) -> list[TemplateMessage]:
    """The messages for a template that knows tools: arguments are objects, or JSON texts for a template that
    `takes_text`, and each result has a name."""
    names: dict[str, str] = {}
    shown = []
    for message in messages:
        if calls := message.get("tool_calls"):
            names |= {call["id"]: call["function"]["name"] for call in calls}
            shown += _native_calls(message, parser, takes_text)
        elif (call_id := message.get("tool_call_id")) is not None:
            result = {"name": names.get(call_id, "")} | message
            shown.append(result | {"tool_call_id": _native_id(call_id, parser)})
        else:
            shown.append(message)
    return shown


def _native_calls(
    message: TemplateMessage, parser: ParserName | None, takes_text: bool
) -> list[TemplateMessage]:
    """The message with its calls. Llama's templates refuse several calls in a message, so that each call has
    its own message there."""
    calls = [_native_call(call, parser, takes_text) for call in message["tool_calls"]]
    if parser != "llama3":
        return [message | {"tool_calls": calls}]
    others: list[TemplateMessage] = [
        {"role": "assistant", "content": "", "tool_calls": [call]} for call in calls
    ]
    return [message | {"tool_calls": calls[:1]}, *others[1:]]


def _native_call(call: dict[str, Any], parser: ParserName | None, takes_text: bool) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"] if takes_text else _parsed(function["arguments"])
    return {
        "id": _native_id(call["id"], parser),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _native_id(call_id: str, parser: ParserName | None) -> str:
    """The id of a call as the template takes it. Mistral's templates take ids of nine letters and digits
    only; any other id has a stand-in, always the same one."""
    if parser != "mistral" or re.fullmatch(r"[a-zA-Z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _parsed(arguments: str) -> Any:
    """The arguments as JSON; an empty text is an empty object. A wrong or cut-off text stays a text."""
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return arguments if is_too_deep(parsed) else parsed


# -- in plain words -----------------------------------------------------------------------------

_EXAMPLE = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


def describe(
    tools: Sequence[Function], forced: Literal["no", "calls", "call"] | Function, example: str = ""
) -> str:
    """The text that describes the tools to the model, and how to call them: as in `example`, or, without one,
    in Hermes' format."""
    lines = [json.dumps(each["function"], ensure_ascii=False) for each in template_tools(tools)]
    match forced:
        case Function(name=name):
            how = f"Answer with the arguments for {name}, as a JSON object and nothing else."
        case "calls":
            how = f"Answer with a JSON list of calls and nothing else, for example:\n[{_FORCED_EXAMPLE}]"
        case "call":
            how = f"Answer with one call as JSON and nothing else, for example:\n{_FORCED_EXAMPLE}"
        case _ if example:
            how = (
                "To call one, write its name and arguments in this form, and stop after the last call:\n"
                f"{example}\nAnswer in plain text where no tool is needed."
            )
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
    """The messages for a template that knows only users and assistants: calls and results are text. Results
    and the user's next message become one message, since templates want turns to alternate."""
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
    """The prompt with `text` at the first place where the template shows it: the system's message, else the
    user's first. Raises what `render` raises, and InvalidParameter if the template shows `text` nowhere."""
    without = render(messages)
    for place in (with_system, with_first_user):
        try:
            token_ids = render(place(messages, text))
        except TemplateLost:
            raise
        except InvalidParameter:  # some templates refuse a system's message; others leave it out
            continue
        if token_ids != without:
            return token_ids
    message = (
        "this model's chat template has no place for tools: it shows neither tools nor a system's message"
    )
    raise InvalidParameter("tools", message)


def with_system(messages: Sequence[TemplateMessage], text: str) -> list[TemplateMessage]:
    """The messages with `text` at the end of the system's message."""
    if messages and messages[0]["role"] == "system":
        first = messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def with_first_user(messages: Sequence[TemplateMessage], text: str) -> list[TemplateMessage]:
    """The messages with `text` in front of the user's first message, for templates without a system."""
    for index, message in enumerate(messages):
        if message["role"] == "user":
            told = message | {"content": f"{text}\n\n{message['content']}"}
            return [*messages[:index], told, *messages[index + 1 :]]
    return [{"role": "user", "content": text}, *messages]
