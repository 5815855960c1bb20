"""From outputs of the engine to OpenAI's objects, whole and in chunks, chat and completions.

Chunks are built so that exactly the fields which belong on the wire are set: a stream leaves out
`usage` unless the client asked for it, and then says null in all chunks but the last.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from pydantic import BaseModel

from penstock.generation.request import RequestOutput
from penstock.generation.sequence import FinishReason, TokenLogprobs
from penstock.text.tokenizer import Tokenizer
from penstock_server.answers import Answer, Answers
from penstock_server.responses import (
    FINGERPRINT,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatFinish,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Finish,
    TopLogprob,
    Usage,
)
from penstock_server.tools.answering import ToolAnswer
from penstock_server.tools.use import ToolUse

#: The members that say that a choice has not ended.
_GOES_ON: dict[str, Any] = {"finish_reason": None}


class Format(Protocol):
    """How one request's answers look."""

    def chunks(self, index: int, output: RequestOutput) -> list[BaseModel]: ...

    def usage_chunk(self, usage: Usage) -> BaseModel: ...

    def whole(self, answers: Answers) -> BaseModel: ...


async def stream(
    form: Format, answers: Answers, with_usage: bool, idle_s: float | None
) -> AsyncGenerator[BaseModel | None, None]:
    """All chunks of a request; None whenever nothing came for `idle_s` seconds."""
    async with aclosing(answers.outputs(idle_s)) as outputs:
        async for item in outputs:
            if item is None:
                yield None
            else:
                chunks = form.chunks(*item)
                for chunk in chunks:
                    yield chunk
                if not chunks and idle_s:
                    yield None  # what came is held back, maybe for long
    if with_usage:
        yield form.usage_chunk(answers.usage)


def _head(object_name: str, prefix: str, request_id: str, model: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{request_id}",
        "object": object_name,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": FINGERPRINT,
    }


class ChatFormat:
    """/v1/chat/completions. Each choice begins with a chunk that names the role."""

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: Tokenizer,
        with_usage: bool,
        has_logprobs: bool,
        tools: ToolUse | None = None,
    ) -> None:
        """tools: how answers are read that may hold calls."""
        self._whole_head = _head("chat.completion", "chatcmpl", request_id, model)
        self._chunk_head = self._whole_head | {"object": "chat.completion.chunk"}
        if with_usage:
            self._chunk_head["usage"] = None
        self._tokenizer = tokenizer
        self._has_logprobs = has_logprobs
        self._tools = tools
        self._tool_answers: dict[int, ToolAnswer] = {}
        self._begun: set[int] = set()

    def chunks(self, index: int, output: RequestOutput) -> list[BaseModel]:
        chunks = []
        if index not in self._begun:
            self._begun.add(index)
            # As at OpenAI, content is null until it is known that there is some.
            delta = ChatDelta(role="assistant", content=None if self._tools else "")
            chunks.append(self._chunk(index, delta, None, _GOES_ON))
        if self._tools:
            return chunks + self._tool_chunks(index, output, self._tools)
        if output.text or output.logprobs or output.finish_reason:
            delta = ChatDelta(content=output.text) if output.text else ChatDelta()
            chunks.append(self._chunk(index, delta, self._logprobs(output.logprobs), _end(output)))
        return chunks

    def _tool_chunks(self, index: int, output: RequestOutput, tools: ToolUse) -> list[BaseModel]:
        """The end has a chunk of its own, behind all calls."""
        answer = self._tool_answers.setdefault(index, ToolAnswer(tools))
        deltas = answer.deltas(output.text, output.finish_reason is not None)
        logprobs = self._logprobs(output.logprobs)
        if not deltas and output.logprobs:
            deltas = [ChatDelta()]
        chunks = []
        for delta in deltas:
            chunks.append(self._chunk(index, delta, logprobs, _GOES_ON))
            logprobs = None
        if output.finish_reason is not None:
            end = _end(output) | {"finish_reason": answer.finish(output.finish_reason)}
            chunks.append(self._chunk(index, ChatDelta(), None, end))
        return chunks

    def _chunk(
        self, index: int, delta: ChatDelta, logprobs: ChatLogprobs | None, end: dict[str, Any]
    ) -> BaseModel:
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, **end)
        return ChatCompletionChunk(**self._chunk_head, choices=[choice])

    def usage_chunk(self, usage: Usage) -> BaseModel:
        return ChatCompletionChunk(**(self._chunk_head | {"usage": usage}), choices=[])

    def whole(self, answers: Answers) -> ChatCompletion:
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return ChatCompletion(**self._whole_head, choices=choices, usage=answers.usage)

    def _choice(self, index: int, answer: Answer) -> ChatChoice:
        message = ChatMessage(content=answer.text)
        finish_reason: ChatFinish = _finish(answer.finish_reason)
        if self._tools:
            read = ToolAnswer(self._tools)
            read.deltas(answer.text, is_last=True)
            message, finish_reason = read.message(), read.finish(answer.finish_reason)
        return ChatChoice(
            index=index,
            message=message,
            logprobs=self._logprobs(answer.logprobs),
            finish_reason=finish_reason,
            stop_reason=answer.stop_reason,
        )

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if not self._has_logprobs:
            return None
        content = [
            ChatTokenLogprob(
                **self._token(token.token_id, token.logprob),
                top_logprobs=[TopLogprob(**self._token(*pair)) for pair in token.top],
            )
            for token in tokens
        ]
        return ChatLogprobs(content=content)

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._tokenizer.token_text(token_id),
            "logprob": logprob,
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }


class CompletionFormat:
    """/v1/completions. With `echoes`, choice i's text begins with `echoes[i]`."""

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: Tokenizer,
        with_usage: bool,
        has_logprobs: bool,
        echoes: Sequence[str] = (),
    ) -> None:
        self._head = _head("text_completion", "cmpl", request_id, model)
        self._chunk_head = self._head | ({"usage": None} if with_usage else {})
        self._tokenizer = tokenizer
        self._has_logprobs = has_logprobs
        self._echoes = dict(enumerate(echoes))
        #: Per choice, where its next token begins: a stream tells offsets bit by bit.
        self._offsets: dict[int, int] = {}

    def chunks(self, index: int, output: RequestOutput) -> list[BaseModel]:
        text = self._echoes.pop(index, "") + output.text
        if not (text or output.logprobs or output.finish_reason):
            return []
        logprobs = self._logprobs(index, output.logprobs)
        choice = CompletionChoice(index=index, text=text, logprobs=logprobs, **_end(output))
        return [Completion(**self._chunk_head, choices=[choice])]

    def usage_chunk(self, usage: Usage) -> BaseModel:
        return Completion(**(self._chunk_head | {"usage": usage}), choices=[])

    def whole(self, answers: Answers) -> Completion:
        choices = [
            CompletionChoice(
                index=index,
                text=self._echoes.get(index, "") + answer.text,
                logprobs=self._logprobs(index, answer.logprobs),
                finish_reason=_finish(answer.finish_reason),
                stop_reason=answer.stop_reason,
            )
            for index, answer in enumerate(answers)
        ]
        return Completion(**self._head, choices=choices, usage=answers.usage)

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprobs]) -> CompletionLogprobs | None:
        if not self._has_logprobs:
            return None
        texts, offsets = [], []
        for token in tokens:
            texts.append(self._tokenizer.token_text(token.token_id))
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(texts[-1])
        return CompletionLogprobs(
            tokens=texts,
            token_logprobs=[token.logprob for token in tokens],
            top_logprobs=[self._likeliest(token) for token in tokens],
            text_offset=offsets,
        )

    def _likeliest(self, token: TokenLogprobs) -> dict[str, float]:
        """By text. Tokens may share one (pieces of characters): there the chosen token comes first, then
        the likelier."""
        found: dict[str, float] = {}
        for token_id, logprob in [(token.token_id, token.logprob), *token.top]:
            found.setdefault(self._tokenizer.token_text(token_id), logprob)
        return found


def _end(output: RequestOutput) -> dict[str, Any]:
    """The members that say whether and why a choice ended."""
    if output.finish_reason is None:
        return {"finish_reason": None}
    return {"finish_reason": _finish(output.finish_reason), "stop_reason": output.stop_reason}


def _finish(reason: FinishReason | None) -> Finish:
    return "length" if reason is FinishReason.LENGTH else "stop"
