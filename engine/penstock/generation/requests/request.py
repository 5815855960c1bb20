"""Request: one answer in the making, and what its caller is told of it after each step. Knows no
scheduler."""

from __future__ import annotations

import logging
import math
from array import array
from dataclasses import dataclass, field

from penstock.errors import ComputationError, DeadlineExceeded, QueueTimeout, RequestFailed
from penstock.generation.chosen import Chosen
from penstock.generation.logprobs import TokenLogprobs
from penstock.generation.requests.answer import Answer, Gain
from penstock.generation.sequence import FinishReason, Sequence
from penstock.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

PromptLogprobs = tuple[TokenLogprobs | None, ...] | None

NAN_IN_PROMPT = "the model computed NaN for a token of the prompt"
NO_TEXT = "the tokenizer failed on the request's token ids; the log says how"


def too_late(num_tokens: int) -> DeadlineExceeded:
    """What a caller is told whose time is up after so many tokens of the answer."""
    return DeadlineExceeded(f"the request's time was up after {num_tokens} tokens of the answer")


def waited_too_long() -> QueueTimeout:
    """What a caller is told whose request has not begun when it should have."""
    return QueueTimeout("the request waited for a place in a step until its time was up")


@dataclass(frozen=True)
class RequestOutput:
    """What a request gained in one step."""

    request_id: str
    #: New text, never half a character; may be empty while a character or a possible stop string
    #: is incomplete. All texts of a request concatenate to its answer.
    text: str
    #: New tokens: several where a grammar forces what follows, or where drafts were right.
    token_ids: tuple[int, ...]
    #: One entry per new token, if asked for.
    logprobs: tuple[TokenLogprobs, ...]
    num_prompt_tokens: int
    #: Tokens of the whole answer so far.
    num_output_tokens: int
    finish_reason: FinishReason | None = None
    #: The stop string or stop token that ended the answer. None for the model's own end token, and where the
    #: length ended the answer.
    stop_reason: str | int | None = None
    #: The last token is an end or stop token, which ended the answer and is no part of the answer.
    has_end_token: bool = False
    #: Why the request could not be computed; the finish reason is ERROR then.
    error: RequestFailed | None = None
    #: When the request's first step began, on the monotonic clock.
    started: float | None = None
    #: One entry per prompt token, the first of them None. Only in the first output, and only if asked for.
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    #: Tokens of the prompt whose K and V came from the prefix cache.
    num_cached_tokens: int = 0
    #: How often the sequence has been preempted so far.
    num_preemptions: int = 0
    #: New tokens that a grammar forced. Nobody computed logits for them.
    num_forced_tokens: int = 0
    #: Guesses of the answer's tokens so far, and those of them that were right.
    num_drafts: int = 0
    num_right_drafts: int = 0
    #: Of an answer of a beam search: the sum of its tokens' log-probabilities, divided by
    #: length ** length_penalty.
    score: float | None = None
    #: The other answers of a beam search, best first; this one is the best.
    others: tuple[RequestOutput, ...] = ()
    #: Of a request for a vector or a score: see Chosen.
    pooled: array[float] | None = None


class Request:
    """A sequence and its answer."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        """Raises RequestFailed if the tokenizer can't take the prompt."""
        self.sequence = sequence
        #: When the request's first step began, on the monotonic clock.
        self._started: float | None = None
        self._has_told_prompt = False
        self._num_drafts = self._num_right_drafts = 0
        try:
            self._answer = Answer(sequence, tokenizer)
            #: What the first step's output tells beside the step's own tokens.
            self._gain = self._answer.begin()
        except Exception as error:  # tokenizers are not ours
            raise RequestFailed(NO_TEXT) from error

    @property
    def request_id(self) -> str:
        return self.sequence.request.request_id

    def start(self, now: float) -> None:
        """A step of the request begins; `now` is on the monotonic clock."""
        self._started = self._started or now

    def advance(self, sequence: Sequence, chosen: Chosen) -> RequestOutput | None:
        """Append the tokens of a step and those that the grammar forces after them, until the answer ends,
        and say what was gained. None: there is nothing to tell yet. sequence: the one for which the step
        chose."""
        if chosen.error is not None:
            return self._failed(chosen.error)
        prompt_logprobs = self._prompt_logprobs()
        if has_nan(prompt_logprobs):
            return self._failed(ComputationError(NAN_IN_PROMPT))
        gain, self._gain = self._gain, Gain()
        if sequence.num_tokens >= sequence.max_total_tokens:  # no answer was asked for
            gain.finish_reason = FinishReason.LENGTH
            return self._output(sequence, gain, prompt_logprobs)
        try:
            self._answer.extend(chosen.tokens, gain)
        except Exception:  # whatever a tokenizer raises must not cost the other requests
            return self._failed(self._without_text())
        self._num_drafts += chosen.num_drafts
        self._num_right_drafts += min(chosen.num_right, len(gain.token_ids))
        return self._output(sequence, gain, prompt_logprobs)

    def expire(self, now: float) -> RequestOutput | None:
        """What the caller is told if the request's time is up."""
        request = self.sequence.request
        if now >= request.finish_by:
            return self._failed(too_late(self.sequence.num_output_tokens))
        if now >= request.start_by and not self.sequence.has_started:
            return self._failed(waited_too_long())
        return None

    def _prompt_logprobs(self) -> PromptLogprobs:
        """Log-probabilities for the first output. No other output has them."""
        scores = self.sequence.prompt_scores
        if scores is None or self.sequence.params.prompt_logprobs is None or self._has_told_prompt:
            return None
        self._has_told_prompt = True
        return tuple(scores.known)

    def _without_text(self) -> RequestFailed:
        """The error of a request whose tokenizer has just raised something."""
        logger.exception("the text of request %s could not be made", self.request_id)
        return RequestFailed(NO_TEXT)

    def _output(self, sequence: Sequence, gain: Gain, prompt_logprobs: PromptLogprobs) -> RequestOutput:
        return RequestOutput(
            self.request_id,
            gain.text,
            tuple(gain.token_ids),
            tuple(gain.logprobs),
            sequence.num_input_tokens,
            sequence.num_output_tokens,
            gain.finish_reason,
            gain.stop_reason,
            gain.has_end_token,
            started=self._started,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=max(0, sequence.num_cached_tokens - sequence.num_soft_tokens),
            num_preemptions=sequence.num_preemptions,
            num_forced_tokens=gain.num_forced,
            num_drafts=self._num_drafts,
            num_right_drafts=self._num_right_drafts,
        )

    def _failed(self, error: RequestFailed) -> RequestOutput:
        num_prompt, num_output = self.sequence.num_input_tokens, self.sequence.num_output_tokens
        reason = FinishReason.ERROR
        return RequestOutput(
            self.request_id, "", (), (), num_prompt, num_output, reason, error=error, started=self._started
        )


def has_nan(prompt_logprobs: PromptLogprobs) -> bool:
    return any(math.isnan(each.logprob) for each in prompt_logprobs or () if each)


@dataclass
class Completion:
    """A whole answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    #: Of an answer of a beam search: see RequestOutput.
    score: float | None = None
    #: The other answers of a beam search, best first; this one is the best.
    others: list[Completion] = field(default_factory=list)

    @classmethod
    def of(cls, output: RequestOutput) -> Completion:
        """An answer that came in one output."""
        completion = cls()
        completion.extend(output)
        return completion

    def extend(self, output: RequestOutput) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.score, self.others = output.score, [Completion.of(other) for other in output.others]
