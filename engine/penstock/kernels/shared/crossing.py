"""Crossing: the quick way of products, and of attention, from a card to the processor and back."""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections import deque
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.cuda.launcher import stream_query

logger = logging.getLogger(__name__)

#: The driver's functions that crossing.h calls, in its order.
DRIVER_FUNCTIONS = (
    "cuCtxSetCurrent", "cuMemcpyDtoHAsync_v2", "cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2",
)  # fmt: skip
#: As in crossing.h; a test compares them.
MAX_HANDED, HEAD_BYTES, FULL, PART_NUMBERS = 64, 128, -1, 3
FLOAT_BYTES, ROUND_FLOATS = 4, 16


class Crossing:
    """All of it is queued on the stream that computes: after begin(), the card computes on, and after end()
    it has the result. Used by the one thread that launches, one product at a time. A product that was
    begun and never ended is forgotten."""

    def __init__(self, library: Any, handle: int, memory: Tensor, on_card: int, device: torch.device) -> None:
        """open_crossing() makes it. `on_card` is the card's address of the memory."""
        self._library = library
        self._handle: ctypes.c_void_p | None = ctypes.c_void_p(handle)
        self._memory, self._on_card, self._results = memory, on_card, on_card
        self._device_index = device.index
        self._current_stream = stream_query()
        #: What the thread may still read: no more than this is given and not computed.
        self._held: deque[object] = deque(maxlen=MAX_HANDED)

    def begin(
        self,
        parts: array[int],
        sizes: tuple[int, int],
        activation_bits: int,
        scratch_bytes: int,
        x: Tensor,
        kept: object,
    ) -> bool:
        """Have x, float32 [num_rows, in_features], contiguous on the card, multiplied. `parts` has the
        PART_NUMBERS of each handed_part (crossing.h), which take the rows in their order; `sizes` are the
        in_features and out_features of all their matrices, and `kept` has the memory to which they point.
        False if there is no room for this now. Raises RuntimeError, as torch does, if the driver refuses."""
        num_rows, (in_features, out_features), unit = x.shape[0], sizes, ROUND_FLOATS
        begin = HEAD_BYTES + FLOAT_BYTES * ((num_rows * in_features + unit - 1) // unit * unit)
        if begin + FLOAT_BYTES * num_rows * out_features > self._memory.numel():
            return False
        error = self._library.penstock_crossing_begin(
            self._handle, parts.buffer_info()[0], len(parts) // PART_NUMBERS, activation_bits, scratch_bytes,
            x.data_ptr(), self._current_stream(self._device_index),
        )  # fmt: skip
        if error == FULL:
            return False
        self._check(error)
        self._held.append((parts, kept))
        self._results = self._on_card + begin
        return True

    def attend(self, record: int, num_results: int, q: Tensor, kept: object) -> bool:
        """Have q, float32 and contiguous on the card, attend to splits in RAM (attended.h) as the record at
        this address says, with so many floats of results. `kept` has the record and what it points to. False
        and errors as of begin()."""
        unit = ROUND_FLOATS
        begin = HEAD_BYTES + FLOAT_BYTES * ((q.numel() + unit - 1) // unit * unit)
        if begin + FLOAT_BYTES * num_results > self._memory.numel():
            return False
        stream = self._current_stream(self._device_index)
        error = self._library.penstock_crossing_attend(self._handle, record, q.numel(), q.data_ptr(), stream)
        if error == FULL:
            return False
        self._check(error)
        self._held.append(kept)
        self._results = self._on_card + begin
        return True

    def end(self) -> int:
        """What is launched next finds the result of what was begun last, float32 [num_rows, out_features], at
        the returned address, and has to take it before the next begin()."""
        stream = self._current_stream(self._device_index)
        self._check(self._library.penstock_crossing_end(self._handle, stream))
        return self._results

    def wait(self, stream: int) -> None:
        """What is queued next on another stream waits until what was begun so far is computed."""
        self._check(self._library.penstock_crossing_wait(self._handle, stream))

    def close(self) -> None:
        """The stream has nothing to do any more."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._library.penstock_crossing_close(handle)
        self._held.clear()

    def __del__(self) -> None:
        # The thread looks at the memory until it is ended, and the memory goes with this object.
        self.close()

    @staticmethod
    def _check(error: int) -> None:
        if error:
            raise RuntimeError(f"CUDA: a product could not be handed over (error {error})")


def open_crossing(library: Any, driver: Any, memory: Tensor, device: torch.device) -> Crossing | None:
    """A crossing through `memory`, pinned uint8 [num_bytes] that the card `device` sees. None where the
    driver has no streams that write and wait for values."""
    on_card, context = ctypes.c_uint64(), ctypes.c_void_p()
    address = ctypes.c_void_p(memory.data_ptr())
    try:
        functions = [ctypes.cast(getattr(driver, name), ctypes.c_void_p) for name in DRIVER_FUNCTIONS]
        with torch.cuda.device(device):
            is_seen = not driver.cuMemHostGetDevicePointer_v2(ctypes.byref(on_card), address, 0)
            is_seen &= not driver.cuCtxGetCurrent(ctypes.byref(context))
    except AttributeError:
        is_seen = False
    handle = None
    if is_seen:
        memory[:HEAD_BYTES].zero_()
        handle = library.penstock_crossing_open(
            (ctypes.c_void_p * len(functions))(*functions), context, memory.data_ptr(), on_card.value,
            stream_query()(device.index),
        )  # fmt: skip
    if handle is None:
        logger.warning(
            "%s: the driver's streams don't wait for values in memory: products of the processor are handed "
            "over by functions that the driver calls, which takes longer",
            device,
        )
        return None
    return Crossing(library, handle, memory, on_card.value, device)
