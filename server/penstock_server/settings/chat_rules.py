"""ChatRules: what the server's settings say of conversations and their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

#: Formats of tool calls.
ParserName = Literal[
    "hermes",
    "llama3",
    "mistral",
    "minicpm5",
    "glm45",
    "qwen3_coder",
    "seed_oss",
    "minimax_m2",
    "deepseek_v3",
    "harmony",
]
ParserChoice = ParserName | Literal["auto", "none"]
PARSER_CHOICES = ("auto", *get_args(ParserName), "none")
ReasoningFormat = Literal["think", "mistral", "seed", "granite", "harmony"]
ReasoningChoice = ReasoningFormat | Literal["auto", "none"]
REASONING_CHOICES = ("auto", *get_args(ReasoningFormat), "none")


@dataclass(frozen=True)
class ChatRules:
    tool_call_parser: ParserChoice = "auto"
    reasoning_parser: ReasoningChoice = "auto"
    #: The name of a control token in a message is this token.
    allow_special_tokens: bool = False
