"""Tool calls as OpenAI's objects: whole messages, and the deltas of a stream."""

from __future__ import annotations

import uuid

from penstock import FinishReason
from penstock_server.protocol.answer_bodies import (
    CalledFunction,
    ChatDelta,
    ChatFinish,
    ChatMessage,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from penstock_server.tools.reading import ArgumentsPiece, CallBegin, Event, ReasoningPiece, TextPiece
from penstock_server.tools.use import ToolUse


class ToolAnswer:
    """One choice: reads its text as it comes, and collects text and calls."""

    def __init__(self, use: ToolUse) -> None:
        """`use` has a parser."""
        parser = use.parser()
        assert parser is not None
        self._parser = parser
        self._finish_reason = use.finish_reason
        self._shows_reasoning = use.shows_reasoning
        self._calls: list[ToolCall] = []
        self._text = self._reasoning = ""

    def deltas(self, text: str, is_last: bool) -> list[ChatDelta]:
        """The deltas that the next piece of the answer makes. is_last: no more text will come."""
        events = self._parser.feed(text)
        if is_last:
            events += self._parser.finish()
        return [
            self._delta(event)
            for event in events
            if self._shows_reasoning or not isinstance(event, ReasoningPiece)
        ]

    def _delta(self, event: Event) -> ChatDelta:
        match event:
            case TextPiece(text):
                self._text += text
                return ChatDelta(content=text)
            case ReasoningPiece(text):
                self._reasoning += text
                return ChatDelta(reasoning_content=text, reasoning=text)
            case CallBegin(name, call_id):
                call = ToolCall(id=self._new_id(call_id), function=CalledFunction(name=name, arguments=""))
                self._calls.append(call)
                function = FunctionDelta(name=name, arguments="")
                return self._call_delta(
                    ToolCallDelta(index=0, id=call.id, type="function", function=function)
                )
            case ArgumentsPiece(text):
                self._calls[-1].function.arguments += text
                return self._call_delta(ToolCallDelta(index=0, function=FunctionDelta(arguments=text)))

    def _call_delta(self, delta: ToolCallDelta) -> ChatDelta:
        delta.index = len(self._calls) - 1
        return ChatDelta(tool_calls=[delta])

    def _new_id(self, given: str | None) -> str:
        """A call's id: the one that the model wrote, if any, so that the model finds it again, else a new
        one."""
        taken = {call.id for call in self._calls}
        return given if given and given not in taken else f"call_{uuid.uuid4().hex[:24]}"

    def message(self) -> ChatMessage:
        """The message with all text, reasoning and calls. Content is null if there are calls or reasoning
        alone."""
        is_text_alone = not (self._calls or self._reasoning)
        return ChatMessage(
            content=self._text if is_text_alone else self._text or None,
            reasoning_content=self._reasoning or None,
            reasoning=self._reasoning or None,
            tool_calls=self._calls or None,
        )

    def finish(self, reason: FinishReason | None) -> ChatFinish:
        if reason is FinishReason.LENGTH:
            return "length"
        return self._finish_reason if self._calls else "stop"
