"""Chosen: what a step's logits say of one sequence. Numbers only."""

from __future__ import annotations

from typing import NamedTuple

from penstock.errors import RequestFailed
from penstock.generation.logprobs import TokenLogprobs


class SampledToken(NamedTuple):
    """One token of an answer."""

    token_id: int
    logprobs: TokenLogprobs | None


class Chosen(NamedTuple):
    """Tuples, since there is one for each sequence and step."""

    #: What follows the sequence's tokens: the drafts that were right, and one more. None where no token is
    #: sampled yet.
    tokens: tuple[SampledToken, ...] = ()
    #: Of the prompt's tokens that the step was to score, in order.
    scores: tuple[TokenLogprobs, ...] = ()
    #: Why no token could be chosen.
    error: RequestFailed | None = None

    @property
    def num_accepted(self) -> int:
        """Drafts that were right and whose successor is known: K and V of the last token are not there."""
        return max(0, len(self.tokens) - 1)


#: Of a sequence whose step ends within its prompt.
NOTHING = Chosen()
