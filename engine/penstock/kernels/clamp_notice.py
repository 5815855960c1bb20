"""What is said of keys and values that float16 can't hold."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

#: The largest float16.
MAX_HALF = torch.finfo(torch.float16).max


class ClampNotice:
    """Says once that keys or values were clamped."""

    def __init__(self) -> None:
        self._is_given = False

    def give(self) -> None:
        if not self._is_given:
            self._is_given = True
            logger.warning(
                "keys or values beyond %.0f, the largest float16, are stored as this number: answers may "
                "differ from the model's. --kv-dtype int8 or float32 holds larger numbers",
                MAX_HALF,
            )

    def look_at(self, *stored: Tensor) -> None:
        """Numbers that become float16. On a GPU looking would wait for the card, so they are not looked
        at."""
        if not self._is_given and any(_is_beyond(x) for x in stored):
            self.give()


def _is_beyond(x: Tensor) -> bool:
    return x.device.type == "cpu" and bool((x.abs() > MAX_HALF).any())
