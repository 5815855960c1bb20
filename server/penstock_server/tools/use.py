"""ToolUse: how one request's tools are shown to the model, and how its answer is bound and read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from penstock import Grammar, SamplingParams, Tokenizer
from penstock.errors import InvalidParameter
from penstock_server.facade.model import ServedModel
from penstock_server.protocol.conversation import ToolMode, ToolOffer
from penstock_server.protocol.tools import Function
from penstock_server.settings.settings import ParserChoice
from penstock_server.tools import schemas, templates
from penstock_server.tools.call_filters import DistinctCalls, FirstCall
from penstock_server.tools.parsers import (
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
from penstock_server.tools.templates import TemplateMessage, ToolStyle

_MARKERS = {"hermes": TOOL_CALL, "llama3": PYTHON_TAG, "mistral": TOOL_CALLS}


@dataclass(frozen=True)
class ToolUse:
    mode: ToolMode
    #: Those that may be called, with the fields of the request that they stand in.
    tools: tuple[tuple[str, Function], ...]
    is_parallel: bool
    style: ToolStyle
    #: Whether calls begin with a token that the detokenizer leaves out unless told otherwise.
    is_marker_special: bool

    @classmethod
    def of(cls, offer: ToolOffer, tokenizer: Tokenizer, parser: ParserChoice) -> ToolUse:
        mode: ToolMode = offer.mode if offer.functions else "none"
        style = templates.detect_style(tokenizer.tool_template, parser)
        tools = tuple(
            (offer.field.format(index), function)
            for index, function in enumerate(offer.functions)
            if not offer.names or function.name in offer.names
        )
        special = {tokenizer.token_text(token_id) for token_id in tokenizer.special_token_ids}
        return cls(
            mode,
            tools if mode != "none" else (),
            offer.is_parallel,
            style,
            style.parser is not None and _MARKERS[style.parser] in special,
        )

    # -- the prompt -----------------------------------------------------------------------------

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """For the chat template."""
        shown = self._functions
        return templates.template_tools(shown) if shown and self.style.is_native else None

    def messages(self, messages: list[TemplateMessage]) -> list[TemplateMessage]:
        """Without a description of the tools."""
        if self.style.is_native:
            return templates.native_messages(messages, self.style.parser)
        return templates.plain_messages(messages)

    @property
    def description(self) -> str:
        """What the model has to be told of the tools in words; "" if there is nothing to tell."""
        tools = self._functions
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

        Raises InvalidParameter if the answer has to keep to something else as well and can't.
        """
        if self.mode == "auto" and params.grammar is not None:
            return replace(params, grammar=self._calls_or(params.grammar))
        try:
            params = replace(params, grammar=self.grammar or params.grammar)
        except InvalidParameter as error:
            raise InvalidParameter("tools", str(error)) from None
        if self.mode == "auto" and self.is_marker_special:
            params = replace(params, skip_special_tokens=False)
        return params

    def _calls_or(self, content: Grammar) -> Grammar:
        if not self._has_textual_marker or content.kind != "json_schema":
            message = (
                "this model can't be left to choose between calls and an answer of a given form; set "
                "tool_choice to none or required, or leave out the form"
            )
            raise InvalidParameter("tool_choice", message)
        return schemas.calls_or_json_grammar(self._functions, self.is_parallel, content.text)

    @cached_property
    def grammar(self) -> Grammar | None:
        """What the tools alone demand of the answer."""
        if self.mode == "named":
            return schemas.arguments_grammar(self._functions[0])
        if self.mode == "required":
            return schemas.calls_grammar(self._functions, self.is_parallel)
        # A grammar also ends the answer after the only call; elsewhere what follows is computed and left out.
        is_bound = not self.is_parallel or any(function.strict for function in self._functions)
        if self.mode == "auto" and is_bound and self._has_textual_marker:
            return schemas.tagged_calls_grammar(self._functions, self.is_parallel)
        return None

    @property
    def _functions(self) -> list[Function]:
        return [function for _, function in self.tools]

    @property
    def _has_textual_marker(self) -> bool:
        """Only Hermes' format has a beginning for every call that is text and not a special token."""
        return self.style.parser == "hermes" and not self.is_marker_special

    def check(self, model: ServedModel, grammar: Grammar | None) -> None:
        """`grammar` is what bind() set. Raises InvalidParameter, naming the field, for schemas that can't be
        enforced and have to be."""
        if self.mode == "none" or grammar is None:
            return
        try:
            model.check_grammar(grammar)
        except InvalidParameter as error:
            self._blame(model)
            raise InvalidParameter("tools", str(error)) from None

    def _blame(self, model: ServedModel) -> None:
        """Raises InvalidParameter with the name of the first schema that is at fault by itself."""
        for field, function in self.tools:
            if self.mode == "auto" and not function.strict:
                continue
            try:
                model.check_grammar(schemas.arguments_grammar(function))
            except InvalidParameter as error:
                raise InvalidParameter(f"{field}.parameters", str(error)) from None

    def parser(self) -> AnswerParser | None:
        """A new one, for one answer; None if there is nothing to find in it."""
        parser = self._parser()
        return FirstCall(parser) if parser and not self.is_parallel else parser

    def _parser(self) -> AnswerParser | None:
        names = [function.name for function in self._functions]
        match self.mode, self.style.parser:
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
        return None

    def ending(self) -> Callable[[str], bool] | None:
        """For one answer, which must be told all of its text as it comes: whether it is over, though its
        grammar would let it go on. None if only the engine knows."""
        calls = self._parser()
        if not isinstance(calls, DistinctCalls) or not self.is_parallel:
            return None

        def is_over(text: str) -> bool:
            calls.feed(text)
            return calls.is_over

        return is_over

    @property
    def finish_reason(self) -> Literal["stop", "tool_calls"]:
        """Of a whole answer with calls. At OpenAI one that had to call a certain tool just stops."""
        return "stop" if self.mode == "named" else "tool_calls"
