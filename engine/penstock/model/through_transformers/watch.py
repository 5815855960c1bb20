"""Watch: sees the operations that torch carries out, and knows which of them give each token the same bits in
any company.

An operation counts as safe if it moves numbers, chooses among them, or rounds each one by itself as IEEE 754
says; or if its results belong to rows that torch goes through one by one. Everything else is unknown: what a
later torch or another processor makes of it, no trial with a few texts can tell."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operations that make tensors of shapes and numbers, move elements, or look at them from elsewhere.
MOVES = frozenset({
    "_local_scalar_dense", "_reshape_alias", "_to_copy", "_unsafe_view", "alias", "alias_copy", "arange",
    "as_strided", "broadcast_tensors", "cat", "clone", "constant_pad_nd", "copy", "detach", "diagonal",
    "embedding", "empty", "empty_like", "empty_strided", "expand", "expand_copy", "fill", "flip", "full",
    "full_like", "gather", "index", "index_select", "item", "lift_fresh", "masked_fill", "masked_scatter",
    "masked_select", "narrow", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros",
    "nonzero", "ones", "ones_like", "permute", "repeat", "repeat_interleave", "roll", "scalar_tensor",
    "scatter", "select", "select_scatter", "slice", "slice_scatter", "split", "split_with_sizes",
    "squeeze", "stack", "sym_numel", "sym_size", "sym_stride", "t", "transpose", "tril", "triu", "unbind",
    "unfold", "unsafe_split", "unsqueeze", "view", "where", "zero", "zeros", "zeros_like",
})  # fmt: skip
#: Operations whose every number is rounded once, or not at all.
ROUNDED = frozenset({
    "abs", "add", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "clamp", "clamp_max",
    "clamp_min", "div", "eq", "floor", "floor_divide", "fmod", "ge", "gt", "hardtanh", "isfinite",
    "isinf", "isnan", "le", "leaky_relu", "logical_and", "logical_not", "logical_or", "logical_xor", "lt",
    "maximum", "minimum", "mul", "nan_to_num", "ne", "neg", "reciprocal", "relu", "remainder", "round",
    "rsub", "sign", "sqrt", "square", "sub", "threshold", "trunc",
})  # fmt: skip
#: Operations along the last dimension, in which no other row takes part.
ALONG_ROWS = frozenset({
    "_log_softmax", "_softmax", "amax", "amin", "argmax", "argmin", "argsort", "max", "min", "sort",
    "topk",
})  # fmt: skip


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the names of operations that are not known to be safe."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_safe(func, args, kwargs):
            with self:
                made = func.decompose(*args, **kwargs)  # an operation that consists of others
            if made is not NotImplemented:
                return made
            self.found.add(func.overloadpacket.__name__)
        return func(*args, **kwargs)


def _is_safe(func: Any, args: Any, kwargs: Any) -> bool:
    name = func.overloadpacket.__name__.removesuffix("_")
    named = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
    if not _has_floats((args, kwargs)):
        return True
    if name in MOVES:
        return named.get("reduce") is None  # scatter() can add and multiply
    if name == "index_put":
        return not named.get("accumulate")
    if name in ROUNDED:
        return named.get("alpha", 1) in (1, -1)
    if name in ALONG_ROWS:
        return _is_last(named)
    if name == "native_layer_norm":
        return True
    return name in ("bmm", "mm") and args[0].shape[-1] == 1  # products of single numbers


def _has_floats(values: Any) -> bool:
    """Whether a tensor of floating point, or the number that one becomes, takes part. Integers are exact."""
    return any(
        each.is_floating_point() if isinstance(each, torch.Tensor) else isinstance(each, torch.dtype | float)
        for each in tree_leaves(values)
    )


def _is_last(named: dict[str, Any]) -> bool:
    """Whether an operation goes along the last dimension."""
    x, dim = named["self"], named.get("dim", -1 if "k" in named or "descending" in named else None)
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    return bool(dims) and all(each % max(1, x.dim()) == x.dim() - 1 for each in dims)
