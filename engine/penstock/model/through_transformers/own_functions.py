"""OwnFunctions: torch's functions in transformers' modules, computed so that a number depends on its own
token alone.

Torch computes most of an elementwise function with vectors and the rest, some numbers at the end, one by one:
sigmoid, silu, softplus and others then differ in the last bit. So the same row has other bits with another
number of rows beside it. Sums and products of matrices take another order with another number of rows. While
modules compute, each call of such a function comes here:

- Elementwise functions get whole vectors: the numbers are cut into pieces that no thread shares, and the last
  piece is padded.
- Sums add halves to halves, in one order for each length.
- Products with a matrix go row by row, by our kernels.

A function that is not known here is not ours: the guard sees it (watching()), and says that the model is not
batch invariant. Our own kernels are called through ours(), so that nothing in them comes here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from penstock.kernels import Kernels
from penstock.model.through_transformers.watch import Watch

P = ParamSpec("P")
R = TypeVar("R")

#: Elementwise functions whose vectors round otherwise than their single numbers, on some processor at least.
#: What is not here consists of operations that IEEE 754 rounds, or is seen by the guard.
ELEMENTWISE = frozenset({
    "__pow__", "__rpow__", "acosh", "asinh", "atan2", "atanh", "celu", "cos", "cosh", "elu", "erf",
    "erfc", "exp", "exp2", "expit", "expm1", "gelu", "log", "log10", "log1p", "log2", "logaddexp",
    "logsigmoid", "mish", "pow", "rsqrt", "selu", "sigmoid", "silu", "sin", "sinh", "softplus",
    "special_expit", "tan", "tanh",
})  # fmt: skip
#: The numbers of a piece are whole vectors of any processor, and fewer than torch gives to several threads.
PIECE, VECTORS = 1 << 14, 64
SUMS = frozenset({"sum", "mean"})
PRODUCTS = frozenset({"linear", "matmul", "mm", "__matmul__", "__rmatmul__"})


class OwnFunctions(TorchFunctionMode):
    """Entered around calls of transformers' modules."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self._kernels = kernels
        self._watch: Watch | None = None

    @contextmanager
    def watching(self) -> Iterator[set[str]]:
        """Notes operations of torch that may depend on other tokens: their names are in the set."""
        self._watch = Watch()
        try:
            yield self._watch.found
        finally:
            self._watch = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        is_in_place = (name.endswith("_") and not name.endswith("__")) or bool(kwargs.get("inplace"))
        own = self._own(name if name.endswith("__") else name.removesuffix("_"))
        if own is not None and "out" not in kwargs:
            made = own(func, args, {key: value for key, value in kwargs.items() if key != "inplace"})
            if made is not None:
                return args[0].copy_(made) if is_in_place else made
        if self._watch is None:
            return func(*args, **kwargs)
        with self._watch:
            return func(*args, **kwargs)

    def _own(self, name: str) -> Callable[..., Tensor | None] | None:
        """What computes a function of this name in torch's place."""
        if name in ELEMENTWISE:
            return _elementwise
        if name in SUMS:
            return _sum
        return self._product if name in PRODUCTS else None

    def _product(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """x W^T + b, where W has two dimensions."""
        named = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        if func.__name__ != "linear":
            pair = args[::-1] if func.__name__ == "__rmatmul__" else (*args, *kwargs.values())
            if len(pair) != 2 or pair[1].dim() != 2:
                return None
            named = {"input": pair[0], "weight": pair[1].t()}
        x, weight, bias = named["input"], named["weight"], named.get("bias")
        if weight.dim() != 2 or any(each.dtype != torch.float32 for each in (x, weight)):
            return None
        if x.shape[-1:] != weight.shape[1:] or not weight.shape[1]:  # torch's error, or its zeros
            return None
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        scores = self._kernels.router_scores(rows, weight.contiguous(), bias, "none")
        return scores.view(*x.shape[:-1], weight.shape[0])


def ours(function: Callable[P, R]) -> Callable[P, R]:
    """A function of ours that modules call: nothing in it is replaced."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call


def _elementwise(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The function of whole vectors. On a card all numbers are computed alike, and a single number is always
    alone."""
    if any(isinstance(each, Tensor) for each in kwargs.values()):
        return None
    many = {at: each for at, each in enumerate(args) if isinstance(each, Tensor) and each.dim()}
    if not many or not all(each.device.type == "cpu" for each in many.values()):
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    shape: torch.Size = torch.broadcast_shapes(*(each.shape for each in many.values()))  # type: ignore[no-untyped-call]
    whole = {at: _padded(each.expand(shape)) for at, each in many.items()}
    count, size = shape.numel(), len(next(iter(whole.values())))
    pieces = []
    for first in range(0, size, PIECE):
        own = [whole[at][first : first + PIECE] if at in whole else each for at, each in enumerate(args)]
        pieces.append(func(*own, **kwargs))
    made = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return made[:count].view(shape)


def _padded(x: Tensor) -> Tensor:
    """All numbers side by side, and ones after them up to whole vectors."""
    count = max(1, x.numel())
    whole = x.new_ones(-(-count // VECTORS) * VECTORS)
    whole[: x.numel()].view(x.shape).copy_(x)
    return whole


def _sum(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Halves are added to halves until one number is left."""
    named = dict(zip(("input", "dim", "keepdim"), args, strict=False)) | kwargs
    x, dim, dtype = named["input"], named.get("dim"), named.get("dtype")
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    # To torch, no dimension means all of them, which the guard has to see.
    if not isinstance(x, Tensor) or not x.dim() or not dims or not (dtype or x.dtype).is_floating_point:
        return None
    dims = sorted(each % x.dim() if -x.dim() <= each < x.dim() else -1 for each in dims)
    if dims[0] < 0 or len(set(dims)) < len(dims):  # torch's error
        return None
    kept = [each for each in range(x.dim()) if each not in dims]
    count = 1
    rows = x.permute(*kept, *dims).to(dtype or x.dtype)
    for each in dims:
        count *= x.shape[each]
    rows = rows.reshape(*(x.shape[each] for each in kept), count)
    while rows.shape[-1] > 1:
        half = rows.shape[-1] // 2
        folded = rows[..., :half] + rows[..., half : 2 * half]
        rows = torch.cat((folded, rows[..., 2 * half :]), -1) if rows.shape[-1] % 2 else folded
    made = rows[..., 0] if count else rows.new_zeros(rows.shape[:-1])
    if func.__name__ == "mean":
        made = made / count
    if not named.get("keepdim"):
        return made
    return made.view([1 if each in dims else size for each, size in enumerate(x.shape)])
