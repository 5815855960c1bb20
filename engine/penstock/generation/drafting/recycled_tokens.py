"""RecycledTokens: what the model itself found likely after the same tokens, the last time it computed them.

The method is known as Token Recycling (Luo et al. 2024, arXiv 2408.08696): each row of logits names tokens
that may follow, and they are thrown away but for one. A tree of them costs no model and no reading. The paper
has a row for each token. Here the two last tokens count, where they were seen, and else the last one.
"""

from __future__ import annotations

from collections.abc import Sequence as List

#: Pairs of tokens that are remembered: about 600 bytes each, 12 MB in all.
_MAX_PAIRS = 20_000


class RecycledTokens:
    """One table for several sequences. What one text leaves here changes how soon another's guesses come
    true, and no answer."""

    def __init__(self) -> None:
        self._behind: dict[int, tuple[int, ...]] = {}
        #: The oldest pair comes first.
        self._behind_two: dict[tuple[int, int], tuple[int, ...]] = {}

    def learn(self, before: int, token_id: int, followers: tuple[int, ...]) -> None:
        """The likeliest tokens after two tokens, likeliest first."""
        self._behind[token_id] = followers
        self._behind_two.pop((before, token_id), None)
        self._behind_two[before, token_id] = followers
        if len(self._behind_two) > _MAX_PAIRS:
            del self._behind_two[next(iter(self._behind_two))]

    def followers(self, before: int, token_id: int) -> tuple[List[int], bool]:
        """What was likely, and whether it was after both tokens."""
        found = self._behind_two.get((before, token_id))
        return (self._behind.get(token_id, ()), False) if found is None else (found, True)
