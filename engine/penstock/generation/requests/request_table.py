"""RequestTable: the requests that are being computed, by their ids."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Set
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.errors import InvalidParameter
from penstock.generation.chosen import Chosen
from penstock.generation.prompt_frame import PromptFrame
from penstock.generation.requests.generation_request import SamplingParams, ValidRequest
from penstock.generation.requests.request import Request, RequestOutput
from penstock.generation.scheduling.batch import Batch
from penstock.generation.scheduling.scheduler import Scheduler
from penstock.generation.sequence import FinishReason, Sequence
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.generation.grammars.grammar_matcher import GrammarCompiler
    from penstock.generation.grammars.matching import Matching


class RequestTable:
    """Gives each request its sequence in the scheduler, and makes outputs of what the sequences gain."""

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        grammars: GrammarCompiler,
        max_model_len: int,
        frame: PromptFrame,
    ) -> None:
        """max_model_len: tokens of a prompt and its answer together."""
        self._frame = frame
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._max_model_len = max_model_len
        self._requests: dict[str, Request] = {}
        self._num_added = 0

    def add(self, request: ValidRequest) -> None:
        """Queue a request. Raises InvalidParameter if a request with the same id is being computed, and
        RequestFailed if the tokenizer can't take the prompt."""
        if request.request_id in self._requests:
            raise InvalidParameter("request_id", f"request {request.request_id} is being computed already")
        params, limit = request.params, self._max_model_len
        if params.max_tokens is not None:
            limit = request.num_prompt_tokens + params.max_tokens
        start = self._frame.decoder_start + request.answer_start
        if start:  # the prompt is no part of the text that the limit is about
            limit += len(start) - request.num_prompt_tokens
        sequence = Sequence(
            self._num_added,
            request,
            limit + len(self._frame.soft_prompt),
            self._matcher(params),
            frame=replace(self._frame, decoder_start=start),
        )
        self._num_added += 1
        self._requests[request.request_id] = self._request(sequence)
        self._scheduler.add(sequence)

    def _request(self, sequence: Sequence) -> Request:
        if sequence.pooled is not None:
            from penstock.generation.requests.pooled_request import PooledRequest

            return PooledRequest(sequence, self._tokenizer)
        if sequence.params.beams is None:
            return Request(sequence, self._tokenizer)
        from penstock.generation.requests.beam_request import BeamRequest

        return BeamRequest(
            sequence, self._tokenizer, sequence.params.beams, self._scheduler.admission.replace
        )

    def _matcher(self, params: SamplingParams) -> Matching | None:
        if params.blanks is not None:
            from penstock.generation.grammars.blanks import BlankMatcher

            return BlankMatcher(params.blanks, self._tokenizer.eos_token_ids)
        matcher = self._grammars.matcher(params.grammar) if params.grammar else None
        if params.thinking is None:
            return matcher
        from penstock.generation.grammars.thinking import ThinkingMatcher

        return ThinkingMatcher(
            params.thinking, matcher, self._tokenizer.token_bytes, self._tokenizer.eos_token_ids
        )

    def end(self, request_id: str, reason: FinishReason) -> None:
        """Drop a request and free its blocks. An unknown (or finished) id is ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._scheduler.finish(request.sequence, reason)

    def has_started(self, request_id: str) -> bool:
        """Whether a request has had a place in a step. Safe from any thread."""
        request = self._requests.get(request_id)
        return request is not None and request.sequence.has_started

    def expire(self, now: float) -> list[RequestOutput]:
        """End the requests whose time is up. `now` is of the same clock as their start_by and finish_by."""
        outputs = [output for request in self._requests.values() if (output := request.expire(now))]
        for output in outputs:
            self.end(output.request_id, FinishReason.ERROR)
        return outputs

    def start(self, batch: Batch, aborted: Set[str]) -> Callable[[], bool]:
        """Note that a step begins. Returns a function that says whether nobody wants the step any more: all
        its requests are among the `aborted`."""
        now = time.monotonic()
        ids = frozenset([item.sequence.request.request_id for item in batch.scheduled])
        for request_id in ids:
            self._requests[request_id].start(now)
        return lambda: ids <= aborted

    def deliver(self, gained: list[tuple[Sequence, Chosen]]) -> list[RequestOutput]:
        """The outputs of a step. A request whose answer has ended is dropped."""
        outputs = []
        for sequence, chosen in gained:
            request = self._requests.get(sequence.request.request_id)
            # A search that has failed at another of its beams is gone already.
            output = None if request is None else request.advance(sequence, chosen)
            if output is None:
                continue
            outputs.append(output)
            if output.finish_reason is not None:
                self.end(output.request_id, output.finish_reason)
        return outputs

    def fail(self, request_ids: Iterable[str]) -> None:
        """End requests that can't be computed."""
        for request_id in request_ids:
            self.end(request_id, FinishReason.ERROR)
