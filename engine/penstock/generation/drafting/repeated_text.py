"""RepeatedText: what followed the same words when they stood earlier in a text.

The method is known as prompt lookup or suffix decoding (Saxena 2023; Oliaro et al. 2024, arXiv 2411.04975).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from collections.abc import Sequence as List
from typing import NamedTuple

from penstock.config import EngineConfig

#: Tokens that have to be the same. Where no pair is, the last token alone counts.
PAIR = 2
#: Earlier places that are looked at.
MAX_PLACES = 24
#: Most continuations of one text.
MAX_GUESSES = 3


class Continuation(NamedTuple):
    """A guess of what follows a text."""

    token_ids: tuple[int, ...] = ()
    #: Tokens at the text's end that stand in front of the guess, too.
    num_same: int = 0


class Places:
    """The places after each key, latest first, as in LZ77's hash chains."""

    def __init__(self) -> None:
        self._latest: dict[Hashable, int] = {}
        #: For each place the place before it after the same key; -1 if there is none.
        self._before: list[int] = []

    def add(self, key: Hashable) -> None:
        """The key in front of the next place."""
        self._before.append(self._latest.get(key, -1))
        self._latest[key] = len(self._before) - 1

    def behind(self, key: Hashable) -> Iterator[int]:
        """MAX_PLACES at most."""
        place = self._latest.get(key, -1)
        for _ in range(MAX_PLACES):
            if place < 0:
                return
            yield place
            place = self._before[place]


class RepeatedText:
    """A text that grows, and earlier places that resemble its end."""

    def __init__(self, example: List[int] = (), config: EngineConfig | None = None) -> None:
        """example: a text that this one may resemble. It counts as standing before this text."""
        config = config or EngineConfig()
        self._least, self._most = config.prompt_lookup_min, config.prompt_lookup_max
        self._tokens = [*example, -1] if example else []
        self._start = len(self._tokens)
        self._behind_one, self._behind_pairs, self._num_indexed = Places(), Places(), 0
        self._index()

    def follow(self, token_ids: List[int]) -> None:
        """The whole text. Its beginning is what follow() was given before."""
        self._tokens += token_ids[len(self._tokens) - self._start :]
        self._index()

    def guesses(self, length: int) -> list[Continuation]:
        """Texts of at most `length` tokens that may come next: what stands after the longest match, then
        others that begin with other tokens. What stands after the last token alone, if nothing else is."""
        tail = self._tokens[-self._most :]
        return self.behind(tail, length) or self._read(self._behind_last(tail), length)

    def behind(self, tail: List[int], length: int) -> list[Continuation]:
        """The same for another text's last tokens, of which a pair has to be the same."""
        return self._read(self._places(tail), length) if len(tail) >= PAIR else []

    def _read(self, places: list[tuple[int, int]], length: int) -> list[Continuation]:
        found = (Continuation(self._from(place, length), num_same) for place, num_same in places)
        return [each for each in found if each.token_ids]

    def _from(self, place: int, length: int) -> tuple[int, ...]:
        tokens, end = self._tokens, len(self._tokens)
        guess = list[int]()
        for offset in range(place, place + length):
            # A guess that reaches the text's end goes on with itself: the text repeats itself there.
            token = tokens[offset] if offset < end else guess[offset - end]
            if token < 0:
                break
            guess.append(token)
        return tuple(guess)

    def _index(self) -> None:
        """Note the places after what is new, but not the place at the text's end."""
        tokens = self._tokens
        for place in range(self._num_indexed, len(tokens)):
            self._behind_one.add(tokens[place - 1] if place else None)
            self._behind_pairs.add((tokens[place - 2], tokens[place - 1]) if place >= PAIR else None)
        self._num_indexed = len(tokens)

    def _places(self, tail: List[int]) -> list[tuple[int, int]]:
        """Places after the same tokens as those of `tail`, with the lengths of their matches, longest first;
        of equal ones the latest first. For each next token the best place, MAX_GUESSES at most."""
        best = dict[int, tuple[int, int]]()
        for place in self._behind_pairs.behind((tail[-2], tail[-1])):
            same = self._num_same(place, tail)
            if same >= self._least and same > best.get(self._tokens[place], (0, 0))[1]:
                best[self._tokens[place]] = place, same
            if same == self._most:
                break
        return sorted(best.values(), key=lambda found: (-found[1], -found[0]))[:MAX_GUESSES]

    def _behind_last(self, tail: List[int]) -> list[tuple[int, int]]:
        """Places after the last token, latest first. For each next token one, MAX_GUESSES at most."""
        if self._least > 1 or not tail:
            return []
        best = dict[int, tuple[int, int]]()
        for place in self._behind_one.behind(tail[-1]):
            best.setdefault(self._tokens[place], (place, 1))
        return list(best.values())[:MAX_GUESSES]

    def _num_same(self, place: int, tail: List[int]) -> int:
        tokens, most = self._tokens, min(self._most, place, len(tail))
        count = PAIR
        while count < most and tokens[place - 1 - count] == tail[-1 - count]:
            count += 1
        return count
