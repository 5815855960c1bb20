"""Stand-ins: modules that take the places of transformers' own ones, and compute the same with our kernels.
Exact linear modules become INT8 products. Norms and activations are known by what they compute: a module is
tried on random numbers, whatever its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from penstock.kernels import ActivationFunction
from penstock.model.through_transformers.desk import Desk
from penstock.model.through_transformers.own_functions import ours

#: How near a module's results have to be to ours, as a share of the largest.
_CLOSE = 2e-6
_ACTIVATIONS: dict[ActivationFunction, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}
#: Where activations come from.
_ACTIVATION_ROOMS = ("transformers.activations", "torch.nn.modules.activation")


class Product(nn.Module):
    """A product with a matrix of the layer, plus its bias if there is one."""

    #: Some models look at the bias of a module that is put in a place. The desk has the bias.
    bias = None

    def __init__(self, desk: Desk, name: str) -> None:
        super().__init__()
        self.desk, self.name = desk, name

    @ours
    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self.desk.project(self.name, rows).view(*x.shape[:-1], -1)


class RMSNorm(nn.Module):
    """A norm by the root mean square; `offset` is added to its weight."""

    def __init__(self, desk: Desk, name: str, eps: float, offset: float) -> None:
        super().__init__()
        self.desk, self.name, self.eps, self.offset = desk, name, eps, offset

    @ours
    def forward(self, x: Tensor) -> Tensor:
        weight = self.desk.weights.vector(self.name)
        return self.desk.kernels.rms_norm(x.contiguous(), weight, self.eps, self.offset)


class LayerNorm(nn.Module):
    """A layer norm over the last dimension."""

    def __init__(self, desk: Desk, name: str, eps: float) -> None:
        super().__init__()
        self.desk, self.name, self.eps = desk, name, eps

    @ours
    def forward(self, x: Tensor) -> Tensor:
        weights = self.desk.weights
        weight, bias = weights.optional(f"{self.name}.weight"), weights.optional(f"{self.name}.bias")
        return self.desk.kernels.layer_norm(x.contiguous(), weight, bias, self.eps)


class Activation(nn.Module):
    """An elementwise function."""

    def __init__(self, desk: Desk, function: ActivationFunction) -> None:
        super().__init__()
        self.desk, self.function = desk, function

    @ours
    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self.desk.kernels.activation(rows, self.function).view(x.shape)


def is_product(module: nn.Module) -> bool:
    """Whether a module is exactly a linear one. Subclasses compute something else."""
    from transformers.pytorch_utils import Conv1D

    return type(module) in (nn.Linear, Conv1D)


def stand_in(module: nn.Module, desk: Desk, name: str) -> nn.Module | None:
    """The module that takes the place of `module`, whose tensors begin with `name`; None if there is
    none."""
    if type(module) is nn.LayerNorm:
        return LayerNorm(desk, name, module.eps) if len(module.normalized_shape) == 1 else None
    own = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    if next(module.children(), None) is not None:
        return None
    if not own:
        function = _activation_of(module) if type(module).__module__ in _ACTIVATION_ROOMS else None
        return Activation(desk, function) if function else None
    found = _rms_norm_of(module) if own == ["weight"] and module.get_parameter("weight").dim() == 1 else None
    return RMSNorm(desk, f"{name}.weight", *found) if found else None


def _activation_of(module: nn.Module) -> ActivationFunction | None:
    x = torch.linspace(-12.0, 12.0, 257).view(1, -1)  # some functions clip what is beyond 10
    y = _tried(lambda: module(x))
    if y is None or y.shape != x.shape:
        return None
    return next((name for name, function in _ACTIVATIONS.items() if _is_close(y, function(x))), None)


def _rms_norm_of(module: nn.Module) -> tuple[float, float] | None:
    """(eps, offset) if the module is a norm by the root mean square."""
    width = module.get_parameter("weight").shape[0]
    given = (getattr(module, name, None) for name in ("variance_epsilon", "eps", "epsilon", "norm_eps"))
    eps = next((value for value in given if isinstance(value, float)), None)
    if eps is None:
        return None
    numbers = torch.Generator().manual_seed(0)
    # The second row is so small that eps counts.
    x = torch.randn(2, width, generator=numbers) * torch.tensor([[1.0], [eps**0.5]])
    weight = torch.randn(width, generator=numbers)
    y = _tried(lambda: functional_call(module, {"weight": weight}, (x,)))
    if y is None or y.shape != x.shape:
        return None
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return next(((eps, offset) for offset in (0.0, 1.0) if _is_close(y, normed * (weight + offset))), None)


def _tried(compute: Callable[[], Any]) -> Tensor | None:
    """What a module makes of one tensor; None if it takes other things."""
    try:
        with torch.inference_mode():
            y = compute()
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
        return None
    return y if isinstance(y, Tensor) else None


def _is_close(y: Tensor, expected: Tensor) -> bool:
    return bool((y - expected).abs().max() <= _CLOSE * expected.abs().max())
