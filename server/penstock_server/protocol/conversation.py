"""Conversation: turns, tools and variables of the chat template, in one form for all routes.

/v1/chat/completions, /v1/responses and /tokenize each have a form of their own, and turn it into this one.
The code behind the routes does not know by which route a conversation came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock_server.protocol.tools import AllowedToolChoice, Function, Tool, ToolChoice, ToolRef
from penstock_server.protocol.wire import invalid

Role = Literal["system", "user", "assistant", "tool"]
#: Whether the model calls tools. none: the model does not see tools. named: the model must call a certain
#: tool.
ToolMode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True)
class Call:
    """A call that an earlier answer made."""

    call_id: str
    name: str
    #: A JSON object, as text.
    arguments: str


@dataclass(frozen=True)
class Turn:
    role: Role
    text: str
    name: str | None = None
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    #: For a tool's turn: the id of the call whose result the turn is.
    call_id: str | None = None


@dataclass(frozen=True)
class ToolOffer:
    """The functions that a model may call, and whether the model must call one."""

    functions: tuple[Function, ...] = ()
    mode: ToolMode = "none"
    #: Names of the functions that may be called; empty: all functions.
    names: frozenset[str] = frozenset()
    is_parallel: bool = True
    #: The path of a function in the request, with {} in place of the function's number.
    field: str = "tools.{}"
    #: The paths of the functions, where the request has other tools between them; empty: as `field` says.
    places: tuple[str, ...] = ()

    def place(self, index: int) -> str:
        """The path of a function in the request."""
        return self.places[index] if self.places else self.field.format(index)

    def check(self) -> None:
        """Raises invalid() for two functions with one name, and for a choice that names no function."""
        names = [function.name for function in self.functions]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise invalid(f"{self.place(index)}.name", f"there are two tools named {name!r}")
        if not names and (self.names or self.mode not in ("none", "auto")):
            raise invalid("tool_choice", "there are no tools to choose from; send tools, too")
        for name in sorted(self.names - set(names)):
            raise invalid("tool_choice", f"names {name!r}, which is not among the tools")


@dataclass(frozen=True)
class Conversation:
    turns: tuple[Turn, ...]
    tools: ToolOffer = ToolOffer()
    #: Variables for the chat template.
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    #: The prompt ends with the beginning of an assistant's turn.
    begins_answer: bool = True
    #: The answer continues the last turn.
    goes_on: bool = False
    #: The most tokens of the thinking before the answer. None: no limit.
    thinking_budget: int | None = None
    #: Whether the client gets the thinking.
    shows_reasoning: bool = True

    @property
    def num_chars(self) -> int:
        """Characters of the turns' texts."""
        return sum(len(turn.text) for turn in self.turns)


@dataclass(frozen=True)
class WrongCall:
    """A mistake that templates can't show: a result without an earlier call (`is_result`), or two calls of
    one turn with the same id."""

    turn: int
    call_id: str
    is_result: bool


def wrong_call(turns: Sequence[Turn]) -> WrongCall | None:
    """The first wrong call or result; None if there is none."""
    called: set[str] = set()
    for index, turn in enumerate(turns):
        if turn.call_id is not None and turn.call_id not in called:
            return WrongCall(index, turn.call_id, is_result=True)
        ids = [call.call_id for call in turn.calls]
        if len(ids) > len(set(ids)):
            return WrongCall(index, ids[-1], is_result=False)
        called.update(ids)
    return None


def template_kwargs(
    effort: str | None,
    verbosity: str | None,
    own: Mapping[str, Any] | None,
    is_thinking_enabled: bool | None = None,
) -> dict[str, Any]:
    """The variables of the chat template that a request sets. The request's `own` variables win.
    is_thinking_enabled: None if the request does not say."""
    said: dict[str, Any] = {}
    if is_thinking_enabled is not None:
        # Qwen3 and GLM-4.5 know the one name, DeepSeek-V3.1 and Granite the other.
        said = {"enable_thinking": is_thinking_enabled, "thinking": is_thinking_enabled}
    if effort:
        # Templates that know two efforts only, such as Qwen3's, read enable_thinking. vLLM sets both, too.
        said |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    if verbosity:
        said["verbosity"] = verbosity
    return said | dict(own or {})


def tool_offer(
    tools: Sequence[Tool] | None, choice: ToolChoice | None = None, is_parallel: bool | None = None
) -> ToolOffer:
    """The offer of a chat request. None stands for a field that the request leaves out."""
    functions = tuple(tool.function for tool in tools or ())
    names: frozenset[str] = frozenset()
    mode: ToolMode
    match choice:
        case None:
            mode = "auto"
        case ToolRef():
            mode, names = "named", frozenset({choice.function.name})
        case AllowedToolChoice(allowed_tools=allowed):
            mode, names = allowed.mode, frozenset(each.function.name for each in allowed.tools)
        case _:
            mode = choice
    return ToolOffer(functions, mode, names, is_parallel is not False, "tools.{}.function")
