"""ChatRules: what the server's settings say of conversations and their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ParserChoice = Literal["auto", "hermes", "llama3", "mistral", "minicpm5", "none"]


@dataclass(frozen=True)
class ChatRules:
    tool_call_parser: ParserChoice = "auto"
    #: The name of a control token in a message is this token.
    allow_special_tokens: bool = False
