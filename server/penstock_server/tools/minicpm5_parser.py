"""MiniCPM5Parser: MiniCPM5's calls, which are XML:

    <function name="weather"><param name="city">Paris</param></function>, any number

A value may stand in <![CDATA[...]]>. The value of a parameter is text, and the function's JSON Schema says
which JSON the text stands for. A call is told when it is whole. What the function can't take is text, as in
vLLM: a function that is not offered, a parameter without a name or given twice, a required one that lacks.
It is told as soon as that is seen."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from penstock_server.protocol.tools import Function
from penstock_server.tools.parsers import FUNCTION, Parser
from penstock_server.tools.parsing.values import ParameterValues
from penstock_server.tools.reading import ArgumentsPiece, CallBegin

_END = "</function>"
_CDATA = "<![CDATA["
#: Some tokenizers lose the space in front of the name, or show the space as they have it in their vocabulary.
_NAME = r"""[\s\u0120]*name\s*=\s*(["'])([^"'<>]{1,200})\1\s*"""
#: The rest of a call's first tag, up to its bracket.
_HEAD = re.compile(_NAME)
_MAX_HEAD = 300
#: A head that is not all there can become whole if one of these makes it whole.
_HEAD_ENDS = [whole[first:] for whole in ("name='x'", 'name="x"') for first in range(len(whole) + 1)]
_FOLLOWING = ("<param", _END)
#: The first tag of a parameter, or the end of the call.
_NEXT = re.compile(f"<param{_NAME}>|{_END}")
#: The end of a value, plain or in CDATA. A model that forgets </param> ends the value with the call.
_VALUE_END = re.compile(f"</param>|(?={_END})")
_CDATA_END = re.compile(rf"\]\]>\s*(?:</param>|(?={_END}))")
#: Parameters in which the model at times writes all arguments as one object.
_WRAPPERS = ("arguments", "properties")
_ENTITIES = {"lt": "<", "gt": ">", "amp": "&", "quot": '"', "apos": "'"}


class MiniCPM5Parser(Parser):
    def __init__(self, functions: Sequence[Function]) -> None:
        super().__init__(FUNCTION)
        self._values = ParameterValues(functions, unknown_is_text=False)
        self._function = self._parameter = ""
        #: What was read of the call, and the JSON of its arguments.
        self._read = ""
        self._members: dict[str, str] = {}

    def _after_marker(self) -> bool:
        """Takes the rest of the first tag. A call begins where a parameter or the end of the call follows."""
        head, bracket, rest = self._pending.partition(">")
        match = _HEAD.fullmatch(head) if len(head) <= _MAX_HEAD else None
        follows, is_possible = rest.lstrip(), len(head) <= _MAX_HEAD and _can_be_head(head)
        if bracket:
            is_offered = match is not None and self._values.is_function(match[2])
            is_possible = is_offered and any(tag.startswith(follows) for tag in _FOLLOWING)
            if match and is_offered and follows.startswith(_FOLLOWING):
                return self._begin(match[2], len(head) + 1)
        if is_possible and not self._is_final:
            return False
        self._give_back()
        return True

    def _begin(self, function: str, length: int) -> bool:
        self._function, self._read, self._members = function, "", {}
        self._take(length)
        self._state = self._in_arguments
        return True

    def _take(self, length: int) -> str:
        taken, self._pending = self._pending[:length], self._pending[length:]
        self._read += taken
        return taken

    def _take_all(self) -> str:
        return self._take(len(self._pending))

    def _in_arguments(self) -> bool:
        """Takes the next parameter's first tag, or the call's last. Other text in front of it is nothing."""
        match = _NEXT.search(self._pending)
        _, parameter, rest = self._pending[: match.start() if match else None].partition("<param")
        if parameter and (match or not _can_be_head(rest)):
            self._give_back(self._read)
            return True
        if match is None:
            # An answer that ends after a parameter is a call whose last tag the model forgot.
            return self._is_final and self._end(is_whole=_END.startswith(self._take_all().strip()))
        self._take(match.end())
        if match[2] is None:
            return self._end(is_whole=True)
        self._parameter = match[2]
        self._state = self._in_value
        return True

    def _in_value(self) -> bool:
        begin = self._pending.lstrip()
        if _CDATA.startswith(begin) and not self._is_final:
            return False
        match = (_CDATA_END if begin.startswith(_CDATA) else _VALUE_END).search(self._pending)
        if match is None:
            if self._is_final:
                self._take_all()
                self._end(is_whole=False)
            return self._is_final
        if self._add(self._text(self._take(match.end())[: match.start()])):
            self._state = self._in_arguments
        else:
            self._give_back(self._read)
        return True

    def _add(self, text: str) -> bool:
        """The current parameter's value, or all arguments in it. What the function does not take is left
        out. False if one of them was given before."""
        takes, name = partial(self._values.is_parameter, self._function), self._parameter
        wrapped = _object(text) if name in _WRAPPERS and not takes(name) else None
        if wrapped is not None:
            members = {each: json.dumps(value, ensure_ascii=False) for each, value in wrapped.items()}
        else:
            members = {name: self._values.json_of(self._function, name, text)}
        taken = {each: value for each, value in members.items() if takes(each)}
        is_new = self._members.keys().isdisjoint(taken)
        self._members |= taken
        return is_new

    def _end(self, is_whole: bool) -> bool:
        """Ends the call; the arguments of a call that is cut off stay open."""
        if is_whole and not self._values.required(self._function) <= self._members.keys():
            self._give_back(self._read)
            return True
        told = ", ".join(f"{json.dumps(name)}: {value}" for name, value in self._members.items())
        arguments = ArgumentsPiece("{" + told + ("}" if is_whole else ""))
        self._events += [CallBegin(self._function), arguments]
        self._is_after_call = True
        return self._after_call()

    def _after_call(self) -> bool:
        self._state = self._in_text
        return True

    def _text(self, text: str) -> str:
        """A value without what stands for its characters in XML."""
        if text.lstrip().startswith(_CDATA):
            return text.lstrip().removeprefix(_CDATA).replace(f"]]>{_CDATA}", "")
        return re.sub(r"&(lt|gt|amp|quot|apos);", lambda match: _ENTITIES[match[1]], text.strip())


def _can_be_head(text: str) -> bool:
    """Whether a tag's name is at the end of this text, or may still come."""
    return any(_HEAD.fullmatch(text + end) for end in _HEAD_ENDS)


def _object(text: str) -> dict[str, Any] | None:
    """A JSON object, or one as Python writes it; None for anything else."""
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(found, dict) and all(isinstance(name, str) for name in found):
            with contextlib.suppress(TypeError, ValueError):  # Python's sets and bytes are no JSON
                json.dumps(found, allow_nan=False)
                return found
    return None
