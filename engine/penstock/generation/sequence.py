"""Sequence: the tokens of one answer in the making, and how far they are computed. No torch here."""

from __future__ import annotations

import enum
import random
from typing import TYPE_CHECKING

from penstock.generation.logprobs import PromptScores
from penstock.generation.prompt_frame import PromptFrame
from penstock.generation.requests.generation_request import GenerationRequest

if TYPE_CHECKING:
    from penstock.generation.grammars.matching import Matching
    from penstock.generation.scheduling.sequence_group import SequenceGroup


_NO_FRAME = PromptFrame()


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
        frame: PromptFrame = _NO_FRAME,
        first_scored: int | None = None,
    ) -> None:
        """max_total_tokens: prompt and answer end there at the latest. matcher: of the request's grammar, at
        its beginning. first_scored: the first token of the prompt whose log-probability is wanted; None: 1 if
        the request wants prompt_logprobs, else none."""
        # These never change.
        self.sequence_id = sequence_id
        self.request = request
        self.params = request.params
        prompt = frame.placed(request)
        #: None in models without an encoder.
        self.encoder: EncoderInput | None = None
        if frame.decoder_start:
            from penstock.generation.encoder_input import EncoderInput

            self.encoder = EncoderInput(prompt)
        first = frame.first_tokens(prompt)
        #: The tokens with which the text begins that the model goes on with.
        self.num_prompt_tokens = len(first)
        #: Rows of the embedding in front of the prompt, which the sequence counts as tokens of its prompt.
        self.num_soft_tokens = len(frame.soft_prompt)
        self._has_vectors = request.prompt_embeds is not None and self.encoder is None
        #: Every token sees these tokens, also those after it: the prompt, or none.
        self.prefix_len = len(first) if frame.is_whole else 0
        #: Its tokens whose hidden states are pooled. None: the sequence is there for text.
        self.pooled = frame.pooling.rows(len(first)) if frame.pooling is not None else None
        self.max_total_tokens = max_total_tokens
        #: The seed of the draws.
        self.seed = self.params.seed if self.params.seed is not None else random.getrandbits(63)

        # The request's text (Answer) changes these: append().
        self.token_ids = list(first)
        #: Knows the tokens of the answer so far; a preemption changes nothing.
        self.matcher = matcher

        #: None where nobody wants the prompt's log-probabilities.
        if first_scored is None and self.params.prompt_logprobs is not None:
            first_scored = 1
        self.prompt_scores = PromptScores.of(first_scored, self.num_prompt_tokens)
        self._begin_waiting()
        self._begin_without_blocks()

    def _begin_waiting(self) -> None:
        """The scheduler changes these."""
        #: Tokens whose K and V are in the cache: advance(), skip_to(), restart().
        self.num_computed_tokens = 0
        #: RopeSpec.frequency_length() of its computed tokens and those of the next step: follow_length().
        self.rope_length = 0
        #: Tokens of the prompt whose K and V others had computed: skip_to(), skip_encoder().
        self.num_cached_tokens = 0
        #: A step computes its tokens just now, so that its next step has to wait for this one.
        self.is_in_step = False
        #: The sequence has been in a step, or was about to be.
        self.has_started = False
        self.num_preemptions = 0
        #: What was computed has been dropped at some time: restart().
        self.was_preempted = False
        self.finish_reason: FinishReason | None = None
        #: Sequences that run and wait together with this one; None where it is alone.
        self.group: SequenceGroup | None = None

    def _begin_without_blocks(self) -> None:
        """The block manager changes these."""
        self.block_table: list[int] = []
        #: Tokens that were computed when others got its blocks, last time (PrefixCache.keep_tail()).
        self.num_left_tokens = 0
        #: Where its recurrent state lies, while the sequence runs and the model has such states.
        self.state_slot: int | None = None
        #: Rows of right guesses that its state does not have yet (GuessRows).
        self.guess_rows: tuple[int, ...] = ()
        #: Its first so many tokens were found in others' blocks (StateSaves).
        self.num_shared_tokens = 0
        #: The copy of its state that its next copy takes the place of.
        self.moving_state_key: bytes | None = None
        #: Keys of its full blocks.
        self.block_keys: list[bytes] = []

    def append(self, token_id: int) -> None:
        """The answer's next token."""
        self.token_ids.append(token_id)

    def advance(self, num_tokens: int) -> None:
        """So many more tokens were computed."""
        self.num_computed_tokens += num_tokens

    def skip_to(self, num_computed_tokens: int) -> int:
        """So many tokens are in the cache, because others computed them. Returns how many tokens of the
        prompt need not be computed therefore. What a preempted sequence finds again counts as its own. A
        decoder's first tokens, after an encoder, are no prompt."""
        num_saved = 0
        if not self.was_preempted and self.encoder is None:
            end = min(num_computed_tokens, self.num_prompt_tokens)
            num_saved = max(0, end - self.num_computed_tokens)
        self.num_cached_tokens += num_saved
        self.num_computed_tokens = num_computed_tokens
        return num_saved

    def skip_encoder(self) -> int:
        """Others have encoded its input, if it has one. Returns how many tokens need not be encoded
        therefore."""
        num_saved = 0 if self.was_preempted else self.num_encoder_tokens
        self.num_cached_tokens += num_saved
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
    def block_tables(self) -> tuple[list[int], ...]:
        """The blocks of its tokens, and those of its encoded input if there is one."""
        return (self.block_table,) if self.encoder is None else (self.block_table, self.encoder.block_table)

    @property
    def num_input_tokens(self) -> int:
        """What a user sent: the prompt, encoded or not, and what a decoder begins with. The model's own soft
        prompt does not count."""
        return self.num_encoder_tokens + self.num_prompt_tokens - self.num_soft_tokens

    @property
    def num_encoder_tokens(self) -> int:
        """Of the input of an encoder; 0 in models without one."""
        return self.encoder.num_tokens if self.encoder is not None else 0

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
        token_ids = self.token_ids[self.num_soft_tokens :] if self.num_soft_tokens else self.token_ids
        return [token_id for token_id in token_ids if token_id >= 0] if self._has_vectors else token_ids

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens
