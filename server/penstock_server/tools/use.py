"""ToolUse: one request's tools and reasoning: how the prompt shows tools, what binds the answer, and how the
answer is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from penstock import Tokenizer
from penstock_server.protocol.conversation import ToolMode, ToolOffer
from penstock_server.settings.chat_rules import ParserChoice, ParserName
from penstock_server.tools import templates
from penstock_server.tools.binding import ToolBinding
from penstock_server.tools.call_filters import DistinctCalls, FirstCall
from penstock_server.tools.minicpm5_parser import MiniCPM5Parser
from penstock_server.tools.parsers import (
    FUNCTION,
    PYTHON_TAG,
    TOOL_CALL,
    TOOL_CALLS,
    AnswerParser,
    ArgumentsParser,
    HermesParser,
    ListParser,
    Llama3Parser,
    MistralParser,
)
from penstock_server.tools.parsing.deepseek import CALLS_BEGIN, DeepSeekParser
from penstock_server.tools.parsing.harmony import CHANNEL, HarmonyParser
from penstock_server.tools.parsing.thinking import PlainParser
from penstock_server.tools.parsing.xml_calls import (
    GLM45,
    MINIMAX,
    MINIMAX_M2,
    QWEN3_CODER,
    SEED,
    SEED_OSS,
    XmlParser,
)
from penstock_server.tools.prompting import ToolPrompt
from penstock_server.tools.reasoning import Reasoning

#: The text with which a call begins in each format.
_MARKERS: dict[ParserName, str] = {
    "hermes": TOOL_CALL,
    "llama3": PYTHON_TAG,
    "mistral": TOOL_CALLS,
    "minicpm5": FUNCTION,
    "glm45": TOOL_CALL,
    "qwen3_coder": TOOL_CALL,
    "seed_oss": SEED,
    "minimax_m2": MINIMAX,
    "deepseek_v3": CALLS_BEGIN,
    "harmony": CHANNEL,
}


_XML_FORMATS = {
    "glm45": GLM45,
    "qwen3_coder": QWEN3_CODER,
    "seed_oss": SEED_OSS,
    "minimax_m2": MINIMAX_M2,
}


@dataclass(frozen=True)
class ToolUse:
    prompt: ToolPrompt
    binding: ToolBinding
    #: How the answer thinks. None: it does not, or its thinking stays in the text.
    reasoning: Reasoning | None = None
    shows_reasoning: bool = True

    @classmethod
    def of(cls, offer: ToolOffer, tokenizer: Tokenizer, parser: ParserChoice) -> ToolUse:
        mode: ToolMode = offer.mode if offer.functions else "none"
        style = templates.detect_style(tokenizer.tool_template, parser)
        functions = {
            offer.place(index): function
            for index, function in enumerate(offer.functions)
            if mode != "none" and (not offer.names or function.name in offer.names)
        }
        special = {tokenizer.token_text(token_id) for token_id in tokenizer.special_token_ids}
        is_marker_special = style.parser is not None and _MARKERS[style.parser] in special
        return cls(
            ToolPrompt(mode, tuple(functions.values()), offer.is_parallel, style),
            ToolBinding(mode, functions, offer.is_parallel, style.parser, is_marker_special),
        )

    def parser(self) -> AnswerParser | None:
        """A new parser for one answer; None if the answer can hold neither calls nor reasoning."""
        calls = self._parser()
        parser = self._after_thinking(calls)
        return FirstCall(parser) if parser and calls and not self.prompt.is_parallel else parser

    def _after_thinking(self, calls: AnswerParser | None) -> AnswerParser | None:
        if self.reasoning is None:
            return calls
        style = self.prompt.style.parser
        # In a forced call of a certain function, a message to it is its arguments.
        reads_calls = calls is not None and style is not None and self.prompt.mode != "named"
        marker = _MARKERS[style] if reads_calls and style else None
        names = [function.name for function in self.prompt.functions]
        return self.reasoning.parser(calls or PlainParser(), marker, names)

    def _parser(self) -> AnswerParser | None:
        names = [function.name for function in self.prompt.functions]
        match self.prompt.mode, self.prompt.style.parser:
            case "named", _:
                return ArgumentsParser(names[0])
            case "required", _:
                return DistinctCalls(ListParser())
            case "auto", "hermes":
                return HermesParser()
            case "auto", "llama3":
                return Llama3Parser(names)
            case "auto", "mistral":
                return MistralParser()
            case "auto", "minicpm5":
                return MiniCPM5Parser(self.prompt.functions)
            case "auto", "deepseek_v3":
                return DeepSeekParser()
            case "auto", "harmony":
                # Harmony's calls are found where its channels are read.
                return PlainParser() if self.reasoning else HarmonyParser(PlainParser(), names)
            case "auto", ("glm45" | "qwen3_coder" | "seed_oss" | "minimax_m2") as name:
                return XmlParser(_XML_FORMATS[name], self.prompt.functions)
        return None

    def ending(self) -> Callable[[str], bool] | None:
        """A function for one answer: it gets each new piece of text, and returns whether the answer ends
        here, though the grammar would let it go on. None if only the engine knows when the answer ends."""
        calls = self._parser()
        if not isinstance(calls, DistinctCalls) or not self.prompt.is_parallel:
            return None

        parser = self._after_thinking(calls) or calls

        def is_over(text: str) -> bool:
            parser.feed(text)
            return calls.is_over

        return is_over

    @property
    def finish_reason(self) -> Literal["stop", "tool_calls"]:
        """The finish reason of a complete answer with calls. As at OpenAI, an answer that had to call a
        certain tool has "stop"."""
        return "stop" if self.prompt.mode == "named" else "tool_calls"
