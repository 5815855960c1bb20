"""CudaHandover: hands work from a card to the processor and back, all of it queued.

Products in compiled code that have few tokens cross by flags, on the stream that computes (Crossing, of the
processor's kernels). Everything else, and everything where a driver has no such flags, goes another way: a
stream of its own waits for the activations, copies them to the host, calls a function there, and copies the
result back. The driver calls the function in the stream's order, on a thread of the driver, where no CUDA
function may be called. A product in compiled code is such a function itself; for others a worker of ours
computes meanwhile. So neither the thread that launches nor the stream that computes waits, until the result
is needed.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.errors import HandoverError

#: Of the pinned memory, what a crossing gets: inputs and results of a few dozen tokens.
CROSSING_BYTES = 4 << 20
#: void (*)(void *user_data), which cuLaunchHostFunc takes.
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
FLOAT_BYTES = 4


class CudaHandover:
    """Used by the one thread that launches."""

    def __init__(self, device: torch.device, driver: ctypes.CDLL, buffer: Tensor) -> None:
        """`buffer` is pinned, and the card sees it: uint8 [HANDOVER_BYTES]."""
        self._device, self._driver = device, driver
        self._buffer, self._flagged = buffer[CROSSING_BYTES:], buffer[:CROSSING_BYTES]
        #: Made for the first product; None where there is none, or no product has come yet.
        self._crossing: Any = None
        self._has_tried = False
        #: The result of the product that crosses, until join().
        self._crossed: tuple[Tensor, Callable[[int, Tensor], None]] | None = None
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done: torch.cuda.Event | None = None
        self._function = _HOST_FUNCTION(self._run)  # has to live as long as calls are queued
        self._worker = ThreadPoolExecutor(1, "penstock-beside-card")
        #: What the function computes when it is called next, in the stream's order.
        self._work: deque[Callable[[], None]] = deque()
        #: Tensors that the stream still reads or writes. Nobody else may get their memory before join(), even
        #: if the step that they belong to was given up.
        self._held: list[Tensor] = []
        #: Results whose rows have gaps between them, and what is copied there in one piece, until join().
        self._apart: list[tuple[Tensor, Tensor]] = []
        #: Records of calls that may not be over before an event, and those that no event follows yet:
        #: a record lives from before its call is queued on, whatever fails then.
        self._records: deque[tuple[torch.cuda.Event, list[Any]]] = deque()
        self._new_records: list[Any] = []
        self._failure: BaseException | None = None

    def begin(
        self,
        x: Tensor,
        out_features: int,
        compute: Callable[[Tensor], Tensor],
        product: Any = None,
        fetch: Callable[[int, Tensor], None] | None = None,
        y: Tensor | None = None,
    ) -> Tensor:
        """`product` is a CrossingProduct or a HostProduct, as kernels define them."""
        self.check()
        while self._records and self._records[0][0].query():  # type: ignore[no-untyped-call]
            self._records.popleft()
        x = x.contiguous()
        y = x.new_empty(x.shape[0], out_features) if y is None else y
        if product is not None and fetch is not None and self._cross(product, x):
            self._crossed = y, fetch
            return y
        if not hasattr(product, "function"):
            product = None  # a driver's thread can't compute it
        own = y if y.is_contiguous() else torch.empty_like(y, memory_format=torch.contiguous_format)
        if own is not y:
            self._apart.append((y, own))
        self._held += [x, own]
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(ready)
        num_rows = max(1, self._buffer.numel() // FLOAT_BYTES // (x.shape[1] + out_features))
        with torch.cuda.stream(self._stream):
            for first in range(0, x.shape[0], num_rows):
                piece = x[first : first + num_rows], own[first : first + num_rows]
                self._queue(*piece, compute, product)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record(self._stream)
        self._records.append((self._done, self._new_records))
        self._new_records = []
        return y

    def join(self) -> None:
        self._join_crossed()
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
        self._done = None
        for y, own in self._apart:
            y.copy_(own)
        self._apart.clear()
        self._held.clear()

    def then(self, function: Callable[[], None]) -> None:
        """Have a thread of the host call `function` when everything that was begun so far is computed."""
        if self._crossing is not None:  # of which our stream knows nothing
            self._crossing.wait(self._stream.cuda_stream)
        self._call_back(function)

    def _call_back(self, function: Callable[[], None]) -> None:
        """Have a thread of the host call `function` in the stream's order."""
        self._work.append(function)
        try:
            self._call(self._function, None)
        except RuntimeError:
            self._work.pop()
            raise

    def _call(self, function: Any, data: int | None) -> None:
        """Have the driver call function(data) in the stream's order."""
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        if code := self._driver.cuLaunchHostFunc(stream, function, ctypes.c_void_p(data)):
            raise RuntimeError(f"CUDA: cuLaunchHostFunc failed (error {code})")

    def check(self) -> None:
        """Raises HandoverError if a `compute` has failed since the last call."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise HandoverError(
                f"the processor could not compute its share of a product: {failure or repr(failure)}"
            ) from failure

    def close(self) -> None:
        """Nothing may be queued any more."""
        if self._crossing is not None:
            self._crossing.close()
            self._crossing = None
        self._crossed = None
        self._worker.shutdown()
        self._work.clear()
        self._apart.clear()
        self._held.clear()
        self._records.clear()
        self._new_records.clear()

    def _cross(self, product: Any, x: Tensor) -> bool:
        """Whether the product has begun to cross by flags."""
        if not self._has_tried:
            self._has_tried = True
            make = getattr(product, "open_crossing", None)
            self._crossing = make and make(self._driver, self._flagged, self._device)
        if self._crossing is None:
            return False
        self._join_crossed()  # whose results lie where the next ones come to lie
        return bool(product.cross(self._crossing, x))

    def _join_crossed(self) -> None:
        if self._crossed is not None:
            (y, fetch), self._crossed = self._crossed, None
            fetch(self._crossing.end(), y)

    def _queue(self, x: Tensor, y: Tensor, compute: Callable[[Tensor], Tensor], product: Any) -> None:
        """The stream's order keeps one piece's use of the buffer apart from the next one's."""
        floats = self._buffer.view(torch.float32)
        rows = floats[: x.numel()].view(x.shape)
        result = floats[x.numel() : x.numel() + y.numel()].view(y.shape)
        rows.copy_(x, non_blocking=True)
        if product is None:
            self._call_back(partial(self._compute, rows, result, compute))
        else:
            record = product.record(rows, result)
            self._new_records.append(record)
            self._call(product.function, ctypes.addressof(record))
        y.copy_(result, non_blocking=True)

    def _run(self, _: int | None) -> None:
        """On the driver's thread."""
        try:
            self._worker.submit(self._work.popleft()).result()
        except BaseException as error:  # nobody catches it here; the next launch raises it
            self._failure = error

    @staticmethod
    def _compute(rows: Tensor, result: Tensor, compute: Callable[[Tensor], Tensor]) -> None:
        with torch.inference_mode():
            result.fill_(float("nan"))  # an error must not look like an answer
            result.copy_(compute(rows))
