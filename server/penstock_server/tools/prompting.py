"""ToolPrompt: how the prompt of one request shows its tools, the model's calls and their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock_server.protocol.conversation import ToolMode
from penstock_server.protocol.tools import Function
from penstock_server.tools import templates
from penstock_server.tools.templates import TemplateMessage, ToolStyle


@dataclass(frozen=True)
class ToolPrompt:
    mode: ToolMode
    #: The functions that may be called; empty: the prompt shows no tools.
    functions: tuple[Function, ...]
    is_parallel: bool
    style: ToolStyle

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The tools for the chat template; None if there are none, or if the template shows no tools."""
        has_tools = self.functions and self.style.is_native and not self.style.example
        return templates.template_tools(self.functions) if has_tools else None

    def messages(self, messages: list[TemplateMessage]) -> list[TemplateMessage]:
        """The messages as the template can show them, without a description of the tools."""
        templates.check_calls(messages)
        if self.style.is_native:
            return templates.native_messages(messages, self.style.parser, self.style.takes_text)
        return templates.plain_messages(messages)

    @property
    def description(self) -> str:
        """The text that describes the tools to the model; "" if the template shows them, or there are
        none."""
        if not self.functions or (self.style.is_native and not self.style.example):
            return ""
        match self.mode:
            case "named":
                return templates.describe(self.functions, self.functions[0])
            case "required":
                return templates.describe(self.functions, "calls" if self.is_parallel else "call")
        return templates.describe(self.functions, "no", self.style.example)
