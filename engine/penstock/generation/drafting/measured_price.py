"""MeasuredPrice: what a drafter's questions take, by prediction and by what the last ones took. Pure: whoever
has a clock tells.

A prediction has the rates of products that were measured alone. Within a step a pass over planes took up to
three times as long. So each prediction is multiplied by the usual ratio of questions of its size.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

#: Questions of a size that are remembered. The prediction counts as one of them.
_NUM_KEPT = 5
#: With each step without a question of a size, its ratio comes nearer to 1 by this share: what was too dear
#: for a while is tried again.
_RECOVERY = 0.99


class _Size:
    """Questions of about the same size."""

    def __init__(self) -> None:
        self._ratios = deque([1.0], maxlen=_NUM_KEPT)
        self._trust, self._is_asked = 1.0, False

    @property
    def ratio(self) -> float:
        return 1 + self._trust * (statistics.median(self._ratios) - 1)

    def record(self, ratio: float) -> None:
        self._ratios.append(ratio)
        self._trust, self._is_asked = 1.0, True

    def end_step(self) -> None:
        self._trust *= 1.0 if self._is_asked else _RECOVERY
        self._is_asked = False


class MeasuredPrice:
    """Of questions about several places. Those about 1, 2 to 3, 4 to 7, ... places are a size each."""

    def __init__(self, predict_s: Callable[[int], float]) -> None:
        """predict_s: places -> seconds; 0 if nothing is known."""
        self._predict_s = predict_s
        self._sizes: dict[int, _Size] = {}

    def seconds(self, num_places: int) -> float:
        """Of a question about so many places; 0 if nothing is known. A size that was never met has the ratio
        of the nearest one, the smaller of two."""
        if not self._sizes:
            return self._predict_s(num_places)
        size = num_places.bit_length()
        nearest = min(self._sizes, key=lambda met: (abs(met - size), met))
        return self._predict_s(num_places) * self._sizes[nearest].ratio

    def record(self, num_places: int, seconds: float) -> None:
        """A question about so many places took this long."""
        if (predicted_s := self._predict_s(num_places)) > 0:
            self._sizes.setdefault(num_places.bit_length(), _Size()).record(seconds / predicted_s)

    def end_step(self) -> None:
        """A step has ended that could have asked."""
        for each in self._sizes.values():
            each.end_step()
