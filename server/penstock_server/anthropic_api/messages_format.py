"""From chat answers to the messages of Anthropic's API, whole and in events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from penstock import FinishReason, RequestOutput
from penstock_server.answers.answers import Answers
from penstock_server.answers.formats import ChatFormat
from penstock_server.answers.streaming import named_events
from penstock_server.anthropic_api.errors import message_error
from penstock_server.anthropic_api.message_bodies import (
    BlockOut,
    MessageBody,
    MessageEvent,
    MessageUsage,
    StopReason,
    TextOut,
    ThinkingOut,
    ToolUseOut,
)
from penstock_server.protocol.answer_bodies import ChatCompletionChunk, ChatDelta, ToolCallDelta
from penstock_server.protocol.errors import api_error
from penstock_server.tools.arguments import read_arguments

PING = MessageEvent(type="ping")


class _Blocks:
    """The blocks of one message as they grow, and the events that describe each change."""

    def __init__(self) -> None:
        self.blocks: list[BlockOut] = []
        #: The input of the last call so far.
        self._input = ""
        self._is_open = False

    def take(self, delta: ChatDelta) -> Iterator[MessageEvent]:
        if thinking := delta.reasoning_content:
            yield from self._begin(ThinkingOut())
            yield self._grow("thinking", thinking, {"type": "thinking_delta", "thinking": thinking})
        if delta.content:
            yield from self._begin(TextOut())
            yield self._grow("text", delta.content, {"type": "text_delta", "text": delta.content})
        for call in delta.tool_calls or ():
            yield from self._call(call)

    def _call(self, call: ToolCallDelta) -> Iterator[MessageEvent]:
        if call.id is not None:
            yield from self.close()
            yield from self._open(ToolUseOut(id=call.id, name=call.function.name or ""))
        if text := call.function.arguments:
            self._input += text
            delta = {"type": "input_json_delta", "partial_json": text}
            yield self._event("content_block_delta", delta=delta)

    def _begin(self, block: BlockOut) -> Iterator[MessageEvent]:
        """Opens `block`, unless a block of its type is open."""
        if not (self._is_open and self.blocks[-1].type == block.type):
            yield from self.close()
            yield from self._open(block)

    def _open(self, block: BlockOut) -> Iterator[MessageEvent]:
        self.blocks.append(block)
        self._is_open, self._input = True, ""
        yield self._event("content_block_start", content_block=block.model_dump())

    def _grow(self, member: str, text: str, delta: dict[str, Any]) -> MessageEvent:
        block = self.blocks[-1]
        setattr(block, member, getattr(block, member) + text)
        return self._event("content_block_delta", delta=delta)

    def close(self) -> Iterator[MessageEvent]:
        """Ends the open block, if there is one."""
        if not self._is_open:
            return
        self._is_open = False
        if isinstance(block := self.blocks[-1], ToolUseOut):
            block.input = read_arguments(self._input)
        yield self._event("content_block_stop")

    def _event(self, kind: str, **fields: Any) -> MessageEvent:
        return MessageEvent(type=kind, index=len(self.blocks) - 1, **fields)


class MessagesFormat:
    """The message that answers one request. `chat` reads the answer, with its calls and its thinking."""

    def __init__(self, request_id: str, model: str, chat: ChatFormat, max_tokens: int) -> None:
        self._id = f"msg_{request_id}"
        self._model = model
        self._chat = chat
        self._max_tokens = max_tokens
        self._blocks = _Blocks()

    def whole(self, answers: Answers) -> MessageBody:
        (choice,) = self._chat.whole(answers).choices
        message = choice.message
        calls = [
            ToolCallDelta(index=index, **call.model_dump())
            for index, call in enumerate(message.tool_calls or ())
        ]
        thinking = message.reasoning_content
        delta = ChatDelta(content=message.content, reasoning_content=thinking, tool_calls=calls)
        for _ in (*self._blocks.take(delta), *self._blocks.close()):
            pass
        return self._message(answers)

    def _message(self, answers: Answers) -> MessageBody:
        reason, sequence = self._end(answers)
        return MessageBody(
            id=self._id,
            model=self._model,
            content=self._blocks.blocks,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=MessageUsage.of(answers.usage),
        )

    def _end(self, answers: Answers) -> tuple[StopReason | None, str | None]:
        """Why the answer has ended, and the stop sequence that ended it."""
        (answer,) = answers
        if answer.finish_reason is None:
            return None, None
        if answer.finish_reason is FinishReason.LENGTH:
            is_own = answer.num_output_tokens >= self._max_tokens
            return "max_tokens" if is_own else "model_context_window_exceeded", None
        if any(isinstance(block, ToolUseOut) for block in self._blocks.blocks):
            return "tool_use", None
        if isinstance(answer.stop_reason, str):
            return "stop_sequence", answer.stop_reason
        return "end_turn", None

    # -- the stream -----------------------------------------------------------------------------

    def events(self, answers: Answers, idle_s: float | None) -> AsyncGenerator[bytes, None]:
        return named_events(self._events(answers, idle_s))

    async def _events(
        self, answers: Answers, idle_s: float | None
    ) -> AsyncGenerator[MessageEvent | None, None]:
        """All events, also that of an error. A ping comes after each `idle_s` seconds of silence."""
        yield MessageEvent(type="message_start", message=self._message(answers).model_dump())
        yield PING
        try:
            async with aclosing(answers.outputs(idle_s)) as outputs:
                async for item in outputs:
                    events = self._delta(item[1]) if item is not None else []
                    for event in events:
                        yield event
                    goes_on = item is None or item[1].finish_reason is None
                    if not events and goes_on and idle_s:
                        yield PING  # silence, or an output that is held back, maybe for long
        except Exception as error:
            known = api_error(error)
            yield MessageEvent(**message_error(known.status_code, known.body["error"]) | {"type": "error"})
            return
        for event in (*self._blocks.close(), *self._last(answers)):
            yield event

    def _delta(self, output: RequestOutput) -> list[MessageEvent]:
        chunks = self._chat.chunks(0, output)
        deltas = [chunk.choices[0].delta for chunk in chunks if isinstance(chunk, ChatCompletionChunk)]
        return [event for delta in deltas for event in self._blocks.take(delta)]

    def _last(self, answers: Answers) -> Iterator[MessageEvent]:
        reason, sequence = self._end(answers)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        usage = MessageUsage.of(answers.usage).model_dump()
        yield MessageEvent(type="message_delta", delta=delta, usage=usage)
        yield MessageEvent(type="message_stop")
