"""Batch: a step, decided: which tokens of which sequences are computed, and whose logits are wanted. Numbers
only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from penstock.generation.drafting.draft_tree import NO_GUESSES, Branch, DraftTree
from penstock.generation.logprobs import NONE_SCORED
from penstock.generation.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """A sequence's part in a step: its next `num_new_tokens` pending tokens, and guesses of the tokens after
    them. The class is a tuple, since each step makes one for each sequence."""

    sequence: Sequence
    num_new_tokens: int
    #: The new tokens are all that were pending, so the logits of the last one are wanted, and those of each
    #: draft.
    is_sampled: bool
    #: Tokens of the prompt, by index, whose log-probabilities are wanted. The logits of the token before each
    #: give them.
    scored: range = NONE_SCORED
    #: What may follow the pending tokens, in runs (DraftTree.in_runs). Empty unless is_sampled.
    drafts: DraftTree = NO_GUESSES
    #: The runs of `drafts` after the first one.
    branches: tuple[Branch, ...] = ()
    #: Copies of the recurrent state that are kept: (number of the sequence's tokens that the state stands
    #: for, slot of the copy), in the order of tokens.
    saves: tuple[tuple[int, int], ...] = ()
    #: Of a model with recurrent states: the rows that keep what each draft brings to the states, and those of
    #: right drafts of steps before, by which the states are behind the tokens that are computed (GuessRows).
    guess_rows: tuple[int, ...] = ()
    replayed: tuple[int, ...] = ()
    #: Tokens, by index, whose hidden states are pooled. Where a sequence is there to be pooled, no other rows
    #: are wanted.
    pooled: range | None = None

    @classmethod
    def of(cls, sequence: Sequence, num_new_tokens: int) -> ScheduledSequence:
        is_sampled = num_new_tokens == sequence.num_pending_tokens
        if sequence.pooled is not None:
            start, wanted = sequence.num_computed_tokens, sequence.pooled
            pooled = range(max(start, wanted.start), min(start + num_new_tokens, wanted.stop))
            return cls(sequence, num_new_tokens, is_sampled, pooled=pooled)
        if sequence.prompt_scores is None:
            return cls(sequence, num_new_tokens, is_sampled)
        num_computed = sequence.num_computed_tokens
        scored = sequence.prompt_scores.missing(num_computed, num_computed + num_new_tokens)
        return cls(sequence, num_new_tokens, is_sampled, scored)

    @property
    def num_rows(self) -> int:
        """Rows of logits that are wanted: those of `scored` in order, then of the last token and the
        drafts; or those of `pooled`."""
        if self.pooled is not None:
            return len(self.pooled)
        return len(self.scored) + self.is_sampled + self.drafts.num_nodes


@dataclass(frozen=True)
class Batch:
    """All sequences' parts in a step."""

    scheduled: tuple[ScheduledSequence, ...]
    #: Blocks (source, destination) of K and V to be copied in this order before anything is written.
    block_copies: tuple[tuple[int, int], ...] = ()
    #: Sequences of the batch whose inputs are encoded before their tokens are computed.
    encoded: tuple[Sequence, ...] = ()
    #: Slots (source, destination) of recurrent states to be copied in this order before anything is written.
    state_copies: tuple[tuple[int, int], ...] = ()
    #: How many of the likeliest tokens of each sampled row are wanted (Chosen.followers).
    num_followers: int = 0

    @property
    def num_encoded(self) -> int:
        """Tokens of the inputs that are encoded."""
        inputs = (sequence.encoder for sequence in self.encoded)
        return sum(each.num_tokens for each in inputs if each is not None)

    @property
    def request_ids(self) -> list[str]:
        """Of the sequences, each once."""
        return list(dict.fromkeys(item.sequence.request.request_id for item in self.scheduled))

    @property
    def num_tokens(self) -> int:
        return sum(item.num_new_tokens + item.drafts.num_nodes for item in self.scheduled)

    @property
    def num_rows(self) -> int:
        return sum(item.num_rows for item in self.scheduled)

    @property
    def num_paths(self) -> int:
        """Paths of drafts that go on from copies of recurrent states."""
        return sum(1 + len(item.branches) for item in self.scheduled if item.guess_rows)

    def __bool__(self) -> bool:
        return bool(self.scheduled)


NOTHING_SCHEDULED = Batch(())
