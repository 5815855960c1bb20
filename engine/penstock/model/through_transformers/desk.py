"""Desk: what the modules of a layer work with while the layer is computed. A desk is handed to the modules
once; the family lays the layer's weights, keys and values on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.kernels import AttentionSpec, BatchLayout, Kernels, LayerKV, Routed
from penstock.model.mixture.mixture import blend, one_by_one
from penstock.model.through_transformers.attention import LayerAttention, sinks_of
from penstock.model.through_transformers.experts import activated
from penstock.model.through_transformers.own_functions import OwnFunctions
from penstock.weights.layer_weights import LayerWeights


@dataclass(frozen=True)
class LayerStep:
    """One layer in one step: where attention writes and reads."""

    kv: LayerKV
    batch: BatchLayout
    attention: LayerAttention
    spec: AttentionSpec


class Desk:
    """For the modules of one model."""

    def __init__(
        self,
        kernels: Kernels,
        project: Callable[[LayerWeights, str, Tensor], Tensor],
        head_dim: int,
        num_kv_heads: int,
    ) -> None:
        """`project` is Family.project(). Keys and values have `num_kv_heads` heads of `head_dim` numbers in
        the cache, of which a layer may use fewer."""
        self.kernels = kernels
        #: Entered wherever modules compute.
        self.functions = OwnFunctions(kernels)
        self.weights = LayerWeights({})
        #: Output channels of matrices that nobody has laid on the desk: their products are zero.
        self.absent: Mapping[str, int] = {}
        self.step: LayerStep | None = None
        self._project = project
        self._head_dim, self._num_kv_heads = head_dim, num_kv_heads

    def project(self, name: str, x: Tensor) -> Tensor:
        """Family.project() with the weights on the desk."""
        if name in self.absent:
            return x.new_zeros(x.shape[0], self.absent[name])
        return self._project(self.weights, name, x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: Mapping[str, Any]) -> Tensor:
        """Attending.attend() of the layer on the desk. What `options` say is known since the model was
        opened."""
        step = self.step
        assert step is not None, "attention outside of a layer"
        facts = step.attention
        sinks, spec = sinks_of(options), step.spec
        if sinks is not None:
            spec = replace(spec, sinks=sinks.float().contiguous())
        repeats = self._num_kv_heads // facts.num_kv_heads
        step.batch.write_kv(self.kernels, self._stored(k, repeats), self._stored(v, repeats), step.kv)
        mixed = self.kernels.paged_attention(self._stored(q), step.kv, step.batch, spec)
        heads = mixed.view(1, -1, facts.num_heads, self._head_dim)
        return heads if facts.value_dim == self._head_dim else heads[..., : facts.value_dim].contiguous()

    def mix(self, module: nn.Module, x: Tensor, experts: Tensor, scores: Tensor) -> Tensor:
        """Mixing.mix() with the experts of the layer on the desk."""

        def compute(expert: LayerWeights, rows: Tensor) -> Tensor:
            gate_up = self._project(expert, "gate_up", rows)
            with self.functions:
                inner = activated(module, gate_up)
            return self._project(expert, "down", inner)

        return blend(self.kernels, self.weights, x, Routed(experts, scores), one_by_one(compute))

    def own(self, shapes: Iterable[str]) -> dict[str, Tensor]:
        """What transformers' own modules take of the weights on the desk."""
        return {name: self.weights.vector(name) for name in shapes}

    def _stored(self, x: Tensor, repeats: int = 1) -> Tensor:
        """[1, num_heads, num_tokens, width] as [num_tokens, num_heads * repeats, head_dim]. Zeros after
        shorter rows add nothing to a score."""
        rows = x[0].transpose(0, 1)
        if rows.shape[2] < self._head_dim:
            rows = torch.nn.functional.pad(rows, (0, self._head_dim - rows.shape[2]))
        if repeats > 1:
            rows = rows.repeat_interleave(repeats, 1)
        return rows.contiguous()
