"""Chosen: what a step's logits say of one sequence. Numbers only."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from penstock.errors import RequestFailed
from penstock.generation.logprobs import TokenLogprobs


class SampledToken(NamedTuple):
    """One token of an answer."""

    token_id: int
    logprobs: TokenLogprobs | None


class ProposedToken(NamedTuple):
    """A token that may follow a beam."""

    token: SampledToken
    #: The log-probability by which tokens are compared: after bias, penalties and everything that forbids
    #: tokens.
    logprob: float


class Chosen(NamedTuple):
    """What was chosen for one sequence in one step. The class is a tuple, since each step makes one for each
    sequence."""

    #: What follows the sequence's tokens: the drafts that were right, and one token more. Empty where no
    #: token is sampled yet.
    tokens: tuple[SampledToken, ...] = ()
    #: Log-probabilities of the prompt's tokens that the step had to score, in order.
    scores: tuple[TokenLogprobs, ...] = ()
    #: Why no token could be chosen.
    error: RequestFailed | None = None
    #: What may follow a beam, likeliest first. Only for sequences of a beam search, which have no `tokens`.
    proposals: tuple[ProposedToken, ...] = ()
    #: Drafts that the step computed, and how many of them are among `tokens`, at their beginning.
    num_drafts: int = 0
    num_right: int = 0
    #: The likeliest tokens after the sequence's last token, and after each draft; empty unless a drafter
    #: asked for them.
    followers: tuple[tuple[int, ...], ...] = ()
    #: The vector of a text, or the score of a pair, float32. None: the sequence is there for text, or the
    #: step ends within its prompt.
    pooled: array[float] | None = None

    @property
    def num_accepted(self) -> int:
        """Drafts that were right and are followed by another token. The last token does not count: its K and
        V are not computed."""
        return max(0, len(self.tokens) - 1)


#: What is chosen for a sequence whose step ends within its prompt.
NOTHING = Chosen()
