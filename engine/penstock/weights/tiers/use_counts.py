"""UseCounts: how often each expert was used, learned while the model runs. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key")

#: A use counts half after so many sweeps of one token: popularity differs from one kind of text to the next.
HALF_LIFE_SWEEPS = 1000
#: An expert that is there already stays unless another one has so many times its uses: else experts with
#: nearly equal counts would take turns.
FAVOUR = 1.25
#: Numbers stay far below the largest float.
MOST = 1e100


class UseCounts(Generic[Key]):
    """Uses by key. An older use counts less than a newer one. In place of all old counts that would shrink,
    the weight of the next use grows."""

    def __init__(self, num_per_sweep: int, counts: Mapping[Key, float] | None = None) -> None:
        """A sweep of one token uses `num_per_sweep` experts. `counts` are those of an earlier run."""
        self.num_per_sweep = num_per_sweep
        self._counts = dict(counts or {})
        self._weight = 1.0
        self._growth = 2 ** (1 / (HALF_LIFE_SWEEPS * max(1, num_per_sweep)))
        #: Uses since the start of this run.
        self.num_uses = 0

    def copy(self) -> UseCounts[Key]:
        """Counts that go on alone."""
        return UseCounts(self.num_per_sweep, self.counts)

    def clear(self) -> None:
        """Begin anew."""
        self._counts = {}

    def add(self, keys: Iterable[Key]) -> None:
        """Each of these was used once."""
        counts, weight = self._counts, self._weight
        number = 0
        for key in keys:
            counts[key] = counts.get(key, 0.0) + weight
            number += 1
        self.num_uses += number
        self._weight = weight * self._growth**number
        if self._weight > MOST:
            self._counts, self._weight = self.counts, 1.0

    @property
    def counts(self) -> dict[Key, float]:
        """Uses by key; a use now counts 1. Any thread may ask."""
        weight = self._weight
        return {key: count / weight for key, count in self._counts.copy().items()}

    def hottest(self, number: int) -> list[tuple[Key, float]]:
        """The most used keys, each with its uses per sweep of one token, at most 1. Any thread may ask."""
        counts, weight = self._counts.copy(), self._weight
        total = sum(counts.values())
        sweeps = max(total / max(1, self.num_per_sweep), weight)
        found = heapq.nlargest(number, counts.items(), key=lambda item: item[1])
        return [(key, min(1.0, count / sweeps)) for key, count in found]

    def most_used(self, number: int, favoured: Container[Key] = ()) -> list[Key]:
        """The keys with the largest counts, the largest first. Of equal ones, the one used first comes first.
        Counts of `favoured` keys are taken FAVOUR times as large."""

        def count(item: tuple[Key, float]) -> float:
            return item[1] * FAVOUR if item[0] in favoured else item[1]

        return [key for key, _ in heapq.nlargest(number, self._counts.items(), key=count)]
