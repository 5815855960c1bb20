"""From outputs of the engine to OpenAI's objects for chat and completions, whole and in chunks.

A chunk sets exactly the fields that the client gets. A stream has no `usage` unless the client asks for
usage; then `usage` is null in all chunks but the last.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel

from penstock import FinishReason, RequestOutput, Tokenizer, TokenLogprobs
from penstock_server.answers.answers import Answer, Answers
from penstock_server.answers.logprobs import LogprobWriter, answer_offsets, prompt_offsets
from penstock_server.answers.streaming import events
from penstock_server.prompts.inputs import Prompt
from penstock_server.protocol.answer_bodies import (
    FINGERPRINT,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatFinish,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Finish,
    PromptLogprobs,
    Usage,
)
from penstock_server.tools.answering import ToolAnswer
from penstock_server.tools.reasoning import ThinkingCounter
from penstock_server.tools.use import ToolUse

#: The members of a chunk whose choice has not ended.
_GOES_ON: dict[str, Any] = {"finish_reason": None}


class Format(Protocol):
    """The form in which a client gets the answers to one request."""

    def events(self, answers: Answers, idle_s: float | None) -> AsyncGenerator[bytes, None]:
        """The events of a stream, with a keep-alive after each `idle_s` seconds of silence."""
        ...

    def whole(self, answers: Answers) -> BaseModel: ...


class ChunkFormat(Protocol):
    """The methods of a format that stream() calls."""

    def chunks(self, index: int, output: RequestOutput) -> list[BaseModel]: ...

    def usage_chunk(self, usage: Usage) -> BaseModel: ...


async def stream(
    form: ChunkFormat, answers: Answers, with_usage: bool, idle_s: float | None
) -> AsyncGenerator[BaseModel | None, None]:
    """All chunks of a request; None after each `idle_s` seconds of silence."""
    async with aclosing(answers.outputs(idle_s)) as outputs:
        async for item in outputs:
            if item is None:
                yield None
            else:
                chunks = form.chunks(*item)
                for chunk in chunks:
                    yield chunk
                if not chunks and idle_s:
                    yield None  # the format holds the output back, maybe for long
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


@dataclass(frozen=True)
class Extras:
    """What a client wants to get beside texts."""

    usage: bool = False
    continuous_usage: bool = False
    #: The number of likeliest tokens at each position of the answer, and of the prompt. None: no
    #: log-probabilities at all.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    tokens_as_ids: bool = False
    token_ids: bool = False
    #: Each text begins with its prompt.
    echo: bool = False


class ChatFormat:
    """/v1/chat/completions. Each choice begins with a chunk that names the role."""

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: Tokenizer,
        extras: Extras,
        prompt: Prompt,
        tools: ToolUse | None = None,
    ) -> None:
        """tools: how to read answers that may hold reasoning or calls; None: answers are text alone."""
        self._whole_head = _head("chat.completion", "chatcmpl", request_id, model)
        self._chunk_head = self._whole_head | {"object": "chat.completion.chunk"}
        if extras.usage:
            self._chunk_head["usage"] = None
        self._extras = extras
        self._prompt = prompt
        self._writer = LogprobWriter(tokenizer, extras.tokens_as_ids)
        self._tools = tools
        self._tool_answers: dict[int, ToolAnswer] = {}
        self._begun: set[int] = set()
        self._thinking: dict[int, ThinkingCounter] = {}

    def events(self, answers: Answers, idle_s: float | None) -> AsyncGenerator[bytes, None]:
        return events(stream(self, answers, self._extras.usage, idle_s))

    def chunks(self, index: int, output: RequestOutput) -> list[BaseModel]:
        chunks = []
        self._count_thinking(index, output)
        if index not in self._begun:
            self._begun.add(index)
            # Content is null, as at OpenAI, until the first text comes: the answer may be calls alone.
            delta = ChatDelta(role="assistant", content=None if self._tools else "")
            first = self._chunk(index, delta, None, _GOES_ON, output)
            if first.usage:
                first.usage = Usage.of(output.num_prompt_tokens, 0, output.num_cached_tokens, 0, 0)
            if self._extras.token_ids:
                first.prompt_token_ids = self._prompt.token_ids
            chunks.append(first)
        if self._tools:
            return list[BaseModel](chunks + self._tool_chunks(index, output, self._tools))
        if output.text or output.logprobs or output.finish_reason or self._has_ids(output):
            delta = ChatDelta(content=output.text) if output.text else ChatDelta()
            end = _end(output)
            if self._extras.token_ids:
                end["token_ids"] = list(output.token_ids)
            chunks.append(self._chunk(index, delta, self._logprobs(output.logprobs), end, output))
        return list[BaseModel](chunks)

    def _count_thinking(self, index: int, output: RequestOutput) -> None:
        """Counts the reasoning so far, for the usage in each chunk."""
        if self._extras.continuous_usage and self._tools and (reasoning := self._tools.reasoning):
            self._thinking.setdefault(index, reasoning.counter()).add(output.token_ids)

    def _has_ids(self, output: RequestOutput) -> bool:
        return self._extras.token_ids and bool(output.token_ids)

    def _tool_chunks(self, index: int, output: RequestOutput, tools: ToolUse) -> list[ChatCompletionChunk]:
        """The chunks of an output that may hold calls. The finish reason has a chunk of its own, the last."""
        answer = self._tool_answers.setdefault(index, ToolAnswer(tools))
        deltas = answer.deltas(output.text, output.finish_reason is not None)
        logprobs = self._logprobs(output.logprobs)
        if not deltas and (output.logprobs or self._has_ids(output)):
            deltas = [ChatDelta()]
        fields = _GOES_ON | ({"token_ids": list(output.token_ids)} if self._extras.token_ids else {})
        chunks = []
        for delta in deltas:
            chunks.append(self._chunk(index, delta, logprobs, fields, output))
            logprobs, fields = None, _GOES_ON
        if output.finish_reason is not None:
            end = _end(output) | {"finish_reason": answer.finish(output.finish_reason)}
            chunks.append(self._chunk(index, ChatDelta(), None, end, output))
        return chunks

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        logprobs: ChatLogprobs | None,
        end: dict[str, Any],
        output: RequestOutput,
    ) -> ChatCompletionChunk:
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, **end)
        thinking = self._thinking.get(index)
        usage = _usage_so_far(self._extras, output, thinking.num_tokens if thinking else 0)
        return ChatCompletionChunk(**self._chunk_head | usage, choices=[choice])

    def usage_chunk(self, usage: Usage) -> BaseModel:
        return ChatCompletionChunk(**(self._chunk_head | {"usage": usage}), choices=[])

    def whole(self, answers: Answers) -> ChatCompletion:
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return ChatCompletion(
            **self._whole_head,
            choices=choices,
            usage=answers.usage,
            prompt_logprobs=_prompt_logprobs(self._writer, self._extras, answers[0]),
            prompt_token_ids=self._prompt.token_ids if self._extras.token_ids else None,
        )

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
            token_ids=answer.token_ids if self._extras.token_ids else None,
        )

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        return None if self._extras.logprobs is None else ChatLogprobs(content=self._writer.chat(tokens))


class CompletionFormat:
    """/v1/completions. `prompts` has one element for each choice."""

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: Tokenizer,
        extras: Extras,
        prompts: Sequence[Prompt],
    ) -> None:
        self._head = _head("text_completion", "cmpl", request_id, model)
        self._chunk_head = self._head | ({"usage": None} if extras.usage else {})
        self._tokenizer = tokenizer
        self._extras = extras
        self._prompts = prompts
        self._writer = LogprobWriter(tokenizer, extras.tokens_as_ids)
        #: For each choice that has begun, the offset of its next token: a stream tells offsets bit by bit.
        self._offsets: dict[int, int] = {}

    def events(self, answers: Answers, idle_s: float | None) -> AsyncGenerator[bytes, None]:
        return events(stream(self, answers, self._extras.usage, idle_s))

    def chunks(self, index: int, output: RequestOutput) -> list[BaseModel]:
        is_first = index not in self._offsets
        text = (self._echo(index) if is_first else "") + output.text
        logprobs = self._logprobs(index, output.logprobs, output.prompt_logprobs)
        fields = _end(output)
        if self._extras.token_ids:
            fields["token_ids"] = list(output.token_ids)
            if is_first:
                fields["prompt_token_ids"] = self._prompts[index].token_ids
        if not (text or output.logprobs or output.finish_reason or fields.get("token_ids")):
            return []
        choice = CompletionChoice(index=index, text=text, logprobs=logprobs, **fields)
        return [Completion(**self._chunk_head | _usage_so_far(self._extras, output), choices=[choice])]

    def usage_chunk(self, usage: Usage) -> BaseModel:
        return Completion(**(self._chunk_head | {"usage": usage}), choices=[])

    def whole(self, answers: Answers) -> Completion:
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return Completion(**self._head, choices=choices, usage=answers.usage)

    def _choice(self, index: int, answer: Answer) -> CompletionChoice:
        has_ids = self._extras.token_ids
        return CompletionChoice(
            index=index,
            text=self._echo(index) + answer.text,
            logprobs=self._logprobs(index, answer.logprobs, answer.prompt_logprobs),
            finish_reason=_finish(answer.finish_reason),
            stop_reason=answer.stop_reason,
            prompt_logprobs=_prompt_logprobs(self._writer, self._extras, answer),
            prompt_token_ids=self._prompts[index].token_ids if has_ids else None,
            token_ids=answer.token_ids if has_ids else None,
        )

    def _echo(self, index: int) -> str:
        return self._prompts[index].text if self._extras.echo else ""

    def _logprobs(
        self,
        index: int,
        tokens: Sequence[TokenLogprobs],
        prompt_tokens: Sequence[TokenLogprobs | None] | None,
    ) -> CompletionLogprobs | None:
        """Log-probabilities of the new tokens of a choice. The choice's first call also gives those of an
        echoed prompt."""
        is_first = index not in self._offsets
        start = self._offsets.setdefault(index, len(self._echo(index)))
        num_top = self._extras.logprobs
        if num_top is None:
            return None
        token_ids = [token.token_id for token in tokens]
        *offsets, self._offsets[index] = answer_offsets(self._tokenizer, token_ids, start)
        scores: list[TokenLogprobs | None] = list(tokens)
        if is_first and self._extras.echo and prompt_tokens is not None:
            prompt = self._prompts[index]
            offsets = prompt_offsets(self._tokenizer, prompt.token_ids, prompt.text) + offsets
            token_ids, scores = prompt.token_ids + token_ids, [*prompt_tokens, *scores]
        return self._writer.completion(token_ids, scores, offsets, num_top)


def _prompt_logprobs(writer: LogprobWriter, extras: Extras, answer: Answer) -> PromptLogprobs | None:
    if extras.prompt_logprobs is None or answer.prompt_logprobs is None:
        return None
    return writer.prompt(answer.prompt_logprobs, extras.prompt_logprobs)


def _usage_so_far(extras: Extras, output: RequestOutput, num_reasoning: int = 0) -> dict[str, Any]:
    """The member `usage` of a chunk, if the client wants usage in every chunk."""
    if not extras.continuous_usage:
        return {}
    usage = Usage.of(
        output.num_prompt_tokens,
        output.num_output_tokens,
        output.num_cached_tokens,
        output.num_drafts,
        output.num_right_drafts,
        num_reasoning,
    )
    return {"usage": usage}


def _end(output: RequestOutput) -> dict[str, Any]:
    """The members of a choice that say whether and why the choice ended."""
    if output.finish_reason is None:
        return {"finish_reason": None}
    return {"finish_reason": _finish(output.finish_reason), "stop_reason": output.stop_reason}


def _finish(reason: FinishReason | None) -> Finish:
    return "length" if reason is FinishReason.LENGTH else "stop"
