"""ToolUse: how one request's tools are shown to the model, and how its answer is bound and read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from penstock.engine import Engine
from penstock.errors import InvalidParameter
from penstock.generation.grammar import Grammar
from penstock.generation.sequence import SamplingParams
from penstock.text.tokenizer import Tokenizer
from penstock_server.protocol import ChatCompletionRequest
from penstock_server.tools import schemas, templates
from penstock_server.tools.parsers import (
    PYTHON_TAG,
    TOOL_CALL,
    TOOL_CALLS,
    AnswerParser,
    ArgumentsParser,
    FirstCall,
    HermesParser,
    ListParser,
    Llama3Parser,
    MistralParser,
    Parser,
    ParserChoice,
)
from penstock_server.tools.request import AllowedToolChoice, Tool, ToolRef
from penstock_server.tools.templates import TemplateMessage, ToolStyle

#: none: no tools are shown. named: one is called, and the answer is its arguments.
Mode = Literal["none", "auto", "required", "named"]

_MARKERS = {"hermes": TOOL_CALL, "llama3": PYTHON_TAG, "mistral": TOOL_CALLS}


@dataclass(frozen=True)
class ToolUse:
    mode: Mode
    #: Those that may be called, with their place in the request.
    tools: tuple[tuple[int, Tool], ...]
    is_parallel: bool
    style: ToolStyle
    #: Whether calls begin with a token that the detokenizer leaves out unless told otherwise.
    is_marker_special: bool

    @classmethod
    def of(cls, body: ChatCompletionRequest, tokenizer: Tokenizer, parser: ParserChoice) -> ToolUse:
        mode = _mode(body)
        style = templates.detect_style(tokenizer.tool_template, parser)
        tools = tuple(enumerate(body.tools or ()))
        if body.chosen_names:
            tools = tuple(pair for pair in tools if pair[1].function.name in body.chosen_names)
        special = {tokenizer.token_text(token_id) for token_id in tokenizer.special_token_ids}
        return cls(
            mode,
            tools if mode != "none" else (),
            body.parallel_tool_calls is not False,
            style,
            style.parser is not None and _MARKERS[style.parser] in special,
        )

    # -- the prompt -----------------------------------------------------------------------------

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """For the chat template."""
        shown = [tool for _, tool in self.tools]
        return templates.template_tools(shown) if shown and self.style.is_native else None

    def messages(self, messages: list[TemplateMessage]) -> list[TemplateMessage]:
        """Without a description of the tools."""
        if self.style.is_native:
            return templates.native_messages(messages, self.style.parser)
        return templates.plain_messages(messages)

    @property
    def description(self) -> str:
        """What the model has to be told of the tools in words; "" if there is nothing to tell."""
        tools = [tool for _, tool in self.tools]
        if not tools or self.style.is_native:
            return ""
        match self.mode:
            case "named":
                return templates.describe(tools, tools[0])
            case "required":
                return templates.describe(tools, "calls" if self.is_parallel else "call")
        return templates.describe(tools, "no")

    # -- the answer -----------------------------------------------------------------------------

    def bind(self, params: SamplingParams) -> SamplingParams:
        """With the grammar of forced or strict calls, and with the tokens that mark a call in the text.

        Raises InvalidParameter if an answer would have to keep to something else as well.
        """
        grammar = self.grammar
        if params.grammar is not None and self.mode == "auto":
            message = (
                "an answer of a given form leaves no room for calls; set tool_choice to none or required"
            )
            raise InvalidParameter("tool_choice", message)
        if grammar is not None:
            params = replace(params, grammar=grammar)
        if self.mode == "auto" and self.is_marker_special:
            params = replace(params, skip_special_tokens=False)
        return params

    @property
    def grammar(self) -> Grammar | None:
        functions = [tool.function for _, tool in self.tools]
        if self.mode == "named":
            return schemas.arguments_grammar(functions[0])
        if self.mode == "required":
            return schemas.calls_grammar(functions, self.is_parallel)
        if self._is_strict:
            return schemas.tagged_calls_grammar(functions, self.is_parallel)
        return None

    @property
    def _is_strict(self) -> bool:
        """Only Hermes' format has one beginning for all calls that is text and not a special token."""
        is_bindable = self.style.parser == "hermes" and not self.is_marker_special
        return self.mode == "auto" and is_bindable and any(tool.function.strict for _, tool in self.tools)

    def check(self, engine: Engine) -> None:
        """Raises InvalidParameter, naming the field, for schemas that can't be enforced and have to be."""
        if (grammar := self.grammar) is None:
            return
        for index, tool in self.tools:
            if self.mode != "auto" or tool.function.strict:
                try:
                    engine.grammars.check(schemas.arguments_grammar(tool.function))
                except InvalidParameter as error:
                    raise InvalidParameter(f"tools.{index}.function.parameters", str(error)) from None
        try:
            engine.grammars.check(grammar)
        except InvalidParameter as error:
            raise InvalidParameter("tools", str(error)) from None

    def parser(self) -> AnswerParser | None:
        """A new one, for one answer; None if there is nothing to find in it."""
        parser = self._parser()
        return FirstCall(parser) if parser and not self.is_parallel else parser

    def _parser(self) -> Parser | None:
        names = [tool.function.name for _, tool in self.tools]
        match self.mode, self.style.parser:
            case "named", _:
                return ArgumentsParser(names[0])
            case "required", _:
                return ListParser()
            case "auto", "hermes":
                return HermesParser()
            case "auto", "llama3":
                return Llama3Parser(names)
            case "auto", "mistral":
                return MistralParser()
        return None

    @property
    def finish_reason(self) -> Literal["stop", "tool_calls"]:
        """Of a whole answer with calls. At OpenAI one that had to call a certain tool just stops."""
        return "stop" if self.mode == "named" else "tool_calls"


def _mode(body: ChatCompletionRequest) -> Mode:
    if not body.tools:
        return "none"
    match body.tool_choice:
        case None:
            return "auto"
        case ToolRef():
            return "named"
        case AllowedToolChoice(allowed_tools=allowed):
            return allowed.mode
        case mode:
            return mode
