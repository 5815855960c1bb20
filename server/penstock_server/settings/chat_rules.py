"""ChatRules: what the server's settings say of conversations and their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ParserChoice = Literal["auto", "hermes", "llama3", "mistral", "minicpm5", "none"]
ReasoningFormat = Literal["think", "mistral", "seed", "granite", "harmony"]
ReasoningChoice = ReasoningFormat | Literal["auto", "none"]
REASONING_CHOICES = ("auto", "think", "mistral", "seed", "granite", "harmony", "none")


@dataclass(frozen=True)
class ChatRules:
    tool_call_parser: ParserChoice = "auto"
    reasoning_parser: ReasoningChoice = "auto"
    #: The name of a control token in a message is this token.
    allow_special_tokens: bool = False
