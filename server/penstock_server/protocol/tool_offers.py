"""From `tools` and `tool_choice`, as chat requests spell them, to a ToolOffer."""

from __future__ import annotations

from collections.abc import Sequence

from penstock_server.protocol.conversation import ToolMode, ToolOffer
from penstock_server.protocol.tools import AllowedToolChoice, Tool, ToolChoice, ToolRef


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
