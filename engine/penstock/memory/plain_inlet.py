"""PlainInlet: brings a step's inputs to where it is computed, tensor by tensor. The plain twin of
CudaInlet."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class PlainInlet:
    """Tensors that are there already are brought as they are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def bring(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.to(self._device, non_blocking=True) for tensor in tensors]
