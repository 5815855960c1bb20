"""SplitReader: brings what a card keeps of a layer, and the rest, from a reader of whole layers. Experts and
an encoder's layers stay whole, and come straight from that reader."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from penstock.memory.direct_io import aligned_buffer
from penstock.memory.pages import round_up
from penstock.spec import UnitKey
from penstock.weights.split.row_split import copy_part
from penstock.weights.tensors import Unit
from penstock.weights.tiers.tier import UnitReader


class SplitReader:
    """Reads a layer into a buffer of its own and takes both units out of it, one after the other. Each unit
    is read once, since both stay in memory."""

    def __init__(
        self, reader: UnitReader, whole: Mapping[UnitKey, Unit], parts: Mapping[UnitKey, Unit]
    ) -> None:
        """`whole` and `parts` are the units of the model before and after split_rows()."""
        self._reader = reader
        self._whole, self._parts = whole, parts
        self._left = {key for key in parts if not self._is_whole(key)}
        self._buffer: Tensor | None = None
        self._held: UnitKey | None = None
        self._thread = ThreadPoolExecutor(1, "penstock-split-reader")

    def submit(self, key: UnitKey, buffer: Tensor) -> Future[int]:
        if self._is_whole(key):
            return self._reader.submit(key, buffer)
        return self._thread.submit(self._read, key, buffer)

    def close(self) -> None:
        self._thread.shutdown()
        self._reader.close()

    def _is_whole(self, key: UnitKey) -> bool:
        """An expert, or a layer of which all stays together."""
        return key in self._whole and self._whole[key].num_bytes == self._parts[key].num_bytes

    def _read(self, key: UnitKey, target: Tensor) -> int:
        whole, num_bytes = self._whole[key._replace(plane=None)], 0
        if self._buffer is None:
            largest = max(unit.num_bytes for key, unit in self._whole.items() if key.expert is None)
            self._buffer = aligned_buffer(round_up(largest))
        if self._held != whole.key:
            self._held = None
            num_bytes = self._reader.submit(whole.key, self._buffer[: round_up(whole.num_bytes)]).result()
            self._held = whole.key
        copy_part(whole, self._buffer, self._parts[key], target)
        self._left.discard(key)
        if not self._left:
            self._buffer = self._held = None
        return num_bytes
