"""RecycledTokens: what the model itself found likely behind each token, the last time it computed one.

The method is known as Token Recycling (Luo et al. 2024, arXiv 2408.08696): each row of logits names tokens
that may follow, and they are thrown away but for one. A tree of them costs no model and no reading.
"""

from __future__ import annotations

from collections.abc import Sequence as List


class RecycledTokens:
    """One table for all sequences of a model. It has at most a row for each token of the vocabulary. What
    one client's text leaves here changes how soon another's guesses come true, and no answer."""

    def __init__(self) -> None:
        self._followers: dict[int, tuple[int, ...]] = {}

    def learn(self, token_id: int, followers: tuple[int, ...]) -> None:
        """The likeliest tokens behind a token, likeliest first."""
        self._followers[token_id] = followers

    def followers(self, token_id: int) -> List[int]:
        return self._followers.get(token_id, ())
