"""StateLayout: the recurrent state of a layer. Numbers only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

LINE_BYTES = 64


class StatePart(NamedTuple):
    """One tensor of a sequence's state, in float32."""

    name: str
    shape: tuple[int, ...]
    #: Shapes of what a token brings to it. A guess that was right is replayed from these numbers, in float32.
    fed: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class StateLayout:
    """What a layer remembers of all tokens of a sequence. The size does not depend on the number of tokens.
    States are float32 whatever the type of keys and values: each token rounds a state once more, so errors
    add up over a text."""

    parts: tuple[StatePart, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of one sequence in one layer, in whole cache lines, as memory is handed out."""
        return -(-4 * self.num_elements // LINE_BYTES) * LINE_BYTES

    @property
    def num_elements(self) -> int:
        return sum(math.prod(part.shape) for part in self.parts)

    @property
    def guess_bytes(self) -> int:
        """Bytes of what one guess brings to the state."""
        return 4 * sum(math.prod(shape) for part in self.parts for shape in part.fed)


NO_STATE = StateLayout()


class GuessRoom(NamedTuple):
    """Room for guesses in a model with recurrent states, which have no way back to the last guess that was
    right."""

    #: Guesses of a step, and those that were right in the steps before, until their sequences' next steps
    #: replay them.
    num_rows: int = 0
    #: Paths of guesses of a step, each of which goes on from a copy of a layer's state.
    num_paths: int = 0


NO_ROOM = GuessRoom()
