"""Landing: blocks of sequences on their way to or from a store, until they have arrived. Numbers only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

from penstock.generation.sequence import Sequence


class Moving(Protocol):
    """What a sequence has on its way."""

    @property
    def is_done(self) -> bool:
        """It has arrived, or takes longer than it may."""


Of = TypeVar("Of", bound=Moving)


class Landing(ABC, Generic[Of]):
    """What moves for each sequence. A kind of move says what happens in the end."""

    def __init__(self) -> None:
        self._moving: dict[Sequence, Of] = {}

    def land(self) -> None:
        """End what is done."""
        for sequence in [each for each, moving in self._moving.items() if moving.is_done]:
            self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        """End what a sequence has on its way, if it has something, done or not."""
        moving = self._moving.pop(sequence, None)
        if moving is not None:
            self._end(sequence, moving)

    @abstractmethod
    def _end(self, sequence: Sequence, moving: Of) -> None: ...
