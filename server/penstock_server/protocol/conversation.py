"""Conversation: what a model is to answer, by whatever route it came: turns, tools, the template's variables.

/v1/chat/completions, /v1/responses and /tokenize each spell these in their own way, and each turns its own
spelling into this one. Nothing behind them knows which of them it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock_server.protocol.tools import Function
from penstock_server.protocol.wire import invalid

Role = Literal["system", "user", "assistant", "tool"]
#: Whether tools are called. none: they are not even shown. named: one certain tool is called.
ToolMode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True)
class Call:
    """A call that an earlier answer made."""

    call_id: str
    name: str
    #: JSON, as text.
    arguments: str


@dataclass(frozen=True)
class Turn:
    role: Role
    text: str
    name: str | None = None
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    #: Of the call whose result a tool's turn is.
    call_id: str | None = None


@dataclass(frozen=True)
class ToolOffer:
    """The functions that a model may call, and whether it must."""

    functions: tuple[Function, ...] = ()
    mode: ToolMode = "none"
    #: The functions that may be called; none named: all of them.
    names: frozenset[str] = frozenset()
    is_parallel: bool = True
    #: The request's field that a function stands in, with its number in the place of {}.
    field: str = "tools.{}"

    def check(self) -> None:
        """Raises invalid() for functions and a choice that do not fit together."""
        names = [function.name for function in self.functions]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise invalid(f"{self.field.format(index)}.name", f"there are two tools named {name!r}")
        if not names and (self.names or self.mode not in ("none", "auto")):
            raise invalid("tool_choice", "there are no tools to choose from; send them as tools")
        for name in sorted(self.names - set(names)):
            raise invalid("tool_choice", f"names {name!r}, which is not among the tools")


@dataclass(frozen=True)
class Conversation:
    turns: tuple[Turn, ...]
    tools: ToolOffer = ToolOffer()
    #: Variables for the chat template.
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    #: The prompt ends with the beginning of an answer.
    begins_answer: bool = True
    #: The answer goes on where the last turn ends.
    goes_on: bool = False

    @property
    def num_chars(self) -> int:
        return sum(len(turn.text) for turn in self.turns)


@dataclass(frozen=True)
class WrongCall:
    """What templates can't show: a result whose call no earlier turn made; or else two calls of one turn with
    the same id."""

    turn: int
    call_id: str
    is_result: bool


def wrong_call(turns: Sequence[Turn]) -> WrongCall | None:
    """The first one."""
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
    effort: str | None, verbosity: str | None, own: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What a request says to the chat template; its `own` variables win."""
    said: dict[str, Any] = {}
    if effort:
        # What templates ask for that know two efforts only, such as Qwen3's; as vLLM does it.
        said = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    if verbosity:
        said["verbosity"] = verbosity
    return said | dict(own or {})
