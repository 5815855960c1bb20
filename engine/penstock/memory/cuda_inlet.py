"""CudaInlet: brings a step's inputs to a card through pinned memory, from which a kernel of the card fetches
them.

A copy would wait behind the weights that the card's one copy engine is copying, a layer's for almost a
millisecond, and a step has about ten such inputs. All tensors of one call lie side by side in one half of
the memory, and come with one launch. The halves take turns, and the host writes to a half again when the
card has read it.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.memory.host_lane import PlainInlet

#: Each tensor begins at a multiple of so many bytes, which suits every type.
UNIT = 16
FLOAT_BYTES = 4


class _Half:
    """Of the pinned memory."""

    def __init__(self, address: int, on_card: int) -> None:
        self.address, self.on_card = address, on_card
        #: After the card's last reading.
        self.read: torch.cuda.Event | None = None

    def write(self, tensor: Tensor, offset: int) -> None:
        ctypes.memmove(self.address + offset, tensor.data_ptr(), tensor.nbytes)


class CudaInlet:
    """Used by the one thread that launches."""

    def __init__(
        self, device: torch.device, memory: Tensor, on_card: int, fetch: Callable[[int, Tensor], None]
    ) -> None:
        """`memory`: pinned uint8 [num_bytes], which the card sees at the address `on_card`. fetch(address,
        y): fills y, float32, from there (CudaKernels.fetch)."""
        self._device, self._fetch = device, fetch
        self._memory = memory  # alive as long as the card may read it
        self._plain = PlainInlet(device)
        self.half_bytes = memory.numel() // 2 // UNIT * UNIT
        address = memory.data_ptr()
        self._turns = itertools.cycle(
            _Half(address + offset, on_card + offset) for offset in (0, self.half_bytes)
        )

    def bring(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors on the card, for what is launched next. The host may change its tensors at once. What
        does not fit is copied."""
        places, end = list[int | None](), 0
        for tensor in tensors:
            fits = tensor.device.type == "cpu" and end + tensor.nbytes <= self.half_bytes
            places.append(end if fits else None)
            end += _padded(tensor.nbytes) if fits else 0
        if not end:
            return self._plain.bring(tensors)
        half = next(self._turns)
        if half.read is not None:
            half.read.synchronize()
        for tensor, place in zip(tensors, places, strict=True):
            if place is not None:
                half.write(tensor.contiguous(), place)
        whole = torch.empty(end // FLOAT_BYTES, dtype=torch.float32, device=self._device)
        self._fetch(half.on_card, whole)
        half.read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        half.read.record(torch.cuda.current_stream(self._device))
        views = {torch.float32: whole}
        return [
            self._plain.bring([tensor])[0] if place is None else _view(views, tensor, place)
            for tensor, place in zip(tensors, places, strict=True)
        ]


def open_inlet(
    driver: Any, memory: Tensor, device: torch.device, fetch: Callable[[int, Tensor], None]
) -> CudaInlet | None:
    """An inlet through `memory`; None where the card does not see it."""
    on_card = ctypes.c_uint64()
    address = ctypes.c_void_p(memory.data_ptr())
    with torch.cuda.device(device):
        if driver.cuMemHostGetDevicePointer_v2(ctypes.byref(on_card), address, 0):
            return None
    return CudaInlet(device, memory, on_card.value, fetch)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // UNIT) * UNIT


def _view(views: dict[torch.dtype, Tensor], tensor: Tensor, place: int) -> Tensor:
    """The bytes from `place` on, with the shape and type of `tensor`. `views`: all bytes, by type."""
    whole = views.get(tensor.dtype)
    if whole is None:
        whole = views[tensor.dtype] = views[torch.float32].view(tensor.dtype)
    strides = [1]
    for size in reversed(tensor.shape[1:]):
        strides.append(strides[-1] * size)
    return whole.as_strided(tensor.shape, strides[::-1][: tensor.dim()], place // tensor.element_size())
