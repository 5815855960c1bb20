"""DeepSeekParser: the calls of DeepSeek V3 and R1, and of V3.1:

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather
```json
{"city": "Paris"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>
<｜tool▁calls▁end｜>
"""

from __future__ import annotations

import re

from penstock_server.tools.parsers import Parser
from penstock_server.tools.parsing.thinking import overlap
from penstock_server.tools.reading import ArgumentsPiece, CallBegin, ValueReader

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
#: The head of a call, with what stands in front of the arguments.
_HEAD = re.compile(
    rf"\s*{_CALL_BEGIN}\s*(?:(?:function)?{_SEPARATOR}\s*(?P<old>[\w.:-]{{1,200}})\s*```(?:json)?\s*"
    rf"|(?P<new>[\w.:-]{{1,200}}?)\s*{_SEPARATOR}\s*)(?=\{{)"
)
_MAX_HEAD = 400


def example_call(is_fenced: bool) -> str:
    """A call as V3 and R1 write it (with the arguments in a fence), or as V3.1 does."""
    arguments = '{"city": "Paris"}'
    head = f"get_weather{_SEPARATOR}{arguments}"
    if is_fenced:
        head = f"function{_SEPARATOR}get_weather\n```json\n{arguments}\n```"
    return f"{CALLS_BEGIN}{_CALL_BEGIN}{head}{_CALL_END}{CALLS_END}"


class DeepSeekParser(Parser):
    def __init__(self) -> None:
        super().__init__(CALLS_BEGIN)
        self._arguments = ValueReader()

    def _after_marker(self) -> bool:
        """Takes the head of a call, up to the brace of its arguments."""
        match = _HEAD.match(self._pending)
        if match and match.end() <= _MAX_HEAD:
            self._events.append(CallBegin(match["old"] or match["new"]))
            self._pending = self._pending[match.end() :]
            self._arguments = ValueReader()
            self._is_after_call = True
            self._state = self._in_arguments
            return True
        if len(self._pending) <= _MAX_HEAD and not self._is_final:
            return False
        self._give_back()
        return True

    def _in_arguments(self) -> bool:
        """Takes arguments up to the end of their JSON, or to the end of a call whose JSON is broken."""
        before, end, _ = self._pending.partition(_CALL_END)
        held = 0 if end or self._is_final else overlap(before, _CALL_END)
        certain = before[: len(before) - held]
        num_taken = self._arguments.feed(certain)
        taken = certain[:num_taken]
        self._events.append(ArgumentsPiece(taken))
        self._pending = self._pending[len(taken) :]
        if num_taken is not None or end:
            self._state = self._after_call
            return True
        return False

    def _after_call(self) -> bool:
        """Takes what ends a call, and begins the next one."""
        before, end, rest = self._pending.partition(_CALL_END)
        if not end:
            if self._is_final:
                self._pending = ""
                self._state = self._in_text
            return self._is_final
        follows = rest.lstrip()
        if follows.startswith(_CALL_BEGIN):
            self._opening, self._pending = rest[: len(rest) - len(follows)], follows
            self._state = self._after_marker
            return True
        if follows.startswith(CALLS_END):
            rest = follows.removeprefix(CALLS_END)
        elif any(mark.startswith(follows) for mark in (_CALL_BEGIN, CALLS_END)):
            if not self._is_final:
                return False
            rest = ""  # The answer was cut off within the mark.
        self._pending = rest
        self._state = self._in_text
        return True
