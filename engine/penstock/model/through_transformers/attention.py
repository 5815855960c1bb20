"""Attention of transformers' modules through our kernels. transformers calls a registered function with q, k
and v, which hands them to the desk of the module. A second registered function stands for the mask: a mask
only tells which keys a query sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.errors import UnsupportedModel
from penstock.model.through_transformers.own_functions import ours

#: The name of our attention in transformers' registries.
NAME = "penstock"
#: The name of sinks among the keyword arguments of attention.
SINKS = "s_aux"
#: Keyword arguments of attention that change nothing here: training's, the cache's, and what was used before.
_IDLE = {
    "dropout", "position_ids", "cache_position", "position_embeddings", "past_key_values", "cache",
    "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
    "training", "layer_idx", "rope_deltas",
}  # fmt: skip


@dataclass(frozen=True)
class KeyRule:
    """What stands in the place of a mask: which keys a query sees."""

    #: (batch index, head index, query positions, key positions) -> bool, as masking_utils.py has it.
    sees: Callable[..., Any]

    def __getitem__(self, index: object) -> Tensor:
        raise UnsupportedModel("its modules compute with the mask, and there is none here")

    def window(self, length: int) -> int:
        """The number of last keys that every query of a text of `length` tokens sees; 0 for all keys. Raises
        UnsupportedModel for any other rule."""
        keys = torch.arange(length)
        counts = set()
        for query in {length - 1, length - 2, length // 2, 3 * length // 4}:
            seen = self._seen(query, keys)
            count = int(seen.sum())
            if not torch.equal(seen, (keys <= query) & (keys > query - count)):
                raise UnsupportedModel("its attention sees other keys than all before or a window of them")
            counts.add(0 if count == query + 1 else count)
        if len(counts - {0}) > 1 or (0 in counts and min(counts - {0}, default=length) < length // 2 - 1):
            raise UnsupportedModel("its attention's window differs from token to token (chunks)")
        return max(counts)

    def _seen(self, query: int, keys: Tensor) -> Tensor:
        zero = torch.tensor(0)
        seen = self.sees(zero, zero, torch.tensor(query), keys)
        return torch.as_tensor(seen).expand(keys.shape)


@dataclass(frozen=True)
class LayerAttention:
    """What a layer's one attention computes."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int
    softcap: float

    @property
    def head_dim(self) -> int:
        """Keys and values are stored with equal widths."""
        return max(self.key_dim, self.value_dim)


class Attending(Protocol):
    """Who computes attention for a module."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: Mapping[str, Any]) -> Tensor:
        """q [1, num_heads, num_tokens, key_dim], k and v alike -> [1, num_tokens, num_heads, value_dim]."""


def register() -> None:
    """Make the name known to transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)


@ours
def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    desk: Attending = module.desk  # type: ignore[assignment]
    return desk.attend(query, key, value, attention_mask, options), None


def _mask(*, mask_function: Callable[..., Any], **options: Any) -> KeyRule:
    return KeyRule(mask_function)


def sinks_of(options: Mapping[str, Any]) -> Tensor | None:
    """AttentionSpec.sinks"""
    found = options.get(SINKS)
    return found if isinstance(found, Tensor) else None


def read_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, options: Mapping[str, Any], length: int
) -> LayerAttention:
    """What a call of attention asks for. `length` is the longest text. Raises UnsupportedModel for what our
    kernels don't compute."""
    known = {"scaling", "sliding_window", "softcap", "is_causal"}
    if (sinks := sinks_of(options)) is not None and sinks.shape == (q.shape[1],):
        known.add(SINKS)
    others = sorted(
        name for name, value in options.items() if name not in _IDLE | known and isinstance(value, Tensor)
    )
    if others:
        raise UnsupportedModel(f"its attention takes {', '.join(others)}, which our attention lacks")
    if options.get("is_causal") is False:
        raise UnsupportedModel("its attention sees later tokens")
    if mask is None:
        window = int(options.get("sliding_window") or 0)
    elif isinstance(mask, KeyRule):
        window = mask.window(length)
    else:
        raise UnsupportedModel(f"its attention takes a mask of its own ({type(mask).__name__})")
    scale = options.get("scaling")
    return LayerAttention(
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        key_dim=q.shape[3],
        value_dim=v.shape[3],
        scale=float(q.shape[3] ** -0.5 if scale is None else scale),
        window=window if window < length else 0,
        softcap=float(options.get("softcap") or 0),
    )
