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


NO_STATE = StateLayout()
