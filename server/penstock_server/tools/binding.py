"""ToolBinding: what the tools of one request demand of the tokens of its answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from penstock import Grammar, SamplingParams
from penstock.errors import InvalidParameter
from penstock_server.facade.model import ServedModel
from penstock_server.protocol.conversation import ToolMode
from penstock_server.protocol.tools import Function
from penstock_server.settings.chat_rules import ParserName
from penstock_server.tools import schemas


@dataclass(frozen=True)
class ToolBinding:
    mode: ToolMode
    #: The path in the request of each function that may be called -> the function.
    functions_by_field: dict[str, Function]
    is_parallel: bool
    parser: ParserName | None
    #: Whether the mark of a call is a special token, which the detokenizer leaves out by default.
    is_marker_special: bool

    def bind(self, params: SamplingParams) -> SamplingParams:
        """`params` with the grammar of forced or strict calls, and with the marks of calls in the text.

        Raises InvalidParameter if the answer can't have the form that `params` demands and calls, too.
        """
        if self.mode == "auto" and params.grammar is not None:
            return replace(params, grammar=self._calls_or(params.grammar))
        try:
            params = replace(params, grammar=self._grammar or params.grammar)
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
    def _grammar(self) -> Grammar | None:
        """The grammar that the tools alone demand; None: the answer is free."""
        if self.mode == "named":
            return schemas.arguments_grammar(self._functions[0])
        if self.mode == "required":
            return schemas.calls_grammar(self._functions, self.is_parallel)
        # A grammar ends the answer after the only call. Without one, the text after the call is computed and
        # left out.
        is_bound = not self.is_parallel or any(function.strict for function in self._functions)
        if self.mode == "auto" and is_bound and self._has_textual_marker:
            return schemas.tagged_calls_grammar(self._functions, self.is_parallel)
        return None

    @property
    def _functions(self) -> list[Function]:
        return [*self.functions_by_field.values()]

    @property
    def _has_textual_marker(self) -> bool:
        """Whether every call begins with a text that is no special token: only Hermes' format can have
        this."""
        return self.parser == "hermes" and not self.is_marker_special

    def check(self, model: ServedModel, grammar: Grammar | None) -> None:
        """Raises InvalidParameter, with the field's name, for a schema that must be enforced and can't be.
        grammar: that of bind()."""
        if self.mode == "none" or grammar is None:
            return
        try:
            model.check_grammar(grammar)
        except InvalidParameter as error:
            self._blame(model)
            raise InvalidParameter("tools", str(error)) from None

    def _blame(self, model: ServedModel) -> None:
        """Raises InvalidParameter with the name of the first schema that is wrong by itself, if there is
        one."""
        for field, function in self.functions_by_field.items():
            if self.mode == "auto" and not function.strict:
                continue
            try:
                model.check_grammar(schemas.arguments_grammar(function))
            except InvalidParameter as error:
                raise InvalidParameter(f"{field}.parameters", str(error)) from None
