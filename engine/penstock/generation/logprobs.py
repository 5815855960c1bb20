"""Log-probabilities of tokens, natural logarithm. Numbers only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: What a step scores of a sequence whose prompt is not scored.
NONE_SCORED = range(0)


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position."""

    token_id: int
    logprob: float
    #: The likeliest tokens, likeliest first.
    top: tuple[tuple[int, float], ...] = ()
    #: The token's rank among all tokens; 1 is the likeliest.
    rank: int = 0


class PromptScores:
    """Log-probabilities of a prompt's tokens, as far as they are known."""

    def __init__(self, first: int, num_prompt_tokens: int) -> None:
        """first: the first token whose log-probability is wanted."""
        self._first = first
        self._num_prompt_tokens = num_prompt_tokens
        #: By token. The first token has none, since nothing comes before it.
        self.known: list[TokenLogprobs | None] = [None]

    @classmethod
    def of(cls, first: int | None, num_prompt_tokens: int) -> PromptScores | None:
        """None where no log-probability is wanted."""
        return None if first is None else cls(first, num_prompt_tokens)

    def missing(self, num_computed_tokens: int, end: int) -> range:
        """Tokens, by index, whose log-probabilities are wanted and will be known once the tokens from
        `num_computed_tokens` to `end` are computed. Known ones are left out: a preempted sequence computes
        its prompt again."""
        first = max(self._first, num_computed_tokens + 1, len(self.known))
        return range(first, min(end + 1, self._num_prompt_tokens))

    def add(self, first: int, scores: Iterable[TokenLogprobs]) -> None:
        """Log-probabilities of the tokens from `first` on."""
        # K and V that came from elsewhere would leave a gap.
        assert first == len(self.known), (
            f"the prompt was not swept whole: {len(self.known)} comes before {first}"
        )
        self.known += scores
