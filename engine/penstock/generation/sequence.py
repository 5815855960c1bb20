"""Sequence: the tokens of one answer in the making, and how far they are computed. No torch here."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.generation.encoder_input import EncoderInput
from penstock.generation.generation_request import VECTOR, GenerationRequest
from penstock.generation.logprobs import PromptScores

if TYPE_CHECKING:
    from penstock.generation.grammars.matching import Matching
    from penstock.generation.scheduling.sequence_group import SequenceGroup


class FinishReason(enum.Enum):
    """Why a sequence ended. The values are OpenAI's, and vLLM's "abort" and "error"."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context length
    ABORT = "abort"  # the caller left
    ERROR = "error"  # the sequence could not be computed


class Sequence:
    """One request and its answer. Owned by the engine thread; each field says who changes it."""

    def __init__(
        self,
        sequence_id: int,
        request: GenerationRequest,
        max_total_tokens: int,
        matcher: Matching | None = None,
        *,
        first_scored: int | None = None,
        num_computed_tokens: int = 0,
        block_table: Iterable[int] = (),
        rope_length: int = 0,
        decoder_start: tuple[int, ...] = (),
        encoder_blocks: Iterable[int] = (),
        soft_prompt: tuple[int, ...] = (),
        is_prompt_whole: bool = False,
    ) -> None:
        """max_total_tokens: prompt and answer end there at the latest. matcher: of the request's grammar, at
        its beginning. first_scored: the first token of the prompt whose log-probability is wanted; None: 1 if
        the request wants prompt_logprobs, else none. decoder_start: the model
        encodes the prompt, and its text begins with these tokens. num_computed_tokens, rope_length, block
        tables: of a sequence that begins in the middle, as in the warm-up. soft_prompt: rows of the embedding
        in front of the prompt. is_prompt_whole: every token of the prompt sees the whole prompt."""
        # These never change.
        self.sequence_id = sequence_id
        self.request = request
        self.params = request.params
        #: None in models without an encoder.
        vectors = (VECTOR,) * (request.num_prompt_tokens - len(request.prompt_token_ids))
        prompt = (*vectors, *request.prompt_token_ids)
        self.encoder = EncoderInput(prompt, encoder_blocks) if decoder_start else None
        first = decoder_start or (*soft_prompt, *prompt)
        #: The tokens with which the text begins that the model goes on with.
        self.num_prompt_tokens = len(first)
        #: Rows of the embedding in front of the prompt, which the sequence counts as tokens of its prompt.
        self.num_soft_tokens = len(soft_prompt)
        #: Where the prompt's tokens begin that the vocabulary has: behind soft prompt and vectors.
        self.text_start = 0 if decoder_start else len(soft_prompt) + len(vectors)
        #: Every token sees these tokens, also those behind it: the prompt, or none.
        self.prefix_len = len(first) if is_prompt_whole else 0
        self.max_total_tokens = max_total_tokens
        #: The seed of the draws.
        self.seed = self.params.seed if self.params.seed is not None else random.getrandbits(63)

        # The request's text (Answer) changes these: append().
        self.token_ids = list(first)
        #: Knows the tokens of the answer so far; a preemption changes nothing.
        self.matcher = matcher

        # The scheduler changes these.
        #: Tokens whose K and V are in the cache: advance(), skip_to(), restart().
        self.num_computed_tokens = num_computed_tokens
        #: RopeSpec.frequency_length() of its computed tokens and those of the next step: follow_length().
        self.rope_length = rope_length
        #: Tokens of the prompt whose K and V others had computed: skip_to().
        self.num_cached_tokens = 0
        #: None where nobody wants the prompt's log-probabilities.
        self.prompt_scores = self._prompt_scores(first_scored)
        #: The sequence has been in a step, or was about to be.
        self.has_started = False
        self.num_preemptions = 0
        #: What was computed has been dropped at some time: restart().
        self.was_preempted = False
        self.finish_reason: FinishReason | None = None
        #: Sequences that run and wait together with this one; None where it is alone.
        self.group: SequenceGroup | None = None

        # The block manager changes these.
        self.block_table = list(block_table)
        #: Keys of its full blocks.
        self.block_keys: list[bytes] = []

    def _prompt_scores(self, first_scored: int | None) -> PromptScores | None:
        if first_scored is None and self.params.prompt_logprobs is not None:
            first_scored = 1
        return None if first_scored is None else PromptScores(first_scored, self.num_prompt_tokens)

    def append(self, token_id: int) -> None:
        """The answer's next token."""
        self.token_ids.append(token_id)

    def advance(self, num_tokens: int) -> None:
        """So many more tokens were computed."""
        self.num_computed_tokens += num_tokens

    def skip_to(self, num_computed_tokens: int) -> int:
        """So many tokens are in the cache, because others computed them. Returns how many tokens of the
        prompt need not be computed therefore. What a preempted sequence finds again counts as its own."""
        num_saved = 0
        if not self.was_preempted:
            end = min(num_computed_tokens, self.num_prompt_tokens)
            num_saved = max(0, end - self.num_computed_tokens)
        self.num_cached_tokens += num_saved
        self.num_computed_tokens = num_computed_tokens
        return num_saved

    def restart(self) -> None:
        """What was computed is dropped: the sequence was preempted, its step was not computed, or its length
        asks for other frequencies."""
        self.num_computed_tokens = 0
        self.was_preempted = True

    def follow_length(self, rope_length: int) -> None:
        """Other frequencies turn the sequence's K from now on, so other blocks hold its tokens."""
        self.rope_length = rope_length
        self.block_keys.clear()

    @property
    def num_input_tokens(self) -> int:
        """What a user sent: the prompt, encoded or not, and what a decoder begins with. The model's own soft
        prompt does not count."""
        num_tokens = self.num_prompt_tokens - self.num_soft_tokens
        return num_tokens + (self.encoder.num_tokens if self.encoder is not None else 0)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that are not computed yet: a prompt, a resumed sequence's all, or the last one."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_whole_tokens(self) -> int:
        """Pending tokens that one step has to compute together: those of a prompt that is seen both ways; 0
        if the pending tokens can be cut anywhere."""
        return max(0, self.prefix_len - self.num_computed_tokens)

    @property
    def text_ids(self) -> list[int]:
        """Prompt and answer as tokens of the vocabulary."""
        return self.token_ids[self.text_start :] if self.text_start else self.token_ids

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def __repr__(self) -> str:
        return (
            f"Sequence({self.sequence_id}, {self.num_prompt_tokens}+{self.num_output_tokens} tokens, "
            f"{self.num_computed_tokens} computed, {self.finish_reason})"
        )
