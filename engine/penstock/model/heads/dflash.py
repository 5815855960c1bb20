"""DFlash: a head that was trained beside a model, comes in a folder of its own and guesses a block of tokens
in one pass (arXiv 2602.06036), with Qwen3's layers, as z-lab publishes it.

Two kinds of rows pass through it. A token that stands has a context row: a projection (`fc`) of the model's
hidden states after some layers, after `hidden_norm`. It is the same in each layer, which makes a key and a
value of it and no more. The last rows of a sequence are its block: the embeddings of its last token, whose
hidden states nobody knows yet, and of the mask token. Each of them sees all context rows and the whole block.
The row of the n-th mask guesses the n-th token after the last one. Embedding and head are the model's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.errors import UnsupportedModel
from penstock.kernels import BatchLayout, LayerKV
from penstock.model.architecture import linear_tensors
from penstock.model.config_values import count, refuse
from penstock.model.families.llama import Qwen3
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.known_families import DFLASH
from penstock.spec import ModelSpec
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec

#: Modules that DFlash 2 has beside those of DFlash.
_SECOND = ("attention_conv.", "mlp_conv.", "candidate_selector.")


@dataclass(frozen=True, kw_only=True)
class DFlashSpec(LlamaSpec):
    """hidden_size and vocab_size are the model's, too."""

    #: Rows of a block, of which one is that of a token that stands.
    block_size: int
    mask_token: int
    #: The layers of the model after which hidden states are read, from 0. (): those of layers_of().
    target_layers: tuple[int, ...] = ()
    #: Layers of the model that the head was trained for; 0: config.json does not tell.
    num_target_layers: int = 0

    @property
    def num_guesses(self) -> int:
        """Guesses that one pass makes."""
        return self.block_size - 1

    @property
    def num_states(self) -> int:
        """Layers of the model whose hidden states are read."""
        return len(self.target_layers) or self.num_layers

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The layers that are read of a model with so many: without a word as many as the head has layers,
        evenly from the second to the fourth from the end. Raises UnsupportedModel for another number of
        layers than the head was trained for, and for layers that the model has not."""
        layers, most = self.target_layers, self.num_states - 1
        if not layers and most:
            layers = tuple(round(1 + index * (num_layers - 4) / most) for index in range(most + 1))
        layers = layers or (num_layers // 2,)
        is_there = all(0 <= layer < num_layers for layer in layers) and sorted(set(layers)) == list(layers)
        if not is_there or self.num_target_layers not in (0, num_layers):
            made_for = f", and was made for {self.num_target_layers}" if self.num_target_layers else ""
            raise UnsupportedModel(
                f"the DFlash head reads the hidden states after layers {', '.join(map(str, layers))} "
                f"(counted from 0){made_for}; the model has {num_layers}: take the head that was made for it"
            )
        return layers


class DFlash(Qwen3):
    """Swept as other models are. Context rows are `given`; the last rows of each sequence, as many as a block
    has, are the block."""

    architectures = (DFLASH,)
    spec: DFlashSpec
    #: The last step's batch, and what _split() made of it.
    _last: tuple[BatchLayout, tuple[BatchLayout, Tensor]] | None = None

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> DFlashSpec:
        told = config.get("dflash_config") or {}
        if not isinstance(told, dict):
            refuse("dflash_config", told, "an object")
        base = super().read_spec(config)
        block_size = count(config if "block_size" in config else told, "block_size")
        if not 2 <= block_size <= 64:
            refuse("block_size", block_size, "at least 2 and at most 64")
        mask = told.get("mask_token_id", config.get("mask_token_id"))
        if type(mask) is not int or not 0 <= mask < base.vocab_size:
            refuse("mask_token_id", mask, f"a token below {base.vocab_size}")
        layers = told.get("target_layer_ids", config.get("target_layer_ids"))
        if layers is not None and not (
            isinstance(layers, list) and layers and all(type(layer) is int for layer in layers)
        ):
            refuse("target_layer_ids", layers, "whole numbers")
        num_layers = config.get("num_target_layers")
        return DFlashSpec(
            **vars(replace(base, is_tied=False)),
            block_size=block_size,
            mask_token=mask,
            target_layers=tuple(layers or ()),
            num_target_layers=0 if num_layers is None else count(config, "num_target_layers"),
        )

    @classmethod
    def check_tensors(cls, names: Iterable[str]) -> None:
        """Raises UnsupportedModel if tensors of these names are those of a DFlash 2 head."""
        second = next((name for name in names if any(part in name for part in _SECOND)), None)
        if second is not None:
            raise UnsupportedModel(
                f"{second} is a tensor of a DFlash 2 head, which Penstock does not compute yet: take a "
                "DFlash head of the same model, the model's own head (--mtp on), or a small draft model"
            )

    @classmethod
    def embedding_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, DFlashSpec)
        shape = (spec.hidden_size, spec.num_states * spec.hidden_size)
        condense = linear_tensors("condense", shape, ("model.fc",), has_bias=False)
        norm = spec.norm.tensors("hidden_norm", (spec.hidden_size,), "model.hidden_norm")
        return *super().embedding_tensors(spec), *condense, *norm

    def condense(self, weights: LayerWeights, states: Tensor) -> Tensor:
        """The model's hidden states after some layers, float32 [num_tokens, num_states * hidden_size], as
        context rows [num_tokens, hidden_size], both on the host."""
        kernels = self.host_kernels
        joined = kernels.linear(states, weights.matrix("condense"), None)
        return self.spec.norm.apply(kernels, weights, "hidden_norm", joined, self.spec.norm_eps)

    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        """Context rows stay as they are. Keys and values of all rows are written; those of a block are
        written over when the next rows come."""
        batch, rows = self._split(batch)
        block = hidden[rows]
        x = hidden.index_copy(0, rows, self._norm("input_norm", weights, block))
        block = block + self.attention(index, weights, x, kv, batch)[rows]
        block = block + self.mlp(index, weights, self._norm("post_norm", weights, block))
        return hidden.index_copy(0, rows, block)

    def _split(self, batch: BatchLayout) -> tuple[BatchLayout, Tensor]:
        """The batch in which each row sees all keys of its sequence, and the numbers of the blocks' rows. All
        layers of a step ask for the same batch."""
        if self._last is None or self._last[0] is not batch:
            starts = batch.query_start.tolist()
            rows = [
                row
                for start, end in zip(starts, starts[1:], strict=False)
                for row in range(max(start, end - self.spec.block_size), end)
            ]
            seen = replace(batch, prefix_lens=batch.context_lens)
            self._last = batch, (seen, torch.tensor(rows, device=batch.positions.device))
        return self._last[1]
