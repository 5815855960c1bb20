"""SplitReader: brings what a card keeps of a layer, and the rest, from a reader of whole layers. Experts and
an encoder's layers stay whole, and come straight from that reader."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from penstock.memory.direct_io import aligned_buffer
from penstock.memory.pages import round_up
from penstock.spec import UnitKey
from penstock.weights.split.row_split import copy_part
from penstock.weights.tensors import Unit
from penstock.weights.tiers.tier import UnitReader


class SplitReader:
    """Reads a layer, of planes both, into a buffer of its own and takes both units out of it, one after the
    other. Each unit is read once, since both stay in memory."""

    def __init__(
        self, reader: UnitReader, whole: Mapping[UnitKey, Unit], parts: Mapping[UnitKey, Unit]
    ) -> None:
        """`whole` and `parts` are the units of the model before and after split_rows()."""
        self._reader = reader
        self._parts = parts
        #: Experts, and layers or upper planes of which all stays together.
        self._unchanged = {
            key for key, unit in parts.items() if key in whole and unit.tensors == whole[key].tensors
        }
        self._left = set(parts) - self._unchanged
        split = {key._replace(plane=None) for key in self._left}
        #: The units of each layer that is split, by the first one's key.
        self._layers = defaultdict[UnitKey, list[Unit]](list)
        for key, unit in whole.items():
            if key._replace(plane=None) in split:
                self._layers[key._replace(plane=None)].append(unit)
        self._buffer: Tensor | None = None
        self._held: UnitKey | None = None
        self._thread = ThreadPoolExecutor(1, "penstock-split-reader")

    def submit(self, key: UnitKey, buffer: Tensor) -> Future[int]:
        if key in self._unchanged:
            return self._reader.submit(key, buffer)
        return self._thread.submit(self._read, key, buffer)

    def close(self) -> None:
        self._thread.shutdown()
        self._reader.close()

    def _read(self, key: UnitKey, target: Tensor) -> int:
        layer, num_bytes = key._replace(plane=None), 0
        units = self._layers[layer]
        sizes = [round_up(unit.num_bytes) for unit in units]
        if self._buffer is None:
            largest = max(sum(round_up(unit.num_bytes) for unit in each) for each in self._layers.values())
            self._buffer = aligned_buffer(largest)
        whole = list(zip(units, torch.split(self._buffer[: sum(sizes)], sizes), strict=True))
        if self._held != layer:
            self._held = None
            reads = [self._reader.submit(unit.key, buffer) for unit, buffer in whole]
            wait(reads)  # none of them writes into the buffer any more, also if another one failed
            num_bytes = sum(read.result() for read in reads)
            self._held = layer
        copy_part(whole, self._parts[key], target)
        self._left.discard(key)
        if not self._left:
            self._buffer = self._held = None
        return num_bytes
