"""Rounding: how weights become integers while a model is converted."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from torch import Tensor

from penstock.weights.store import WeightStore
from penstock.weights.tensors import TensorSpec


class Rounding(Protocol):
    """Groups of tensors come in their order: embedding, units, head."""

    @property
    def name(self) -> str | None:
        """Roundings with the same name make the same integers. None: rounding to the nearest."""

    @property
    def looks_back(self) -> bool:
        """Whether it has to see, by look_at(), what an earlier run has converted."""

    def read(self, tensors: tuple[TensorSpec, ...], buffer: Tensor) -> dict[str, float]:
        """WeightStore.read_with_errors()."""

    def look_at(self, tensors: tuple[TensorSpec, ...], buffer: Tensor) -> None:
        """Tensors that an earlier run has converted."""


class Nearest:
    """Rounding as the store does it."""

    name = None
    looks_back = False

    def __init__(self, store: WeightStore, num_threads: int) -> None:
        self.read = partial(store.read_with_errors, num_threads=num_threads)

    def look_at(self, tensors: tuple[TensorSpec, ...], buffer: Tensor) -> None: ...
