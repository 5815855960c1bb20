"""Request: one answer in the making, from sampled tokens to text and to its end. Knows no scheduler."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

from penstock.errors import ComputationError, DeadlineExceeded, QueueTimeout, RequestFailed
from penstock.generation.chosen import Chosen
from penstock.generation.sequence import FinishReason, Sequence, TokenLogprobs
from penstock.text.detokenizer import Detokenizer
from penstock.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NO_TEXT = "the tokenizer failed on its token ids; the log says how"


@dataclass(frozen=True)
class RequestOutput:
    """What a request gained in one step."""

    request_id: str
    #: New text, never half a character; may be empty while a character or a possible stop string
    #: is incomplete. All texts of a request concatenate to its answer.
    text: str
    #: Several, where a grammar forces what follows, or where drafts were right.
    token_ids: tuple[int, ...]
    #: One entry per new token, if asked for.
    logprobs: tuple[TokenLogprobs, ...]
    num_prompt_tokens: int
    #: Of the whole answer so far.
    num_output_tokens: int
    finish_reason: FinishReason | None = None
    #: The stop string or stop token that ended it; None for the model's own end token or the length.
    stop_reason: str | int | None = None
    #: The last token is an end or stop token, which ended the answer and is no part of it.
    has_end_token: bool = False
    #: Why it could not be computed; the finish reason is ERROR then.
    error: RequestFailed | None = None
    #: When its first step began, on the monotonic clock.
    started: float | None = None
    #: With the first output, if asked for: one entry per prompt token, the first of them None.
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    #: Of the prompt, tokens whose K and V came from the prefix cache.
    num_cached_tokens: int = 0
    #: How often the sequence had to give way to others so far.
    num_preemptions: int = 0
    #: New tokens that a grammar forced: nobody computed logits for them.
    num_forced_tokens: int = 0


@dataclass(slots=True)
class _Gain:
    """What a step brings: tokens one by one, until one of them ends the answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_forced: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Request:
    """A sequence, and what makes text of its tokens."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        """Raises RequestFailed if the tokenizer can't take the prompt."""
        self.sequence = sequence
        #: When its first step began, on the monotonic clock.
        self._started: float | None = None
        self._eos_token_ids = tokenizer.eos_token_ids
        self._has_told_prompt = False
        params = sequence.params
        try:
            self._detokenizer = Detokenizer(
                tokenizer,
                sequence.token_ids,
                params.stop,
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
            )
            self._gain = self._begin()
        except Exception as error:  # tokenizers are not ours
            raise RequestFailed(NO_TEXT) from error

    @property
    def request_id(self) -> str:
        return self.sequence.request.request_id

    def start(self, now: float) -> None:
        """A step of it begins; `now` is on the monotonic clock."""
        self._started = self._started or now

    def _begin(self) -> _Gain:
        """Text and tokens that the grammar forces before anything is computed: they ride along with the
        prompt. Nothing that might end the answer, as that takes a step to tell of it."""
        sequence, params, gain = self.sequence, self.sequence.params, _Gain()
        while (forced := self._forced()) is not None and sequence.matcher is not None:
            is_last = sequence.num_tokens + 1 >= sequence.max_total_tokens
            if is_last or params.stop or forced in params.stop_token_ids:
                break
            sequence.matcher.advance(forced)
            if sequence.matcher.is_complete:
                sequence.matcher.retreat()
                break
            sequence.append(forced)
            gain.token_ids.append(forced)
            gain.text += self._detokenizer.add(forced)
            gain.num_forced += 1
        return gain

    def advance(self, chosen: Chosen) -> RequestOutput:
        """Append the tokens of a step and those that the grammar forces after them, one by one until the
        answer ends, and say what was gained."""
        if chosen.error is not None:
            return self._failed(chosen.error)
        prompt_logprobs, self._has_told_prompt = self._prompt_logprobs(), True
        if any(math.isnan(each.logprob) for each in prompt_logprobs or () if each):
            return self._failed(ComputationError("the model computed NaN for a token of the prompt"))
        gain, self._gain = self._gain, _Gain()
        if self.sequence.num_tokens >= self.sequence.max_total_tokens:  # no answer was asked for
            gain.finish_reason = FinishReason.LENGTH
            return self._output(gain, prompt_logprobs)
        try:
            self._append_all(chosen, gain)
        except Exception:  # whatever a tokenizer raises must not cost the other requests
            logger.exception("the text of request %s could not be made", self.request_id)
            return self._failed(RequestFailed(NO_TEXT))
        return self._output(gain, prompt_logprobs)

    def _append_all(self, chosen: Chosen, gain: _Gain) -> None:
        for token_id, logprobs in chosen.tokens:
            self._append(token_id, gain)
            if logprobs is not None:
                gain.logprobs.append(logprobs)
            if gain.finish_reason is not None:
                return
        while gain.finish_reason is None and (forced := self._forced()) is not None:
            self._append(forced, gain)
            gain.num_forced += 1

    def _prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """What belongs to the first output, and to no other."""
        if self.sequence.params.prompt_logprobs is None or self._has_told_prompt:
            return None
        return tuple(self.sequence.prompt_logprobs)

    def _output(self, gain: _Gain, prompt_logprobs: tuple[TokenLogprobs | None, ...] | None) -> RequestOutput:
        return RequestOutput(
            self.request_id,
            gain.text,
            tuple(gain.token_ids),
            tuple(gain.logprobs),
            self.sequence.num_prompt_tokens,
            self.sequence.num_output_tokens,
            gain.finish_reason,
            gain.stop_reason,
            gain.finish_reason is FinishReason.STOP and self._was_ended_by_token(gain.stop_reason),
            started=self._started,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.sequence.num_cached_tokens,
            num_preemptions=self.sequence.num_preemptions,
            num_forced_tokens=gain.num_forced,
        )

    def expire(self, now: float) -> RequestOutput | None:
        """What it is told if its time is up."""
        request = self.sequence.request
        if now >= request.finish_by:
            num_output = self.sequence.num_output_tokens
            return self._failed(DeadlineExceeded(f"its time was up after {num_output} tokens of the answer"))
        if now >= request.start_by and not self.sequence.has_started:
            return self._failed(QueueTimeout("it waited for a place in a step until its time was up"))
        return None

    def _was_ended_by_token(self, stop_reason: str | int | None) -> bool:
        """Not by a stop string, nor by its grammar, whose last token is text."""
        matcher = self.sequence.matcher
        return not isinstance(stop_reason, str) and not (matcher is not None and matcher.is_complete)

    def _forced(self) -> int | None:
        """The token that must come next and that the sampler, asked for it, would choose.

        A token's logprobs take logits that nobody computes for a forced one, so where they are asked for all
        tokens are sampled.
        """
        sequence, params = self.sequence, self.sequence.params
        if sequence.matcher is None or params.logprobs is not None:
            return None
        if params.bad_words or params.allowed_token_ids is not None:
            return None
        forced = sequence.matcher.forced
        is_forbidden = sequence.num_output_tokens < params.min_tokens and forced in params.stop_token_ids
        return None if is_forbidden else forced

    def _append(self, token_id: int, gain: _Gain) -> None:
        """With its text, and why and by what the answer ends, if it does."""
        sequence, detokenizer, params = self.sequence, self._detokenizer, self.sequence.params
        sequence.append(token_id)
        gain.token_ids.append(token_id)
        is_eos = token_id in self._eos_token_ids and not params.ignore_eos
        is_stop_token = token_id in params.stop_token_ids
        if is_eos or is_stop_token:
            gain.text += detokenizer.add(token_id) if params.include_stop_str_in_output else ""
            gain.stop_reason = token_id if is_stop_token else None
            return self._finish(FinishReason.STOP, gain)
        gain.text += detokenizer.add(token_id)
        if detokenizer.stopped_by is not None:
            gain.finish_reason, gain.stop_reason = FinishReason.STOP, detokenizer.stopped_by
            return None
        if sequence.matcher is not None:
            sequence.matcher.advance(token_id)
            if sequence.matcher.is_complete:
                self._finish(FinishReason.STOP, gain)
                gain.stop_reason = detokenizer.stopped_by
                return None
        if sequence.num_tokens >= sequence.max_total_tokens:
            self._finish(FinishReason.LENGTH, gain)
        return None

    def _finish(self, reason: FinishReason, gain: _Gain) -> None:
        """Nothing follows, so the text that was held back is part of the answer."""
        gain.text += self._detokenizer.finish()
        gain.finish_reason = reason

    def _failed(self, error: RequestFailed) -> RequestOutput:
        num_prompt, num_output = self.sequence.num_prompt_tokens, self.sequence.num_output_tokens
        reason = FinishReason.ERROR
        return RequestOutput(
            self.request_id, "", (), (), num_prompt, num_output, reason, error=error, started=self._started
        )
