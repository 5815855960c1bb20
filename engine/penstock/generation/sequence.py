"""Sequence: the tokens of one answer in the making, and how far they are computed. No torch here."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.generation.generation_request import MAX_LOGPROBS as MAX_LOGPROBS  # is imported from here
from penstock.generation.generation_request import GenerationRequest
from penstock.generation.generation_request import SamplingParams as SamplingParams  # is imported from here

if TYPE_CHECKING:
    from penstock.generation.grammars.grammar_matcher import Matcher


class FinishReason(enum.Enum):
    """Why a sequence ended. The values are OpenAI's, and vLLM's "abort" and "error"."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context length
    ABORT = "abort"  # the caller left
    ERROR = "error"  # it could not be computed


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, natural logarithm."""

    token_id: int
    logprob: float
    #: The likeliest tokens, likeliest first.
    top: tuple[tuple[int, float], ...] = ()
    #: Of the token among all; 1 is the likeliest.
    rank: int = 0


#: A step that scores nothing.
NONE_SCORED = range(0)


class Sequence:
    """One request and its answer. Owned by the engine thread; each field says who changes it."""

    def __init__(
        self,
        sequence_id: int,
        request: GenerationRequest,
        max_total_tokens: int,
        matcher: Matcher | None = None,
        *,
        first_scored: int | None = None,
        num_computed_tokens: int = 0,
        block_table: Iterable[int] = (),
        rope_length: int = 0,
    ) -> None:
        """max_total_tokens: prompt and answer end there at the latest. matcher: of the request's grammar, at
        its beginning. first_scored: the first token of the prompt whose log-probability is wanted; None: 1 if
        the request wants prompt_logprobs, else none. num_computed_tokens, block_table, rope_length: of a
        sequence that begins in the middle, as in the warm-up."""
        # What never changes.
        self.sequence_id = sequence_id
        self.request = request
        self.params = request.params
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_total_tokens = max_total_tokens
        #: Of the draws.
        self.seed = self.params.seed if self.params.seed is not None else random.getrandbits(63)
        if first_scored is None and self.params.prompt_logprobs is not None:
            first_scored = 1
        self.first_scored = first_scored
        #: Not where the logits or the hidden state of each token are wanted: then each is computed.
        self.reads_prefix_cache = first_scored is None

        # The request's text (Request) changes these: append().
        self.token_ids = list(request.prompt_token_ids)
        #: Knows the tokens of the answer so far; a preemption changes nothing.
        self.matcher = matcher

        # The scheduler changes these.
        #: Tokens whose K and V are in the cache: advance(), skip_to(), restart().
        self.num_computed_tokens = num_computed_tokens
        #: RopeSpec.frequency_length() of its computed tokens and those of the next step: follow_length().
        self.rope_length = rope_length
        #: Tokens of the prompt whose K and V others had computed: skip_to().
        self.num_cached_tokens = 0
        #: Of the prompt's tokens as far as they are known, if asked for: add_scores(). Nothing comes before
        #: the first.
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        #: It has been in a step, or was about to be.
        self.has_started = False
        self.num_preemptions = 0
        #: What it had computed was dropped at some time: it was preempted, or its step was not computed, or
        #: it has grown out of the frequencies of its keys: restart().
        self.was_preempted = False
        self.finish_reason: FinishReason | None = None

        # The block manager changes these.
        self.block_table = list(block_table)
        #: Of its full blocks.
        self.block_keys: list[bytes] = []

    def append(self, token_id: int) -> None:
        """The answer's next token."""
        self.token_ids.append(token_id)

    def advance(self, num_tokens: int) -> None:
        """So many more tokens were computed."""
        self.num_computed_tokens += num_tokens

    def skip_to(self, num_computed_tokens: int) -> int:
        """So many tokens are in the cache, though others computed them. Returns how many of the prompt that
        saves. What a sequence finds again that was preempted counts as its own."""
        num_saved = 0
        if not self.was_preempted:
            end = min(num_computed_tokens, self.num_prompt_tokens)
            num_saved = max(0, end - self.num_computed_tokens)
        self.num_cached_tokens += num_saved
        self.num_computed_tokens = num_computed_tokens
        return num_saved

    def restart(self) -> None:
        """What was computed is lost."""
        self.num_computed_tokens = 0
        self.was_preempted = True

    def follow_length(self, rope_length: int) -> None:
        """Other frequencies turn its keys from now on, so other blocks hold its tokens."""
        self.rope_length = rope_length
        self.block_keys.clear()

    def unscored(self, end: int) -> range:
        """The prompt's tokens, by index, whose log-probabilities are wanted and will be known once the tokens
        up to `end` are computed. Those that are known are left out: a preempted sequence computes its prompt
        again."""
        if self.first_scored is None:
            return NONE_SCORED
        first = max(self.first_scored, self.num_computed_tokens + 1, len(self.prompt_logprobs))
        return range(first, min(end + 1, self.num_prompt_tokens))

    def add_scores(self, first: int, scores: Iterable[TokenLogprobs]) -> None:
        """Log-probabilities of the prompt's tokens from the `first` on."""
        # K and V that came from elsewhere would leave a gap.
        assert first == len(self.prompt_logprobs), f"{self} was not swept whole"
        self.prompt_logprobs += scores

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that are not computed yet: a prompt, a resumed sequence's all, or the last one."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def __repr__(self) -> str:
        return (
            f"Sequence({self.sequence_id}, {self.num_prompt_tokens}+{self.num_output_tokens} tokens, "
            f"{self.num_computed_tokens} computed, {self.finish_reason})"
        )
