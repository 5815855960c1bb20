"""Responder: the HTTP answer, whole or streamed, to a question that a route has read. All routes share it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

from fastapi import Request
from starlette.responses import Response

from penstock import SamplingParams
from penstock_server.answers.answers import Answers
from penstock_server.answers.formats import Format
from penstock_server.answers.streaming import EventStream, unless_disconnected
from penstock_server.models.pooled_model import ModelInUse
from penstock_server.prompts.pooled_texts import PooledText
from penstock_server.prompts.questions import Question
from penstock_server.protocol.errors import ApiError
from penstock_server.protocol.fill_bodies import FillRequest
from penstock_server.protocol.generation_fields import GenerationFields
from penstock_server.protocol.responses_request import ResponsesRequest
from penstock_server.settings.settings import Settings
from penstock_server.telemetry.metrics import RequestMetrics

#: The most answers that one request may ask for, over all its prompts.
MAX_ANSWERS = 1024

#: Texts of one request whose vectors or scores are computed at a time.
MAX_POOLED = 256

#: The most prompt tokens that one request may have scored. A scored token with 20 likeliest tokens takes 3
#: kB.
MAX_SCORED_TOKENS = 1 << 17


class Responder:
    def __init__(self, settings: Settings, metrics: RequestMetrics) -> None:
        self._settings = settings
        self._metrics = metrics

    def check_num_answers(self, used: ModelInUse, num_answers: int) -> None:
        """Raises 400 for more answers than the server could ever take."""
        limit = min(MAX_ANSWERS, used.engine.loaded.max_requests)
        if num_answers > limit:
            message = (
                f"The request asks for {num_answers} answers (prompts times n); one request may ask for "
                f"{limit}. Send fewer prompts at a time, or a smaller n."
            )
            raise ApiError(400, message, code="invalid_value", param="n")

    async def respond(
        self,
        used: ModelInUse,
        request: Request,
        body: GenerationFields | ResponsesRequest | FillRequest,
        form: Format,
        question: Question,
        tells_end_token: bool = False,
        media_type: str = EventStream.media_type,
    ) -> Response:
        """The HTTP answer with all answers, whole or streamed. tells_end_token: see Answers. media_type: of a
        stream."""
        token_ids = [prompt.token_ids for prompt in question.prompts]
        _check_scored(sum(map(len, token_ids)) * len(question.params), question.params[0])
        answers = Answers(
            used.engine,
            self._metrics.of(used.pooled.name),
            token_ids,
            question.params,
            checked_priority(body.priority, self._settings),
            body.cache_salt or "",
            embeds=[prompt.embeds for prompt in question.prompts],
            answer_start=question.answer_start,
            tells_end_token=tells_end_token,
            use=question.use,
            adapter=question.adapter,
            arrival=used.asked_at,
        )
        if body.stream:
            idle_s = self._settings.sse_keep_alive or None
            return EventStream(form.events(answers, idle_s), answers.close, media_type)
        try:
            await unless_disconnected(request.receive, answers.finish())
        finally:
            answers.close()
        # Another thread writes the JSON: logprobs of a long prompt are megabytes, which would hold up the
        # event loop.
        content = await asyncio.to_thread(lambda: form.whole(answers).model_dump_json())
        return Response(content, media_type="application/json")

    async def pool(
        self,
        used: ModelInUse,
        request: Request,
        texts: Sequence[PooledText],
        priority: int | None = None,
        cache_salt: str = "",
    ) -> list[array[float]]:
        """The vector or score of each text. A client's many texts are computed some at a time."""
        found = []
        priority = checked_priority(priority, self._settings)
        size = max(1, min(MAX_POOLED, used.engine.loaded.max_requests))
        for first in range(0, len(texts), size):
            part = texts[first : first + size]
            answers = Answers(
                used.engine,
                self._metrics.of(used.pooled.name),
                [text.token_ids for text in part],
                [SamplingParams(max_tokens=0)],
                priority,
                cache_salt,
                pooling=[text.params for text in part],
                adapter=used.model.adapter,
                arrival=used.asked_at,
            )
            try:
                await unless_disconnected(request.receive, answers.finish())
            finally:
                answers.close()
            found += [answer.pooled or array("f") for answer in answers]
        return found


def _check_scored(num_positions: int, params: SamplingParams) -> None:
    """Raises 400 if log-probabilities of prompts would fill the memory. Each choice repeats them."""
    if params.prompt_logprobs is not None and num_positions > MAX_SCORED_TOKENS:
        message = (
            f"The request asks for log-probabilities of {num_positions} prompt tokens (prompts times "
            f"choices); one request may ask for {MAX_SCORED_TOKENS}. Send fewer prompts at a time, or a "
            "smaller n."
        )
        raise ApiError(400, message, code="invalid_value", param="prompt")


def checked_priority(priority: int | None, settings: Settings) -> int:
    """The priority of a request. Raises 400 for a priority where --scheduling-policy does not allow any: a
    client could otherwise go before all others."""
    if priority and settings.scheduling_policy != "priority":
        message = "priority has no effect here; leave it out, or start with --scheduling-policy priority."
        raise ApiError(400, message, code="unsupported_parameter", param="priority")
    return priority or 0
