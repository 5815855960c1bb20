"""From chat answers to the objects of Ollama's API, whole and one a line."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from penstock import FinishReason
from penstock_server.answers.answers import Answers
from penstock_server.answers.formats import ChatFormat
from penstock_server.ollama_api.bodies import (
    Answered,
    CalledFunctionOut,
    ChatAnswer,
    GenerateAnswer,
    MessageOut,
    ToolCallOut,
    durations,
)
from penstock_server.ollama_api.errors import ollama_error
from penstock_server.protocol.answer_bodies import ChatCompletionChunk, ChatLogprobs, ToolCallDelta
from penstock_server.protocol.errors import api_error
from penstock_server.tools.arguments import read_arguments

#: A line for each object.
MEDIA_TYPE = "application/x-ndjson"


@dataclass
class Piece:
    """What is new in an answer."""

    text: str = ""
    thinking: str = ""
    calls: list[ToolCallOut] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.thinking or self.calls or self.logprobs)


class _Calls:
    """Calls as they come. Ollama's clients get a call when it is whole."""

    def __init__(self) -> None:
        self._number = 0
        self._open: ToolCallDelta | None = None

    def take(self, delta: ToolCallDelta) -> list[ToolCallOut]:
        if delta.id is None and self._open is not None:
            self._open.function.arguments += delta.function.arguments
            return []
        ended = self.close()
        self._open = delta.model_copy(deep=True)
        return ended

    def close(self) -> list[ToolCallOut]:
        if (call := self._open) is None:
            return []
        self._open = None
        arguments = read_arguments(call.function.arguments)
        function = CalledFunctionOut(index=self._number, name=call.function.name or "", arguments=arguments)
        self._number += 1
        return [ToolCallOut(id=call.id or "", function=function)]


class LinesFormat:
    """The answer to one request. `read` finds calls and thinking in it."""

    def __init__(self, model: str, read: ChatFormat, is_chat: bool) -> None:
        """is_chat: the answer is that of /api/chat, else that of /api/generate."""
        self._model = model
        self._read = read
        self._is_chat = is_chat
        self._calls = _Calls()

    def whole(self, answers: Answers) -> Answered:
        (choice,) = self._read.whole(answers).choices
        message = choice.message
        calls = [
            ToolCallDelta(index=index, **call.model_dump())
            for index, call in enumerate(message.tool_calls or ())
        ]
        piece = Piece(message.content or "", message.reasoning_content or "")
        piece.calls = [*(ended for call in calls for ended in self._calls.take(call)), *self._calls.close()]
        piece.logprobs = _logprobs(choice.logprobs)
        return self._body(piece, **self._end(answers))

    def _body(self, piece: Piece, **fields: Any) -> Answered:
        fields |= {"model": self._model, "logprobs": piece.logprobs or None}
        thinking = piece.thinking or None
        if not self._is_chat:
            return GenerateAnswer(response=piece.text, thinking=thinking, **fields)
        message = MessageOut(content=piece.text, thinking=thinking, tool_calls=piece.calls or None)
        return ChatAnswer(message=message, **fields)

    def _end(self, answers: Answers) -> dict[str, Any]:
        (answer,) = answers
        usage = answers.usage
        return {
            "done": True,
            "done_reason": "length" if answer.finish_reason is FinishReason.LENGTH else "stop",
            "prompt_eval_count": usage.prompt_tokens,
            "eval_count": usage.completion_tokens,
            **durations(),
        }

    async def events(self, answers: Answers, idle_s: float | None) -> AsyncGenerator[bytes, None]:
        """The lines. After each `idle_s` seconds of silence comes an object without text: a line without an
        object would stop Ollama's clients."""
        try:
            async with aclosing(answers.outputs(idle_s)) as outputs:
                async for item in outputs:
                    chunks = self._read.chunks(*item) if item is not None else []
                    piece = self._piece(chunk for chunk in chunks if isinstance(chunk, ChatCompletionChunk))
                    goes_on = item is None or item[1].finish_reason is None
                    if not piece.is_empty or (goes_on and idle_s):
                        yield _line(self._body(piece))
            yield _line(self._body(Piece(calls=self._calls.close()), **self._end(answers)))
        except Exception as error:
            known = api_error(error)
            yield _json_line(ollama_error(known.status_code, known.body["error"]))

    def _piece(self, chunks: Iterator[ChatCompletionChunk]) -> Piece:
        piece = Piece()
        for choice in (chunk.choices[0] for chunk in chunks):
            piece.text += choice.delta.content or ""
            piece.thinking += choice.delta.reasoning_content or ""
            for call in choice.delta.tool_calls or ():
                piece.calls += self._calls.take(call)
            piece.logprobs += _logprobs(choice.logprobs)
        return piece


def _logprobs(found: ChatLogprobs | None) -> list[dict[str, Any]]:
    return [token.model_dump() for token in found.content] if found else []


def _line(body: Answered) -> bytes:
    return body.model_dump_json().encode() + b"\n"


def _json_line(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode() + b"\n"
