"""The answers to one request while they are generated: all choices of all prompts at once."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from penstock import (
    Adapter,
    FinishReason,
    GenerationRequest,
    PoolingParams,
    PromptEmbeds,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
    ValidRequest,
)
from penstock.errors import EngineDead, EngineStopped, PenstockError, QueueFull
from penstock_server.answers.ranked_stream import OutputStream, RankedStream, Search
from penstock_server.facade.engine import ServedEngine
from penstock_server.facade.loaded_engine import LoadedEngine
from penstock_server.protocol.answer_bodies import Usage
from penstock_server.telemetry.metrics import AnswerTimer, ModelMetrics
from penstock_server.telemetry.request_info import current_request
from penstock_server.tools.reasoning import ThinkingCounter
from penstock_server.tools.use import ToolUse


class Answer:
    """One choice: everything that the engine has generated of it so far."""

    def __init__(
        self,
        stream: OutputStream,
        timer: AnswerTimer,
        tells_end_token: bool,
        scorer: Answer | None = None,
        is_over: Callable[[str], bool] | None = None,
        thinking: ThinkingCounter | None = None,
    ) -> None:
        """tells_end_token: the client gets log-probabilities also of the token that ends the answer. scorer:
        another answer to the same prompt, whose scores of the prompt hold for this answer too. is_over: gets
        each new piece of text, and says whether the answer ends with this piece. thinking: counts the
        answer's reasoning, if it may have any."""
        self.stream = stream
        self.timer = timer
        self._tells_end_token = tells_end_token
        self.scorer = scorer
        self._is_over = is_over
        self.thinking = thinking
        self.has_begun = asyncio.Event()
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self.num_cached_tokens = 0
        self.num_drafts = self.num_right_drafts = 0
        self.num_output_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        #: The vector or score that was asked for in place of an answer.
        self.pooled: array[float] | None = None

    async def next(self) -> RequestOutput:
        """The next output. Raises EngineDead (also its subclass EngineStopped), StepFailed, RequestFailed."""
        if self.scorer is not None:
            await self.scorer.has_begun.wait()
        try:
            output = await anext(self.stream)
        except StopAsyncIteration:
            raise EngineDead("the engine ended an answer without a reason") from None
        except PenstockError as error:
            self.timer.fail(error)
            raise
        if output.finish_reason is FinishReason.ABORT:
            raise EngineStopped("the engine ended an answer")
        if self._is_over is not None and self._is_over(output.text) and output.finish_reason is None:
            output = replace(output, finish_reason=FinishReason.STOP)
            self.stream.abort()
        self.timer.record(output)
        if not self._tells_end_token:
            output = _without_end_token(output)
        if self.scorer is not None and not self.has_begun.is_set():
            output = replace(output, prompt_logprobs=self.scorer.prompt_logprobs)
        self.has_begun.set()
        self.text += output.text
        self.token_ids += output.token_ids
        if self.thinking is not None:
            self.thinking.add(output.token_ids)
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        self.num_cached_tokens = output.num_cached_tokens
        self.num_drafts, self.num_right_drafts = output.num_drafts, output.num_right_drafts
        self.logprobs.extend(output.logprobs)
        self.num_output_tokens = output.num_output_tokens
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        self.pooled = output.pooled
        return output


def _without_end_token(output: RequestOutput) -> RequestOutput:
    """`output` without the log-probabilities of the token that ended the answer: the text lacks that
    token."""
    return replace(output, logprobs=output.logprobs[:-1]) if output.has_end_token else output


def _engine_options(num_prompt_tokens: int) -> dict[str, Any]:
    """What the HTTP request in work, if there is one, says of its engine requests; it counts its prompts'
    tokens."""
    if (request := current_request.get()) is None:
        return {}
    request.num_prompt_tokens += num_prompt_tokens
    return request.engine_options()


class Answers:
    """The answers to one request. Choice j of prompt i is number i * (choices per prompt) + j.

    Call close() when the client is served or gone: close() frees the sequences that still run.
    """

    def __init__(
        self,
        engine: ServedEngine,
        metrics: ModelMetrics,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        priority: int = 0,
        cache_salt: str = "",
        *,
        embeds: Sequence[PromptEmbeds | None] = (),
        pooling: Sequence[PoolingParams] = (),
        answer_start: tuple[int, ...] = (),
        tells_end_token: bool = False,
        use: ToolUse | None = None,
        arrival: float | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        """Starts one sequence for each prompt and each element of `params`, or one beam search for each
        prompt. If one cannot start, none does.

        params: as choices() makes them. They differ in the seed, and only the first has prompt_logprobs;
            those of a beam search are equal.
        priority, cache_salt, answer_start, adapter: see GenerationRequest.
        embeds: the vectors of each prompt (see GenerationRequest); empty if no prompt has any.
        pooling: what vector or score is wanted of each prompt; empty if answers are wanted.
        tells_end_token: the client gets log-probabilities also of the token that ends an answer. A client
            that gets token ids needs them: each token id has log-probabilities then.
        use: how answers are read that may hold reasoning or calls.
        arrival: when the model was asked for, by the monotonic clock; None: now.

        Raises what ServedEngine.loaded and LoadedEngine's validate and submit raise.
        """
        vectors = embeds or [None] * len(prompts)
        pooled: Sequence[PoolingParams | None] = pooling or [None] * len(prompts)
        self._answers: list[Answer] = []
        self._num_choices = len(params)
        self._num_prompt_tokens = sum(
            len(prompt) + (each.num_in_front(prompt) if each else 0)
            for prompt, each in zip(prompts, vectors, strict=True)
        )
        self._metrics = metrics
        self._is_closed = False
        self._arrival = time.monotonic() if arrival is None else arrival
        metrics.observe_params(params)
        options = _engine_options(self._num_prompt_tokens)
        options |= {"priority": priority, "cache_salt": cache_salt, "answer_start": answer_start}
        options["adapter"] = adapter
        try:
            loaded = engine.loaded
            for prompt, each, wanted in zip(prompts, vectors, pooled, strict=True):
                asked = GenerationRequest(prompt, params[0], prompt_embeds=each, pooling=wanted, **options)
                self._start(loaded, loaded.validate(asked), params, tells_end_token, use)
        except BaseException as error:
            if isinstance(error, QueueFull):
                metrics.count_rejected("overloaded")
            self.close()
            raise

    def _start(
        self,
        loaded: LoadedEngine,
        request: ValidRequest,
        params: Sequence[SamplingParams],
        tells_end_token: bool,
        use: ToolUse | None,
    ) -> None:
        """Starts the choices of one prompt."""
        scorer: Answer | None = None
        for each, stream in zip(params, _streams(loaded, request, params), strict=True):
            tells_end = tells_end_token or each.include_stop_str_in_output
            is_over = use.ending() if use else None
            thinking = use.reasoning.counter() if use and use.reasoning else None
            timer = AnswerTimer(self._metrics, self._arrival)
            answer = Answer(stream, timer, tells_end, scorer, is_over, thinking)
            if each.prompt_logprobs is not None:
                scorer = answer
            self._answers.append(answer)

    def __len__(self) -> int:
        return len(self._answers)

    def __getitem__(self, index: int) -> Answer:
        return self._answers[index]

    def __iter__(self) -> Iterator[Answer]:
        return iter(self._answers)

    @property
    def usage(self) -> Usage:
        """The tokens of all answers. A prompt counts once, however many choices it has."""
        completion_tokens = sum(answer.num_output_tokens for answer in self._answers)
        firsts = self._answers[:: self._num_choices]
        cached_tokens = sum(answer.num_cached_tokens for answer in firsts)
        num_drafts = sum(answer.num_drafts for answer in self._answers)
        num_right = sum(answer.num_right_drafts for answer in self._answers)
        num_reasoning = sum(each.thinking.num_tokens for each in self._answers if each.thinking)
        return Usage.of(
            self._num_prompt_tokens, completion_tokens, cached_tokens, num_drafts, num_right, num_reasoning
        )

    async def outputs(
        self, idle_s: float | None = None
    ) -> AsyncGenerator[tuple[int, RequestOutput] | None, None]:
        """(number of the answer, its output) as outputs come; None after each `idle_s` seconds of silence."""
        pending = {self._next(index): index for index in range(len(self))}
        try:
            while pending:
                done, _ = await asyncio.wait(pending, timeout=idle_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    yield None
                for task in sorted(done, key=pending.__getitem__):
                    output, index = task.result(), pending.pop(task)
                    if output.finish_reason is None:
                        pending[self._next(index)] = index
                    yield index, output
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    def _next(self, index: int) -> asyncio.Task[RequestOutput]:
        return asyncio.create_task(self._answers[index].next())

    async def finish(self) -> None:
        """Waits until all answers have ended."""
        async for _ in self.outputs():
            pass

    def close(self) -> None:
        """Aborts the sequences that still run. Idempotent; never blocks."""
        if not self._is_closed and self._answers:
            longest = max(answer.num_output_tokens for answer in self._answers)
            self._metrics.max_generation_tokens.observe(longest)
        self._is_closed = True
        for answer in self._answers:
            answer.stream.abort()
            answer.timer.close("abort")


def _streams(
    loaded: LoadedEngine, first: ValidRequest, params: Sequence[SamplingParams]
) -> Iterator[OutputStream]:
    """A stream for each answer to a prompt. Each request begins when its stream is asked for."""
    is_search = first.params.beams is not None
    for number, each in enumerate(params[:1] if is_search else params):
        stream = loaded.submit(first.choice(each) if number else first)
        if is_search:
            search = Search(stream)
            yield from (RankedStream(search, rank) for rank in range(len(params)))
        else:
            yield stream
