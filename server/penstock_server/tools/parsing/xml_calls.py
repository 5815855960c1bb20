"""XmlParser: calls that are XML, or look like it:

    GLM-4.5       <tool_call>weather
                  <arg_key>city</arg_key>
                  <arg_value>Paris</arg_value>
                  </tool_call>, any number
    Qwen3-Coder   <tool_call>
                  <function=weather>
                  <parameter=city>
                  Paris
                  </parameter>
                  </function>
                  </tool_call>, any number; models forget <tool_call> at times
    Seed-OSS      the same between <seed:tool_call> and </seed:tool_call>; values have no lines of their own
    MiniMax-M2    <minimax:tool_call>
                  <invoke name="weather">
                  <parameter name="city">Paris</parameter>
                  </invoke>, any number, and </minimax:tool_call>

The function's JSON Schema says which JSON the text of a value stands for. Each parameter is told when its
value is whole."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock_server.protocol.tools import Function
from penstock_server.tools.parsers import TOOL_CALL, TOOL_CALL_END, Parser
from penstock_server.tools.parsing.thinking import overlap
from penstock_server.tools.parsing.values import ParameterValues
from penstock_server.tools.reading import ArgumentsPiece, CallBegin

MINIMAX = "<minimax:tool_call>"
SEED, SEED_END = "<seed:tool_call>", "</seed:tool_call>"
QWEN_FUNCTION = "<function="
_MAX_HEAD = 300


@dataclass(frozen=True)
class XmlFormat:
    #: A text that begins a call -> the rest of the call's head, with the group `name`.
    heads: dict[str, re.Pattern[str]]
    #: The head of a parameter, with the group `key`, or the end of the call.
    next: re.Pattern[str]
    #: The end of a value. A model that forgets it ends the value with the next parameter, or with the call.
    value_end: re.Pattern[str]
    #: What may come after a call: its wrapper's end, or another head.
    wrapper_end: str
    next_call: re.Pattern[str] | None = None
    #: The value of a parameter without a type in the schema is a string.
    unknown_is_text: bool = True
    #: A line end at the beginning and at the end of a value is none of the value's.
    has_value_lines: bool = False


GLM45 = XmlFormat(
    heads={TOOL_CALL: re.compile(r"\s*(?P<name>[^\s<>{}\"]{1,200})\s*(?=<arg_key>|</tool_call>)")},
    next=re.compile(rf"<arg_key>(?P<key>[^<>]*)</arg_key>\s*<arg_value>|{TOOL_CALL_END}"),
    value_end=re.compile(rf"</arg_value>|(?=<arg_key>|{TOOL_CALL_END})"),
    wrapper_end="",
    unknown_is_text=False,
)
QWEN3_CODER = XmlFormat(
    heads={
        TOOL_CALL: re.compile(r"\s*<function=(?P<name>[^\s<>]{1,200})>"),
        QWEN_FUNCTION: re.compile(r"(?P<name>[^\s<>]{1,200})>"),
    },
    next=re.compile(r"<parameter=(?P<key>[^<>\n]{1,200})>|</function>|(?=</tool_call>)"),
    value_end=re.compile(r"</parameter>|(?=<parameter=|</function>)"),
    wrapper_end=TOOL_CALL_END,
    has_value_lines=True,
)
SEED_OSS = replace(
    QWEN3_CODER,
    heads={SEED: QWEN3_CODER.heads[TOOL_CALL], QWEN_FUNCTION: QWEN3_CODER.heads[QWEN_FUNCTION]},
    next=re.compile(rf"<parameter=(?P<key>[^<>\n]{{1,200}})>|</function>|(?={SEED_END})"),
    wrapper_end=SEED_END,
    has_value_lines=False,
)
MINIMAX_M2 = XmlFormat(
    heads={MINIMAX: re.compile(r"""\s*<invoke name=(["']?)(?P<name>[^"'<>]{1,200})\1\s*>""")},
    next=re.compile(r"""<parameter name=(["']?)(?P<key>[^"'<>]{1,200})\1\s*>|</invoke>"""),
    value_end=re.compile(r"</parameter>|(?=<parameter name=|</invoke>)"),
    wrapper_end="</minimax:tool_call>",
    next_call=re.compile(r"""\s*<invoke name=(["']?)(?P<name>[^"'<>]{1,200})\1\s*>"""),
)


class XmlParser(Parser):
    def __init__(self, form: XmlFormat, functions: Sequence[Function]) -> None:
        super().__init__()
        self._form = form
        self._values = ParameterValues(functions, form.unknown_is_text)
        self._head = re.compile("(?!)")
        self._function = self._parameter = ""
        self._is_first = True

    def _in_text(self) -> bool:
        """Takes text up to the first of the heads' markers, without the white space before it."""
        found = [(place, marker) for marker in self._form.heads if (place := self._pending.find(marker)) >= 0]
        if found:
            place, self._marker = min(found)
            self._head = self._form.heads[self._marker]
            return super()._in_text()
        # The base keeps what may be the beginning of its marker.
        self._marker = max(self._form.heads, key=lambda marker: overlap(self._pending, marker))
        return super()._in_text()

    def _after_marker(self) -> bool:
        """Takes the rest of a call's head."""
        return self._begin(self._head)

    def _begin(self, head: re.Pattern[str]) -> bool:
        match = head.match(self._pending)
        if match and match.end() <= _MAX_HEAD:
            self._function, self._is_first = match["name"], True
            self._pending = self._pending[match.end() :]
            self._events += [CallBegin(self._function), ArgumentsPiece("{")]
            self._is_after_call = True
            self._state = self._in_arguments
            return True
        if len(self._pending) <= _MAX_HEAD and not self._is_final:
            return False
        self._give_back()
        return True

    def _in_arguments(self) -> bool:
        """Takes the next parameter's head, or the call's end. What stands in front of it is nothing."""
        match = self._form.next.search(self._pending)
        if match is None:
            return self._is_final and self._end("")
        rest = self._pending[match.end() :]
        if match["key"] is None:
            self._events.append(ArgumentsPiece("}"))
            return self._end(rest)
        self._parameter, self._pending = match["key"].strip(), rest
        self._state = self._in_value
        return True

    def _in_value(self) -> bool:
        match = self._form.value_end.search(self._pending)
        if match is None:
            return self._is_final and self._end("")
        text = self._pending[: match.start()]
        if self._form.has_value_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        value = self._values.json_of(self._function, self._parameter, text)
        separator = "" if self._is_first else ", "
        name = json.dumps(self._parameter, ensure_ascii=False)
        self._events.append(ArgumentsPiece(f"{separator}{name}: {value}"))
        self._pending, self._is_first = self._pending[match.end() :], False
        self._state = self._in_arguments
        return True

    def _end(self, rest: str) -> bool:
        """Ends the call; the arguments of a call that is cut off stay open."""
        self._pending = rest
        self._state = self._after_call
        return True

    def _after_call(self) -> bool:
        """Takes the wrapper's end, or another call within the wrapper."""
        rest, wrapper = self._pending.lstrip(), self._form.wrapper_end
        if wrapper and rest.startswith(wrapper):
            self._pending = rest.removeprefix(wrapper)
        elif self._form.next_call and rest.startswith("<invoke"):
            self._opening = self._pending[: len(self._pending) - len(rest)]
            self._pending = rest
            self._state = self._in_next_head
            return True
        elif any(mark.startswith(rest) for mark in (wrapper, "<invoke" if self._form.next_call else "")):
            if not self._is_final:
                return False
            self._pending = ""  # The answer was cut off within the mark.
        self._state = self._in_text
        return True

    def _in_next_head(self) -> bool:
        assert self._form.next_call is not None
        return self._begin(self._form.next_call)
