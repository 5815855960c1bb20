"""ExpectedUnits: units that the next layer is likely to ask for, and whether reading them early pays."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key")

#: A read that nobody needs costs the time of a read that somebody needs. Units are read early while at least
#: this share of the guesses that would be read come true.
LEAST_SHARE = 0.5
#: How much a guess counts among those before it.
NEWEST = 0.02


class ExpectedUnits(Generic[Key]):
    """The guesses for one layer, and how often guesses came true. What is in memory needs no guess, and does
    not count."""

    def __init__(self) -> None:
        #: Units to be read early, and those of them whose reads have begun.
        self._missing: dict[Key, None] = {}
        self._begun: set[Key] = set()
        #: All guesses, which keep their places in memory until the layer has asked.
        self.kept: frozenset[Key] = frozenset()
        #: The share of guesses that came true of late, and their numbers since the start.
        self.share_right = 1.0
        self.num_read = self.num_right = 0

    @property
    def pays(self) -> bool:
        return self.share_right >= LEAST_SHARE

    def expect(self, keys: Iterable[Key], there: Collection[Key]) -> None:
        """Guesses for the next layer; `there` are the units in memory or on their way."""
        self.kept = frozenset(keys)
        self._missing = {key: None for key in keys if key not in there}
        self._begun = set()

    def to_read(self) -> Sequence[Key]:
        """What to read early, in the order of the guesses. Nothing while guesses come true too rarely."""
        if not (self._missing and self.pays):
            return ()
        return [key for key in self._missing if key not in self._begun]

    @property
    def begun(self) -> Collection[Key]:
        """Units whose reads have begun."""
        return self._begun

    @property
    def num_begun(self) -> int:
        return len(self._begun)

    def begin(self, key: Key) -> None:
        self._begun.add(key)
        self.num_read += 1

    def begun_beside(self, asked: Collection[Key]) -> list[Key]:
        """Wrong guesses whose reads have begun."""
        return [key for key in self._begun if key not in asked]

    def cancel(self, key: Key) -> None:
        """Nothing was read of a unit whose read had begun."""
        self._begun.discard(key)
        self.num_read -= 1

    def settle(self, asked: Collection[Key]) -> set[Key]:
        """The layer asks. Returns the units of these whose reads have begun early."""
        if not self.kept:
            return set()
        for key in self._missing:
            self.share_right += NEWEST * ((key in asked) - self.share_right)
        early = self._begun.intersection(asked)
        self.num_right += len(early)
        self._missing, self._begun, self.kept = {}, set(), frozenset()
        return early
