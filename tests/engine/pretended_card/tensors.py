"""CardTensor: says that it is on a card, and holds its elements in the memory of the host.

Operations unwrap it, run on the CPU and wrap what comes out. What a card refuses (operands on two devices) is
refused, and what nothing has written looks like it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pretended_card.card import PretendedCard

aten = torch.ops.aten
#: They take indices that are on the host.
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}
#: They leave memory as they found it.
UNINITIALIZED = {
    aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default,
}  # fmt: skip
GARBAGE = 0x55
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class CardTensor(Tensor):
    inner: Tensor
    card: PretendedCard

    @staticmethod
    def __new__(cls, inner: Tensor, card: PretendedCard) -> CardTensor:
        # An inference tensor could not be written to outside of inference mode.
        with torch.inference_mode(False):
            tensor = Tensor._make_wrapper_subclass(
                cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
                dtype=inner.dtype, device=card.device,
            )  # fmt: skip
        tensor.inner, tensor.card = inner, card
        return tensor

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda device type tensor to numpy")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"CardTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function._can_decompose() and function.has_kernel_for_dispatch_key(_COMPOSITE):
            return function.decompose(*args, **kwargs)
        card = next(leaf.card for leaf in _tensors(args, kwargs) if isinstance(leaf, cls))
        if function is aten.copy_.default:
            return _copy(card, *args, **kwargs)
        if function is aten._to_copy.default and not _is_card(kwargs.get("device", card.device)):
            return _to_host(card, *args, **kwargs)
        return _compute(card, function, args, kwargs)


def blank(inner: Tensor) -> Tensor:
    """As memory is that nobody has written."""
    if inner.is_floating_point():
        return inner.fill_(float("nan"))
    return inner if inner.dtype == torch.bool else inner.fill_(GARBAGE)


def _compute(card: PretendedCard, function: Any, args: Any, kwargs: Any) -> Any:
    operands = list(_tensors(args, kwargs))
    checked = [args[0]] if function in INDEXING else operands
    # Numbers travel as tensors without dimensions.
    at_home = [
        tuple(tensor.shape) for tensor in checked if tensor.dim() and not isinstance(tensor, CardTensor)
    ]
    if at_home:
        raise RuntimeError(
            f"{function}: expected all tensors to be on the same device, but found at least two devices, "
            f"{card.device} and cpu (of shape {at_home})"
        )
    # Making a view touches nothing.
    if not function.is_view and function not in UNINITIALIZED:
        card.on_use(
            [tensor.data_ptr() for tensor in operands if isinstance(tensor, CardTensor)], str(function)
        )
    if function is aten._local_scalar_dense.default:
        card.wait_for_host("a number")
    if "device" in kwargs:
        card.check_own(kwargs["device"] or card.device, str(function))
        kwargs = kwargs | {"device": torch.device("cpu")}
    result = function(*_unwrapped(args), **_unwrapped(kwargs))
    if function in UNINITIALIZED:
        blank(result)
    given = {id(tensor.inner): tensor for tensor in operands if isinstance(tensor, CardTensor)}
    return _mapped(lambda value: given[id(value)] if id(value) in given else card.wrap(value), result)


def _copy(card: PretendedCard, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """copy_() over the link, or within the card."""
    if not isinstance(target, CardTensor):
        assert isinstance(source, CardTensor)
        if non_blocking and not card.current_stream.of_card().is_default:
            return card.enqueue_copy_to_host(source, target)
        return target.copy_(_to_host(card, source, non_blocking=non_blocking))
    if isinstance(source, CardTensor):
        card.on_use([source.data_ptr(), target.data_ptr()], "a copy within the card")
        target.inner.copy_(source.inner)
        return target
    if not (non_blocking and card.is_pinned(source)):
        source = source.clone()  # staged: it may change as soon as this returns
    card.enqueue_copy(source, target)
    return target


def _to_host(card: PretendedCard, source: Tensor, **kwargs: Any) -> Tensor:
    assert not kwargs.pop("non_blocking", False), "a copy to the host that is not waited for is not modelled"
    card.on_use([source.data_ptr()], "a copy to the host")
    card.wait_for_host("a copy")
    result: Tensor = aten._to_copy.default(_unwrapped(source), **kwargs)
    return result


def _unwrapped(values: Any) -> Any:
    return _mapped(lambda value: value.inner if isinstance(value, CardTensor) else value, values)


def _mapped(function: Callable[[Any], Any], values: Any) -> Any:
    """Of each value in tuples, lists and dicts. (Torch's tree_map() makes cycles, which hold tensors.)"""
    if isinstance(values, dict):
        return {name: _mapped(function, value) for name, value in values.items()}
    if isinstance(values, tuple | list):
        return type(values)(_mapped(function, value) for value in values)
    return function(values)


def _tensors(*values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list | dict):
            yield from _tensors(*(value.values() if isinstance(value, dict) else value))


def _is_card(device: Any) -> bool:
    return torch.device(device).type == "cuda"
