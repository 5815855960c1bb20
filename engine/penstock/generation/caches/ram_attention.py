"""RamAttention: which keys in RAM a step's tokens meet there, and not in the card's memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.kernels import AttentionSpec, BatchLayout, LayerKV, RamKV, RamSplits
from penstock.memory.kv_spill.spilled_cache import SpilledKVCache
from penstock.memory.kv_spill.splits_in_ram import SPLIT_KEYS, AttendsInRam, splits_in_ram
from penstock.spec import ModelSpec


@dataclass(frozen=True)
class ChosenSplits:
    """What the processor attends to in the layers with one view of the past."""

    #: Entries of block_tables: bool [num_seqs, max_blocks].
    is_in_ram: Tensor
    splits: RamSplits
    #: The same where the layers are computed, and RamKV's parts.
    is_in_ram_there: Tensor
    tokens: Tensor
    numbers: Tensor


class Attended(dict[AttentionSpec, ChosenSplits]):
    """By the views of layers that have such splits in a step."""


class RamAttention:
    def __init__(self, cache: SpilledKVCache, spec: ModelSpec, beside: AttendsInRam) -> None:
        """The cache has its spilled blocks in RAM."""
        self._cache, self._beside = cache, beside
        self._layers = list[LayerKV]()
        for index in range(spec.num_layers):
            parts = cache.parts_in_ram(index)
            assert parts is not None, "a plan attends to what lies in RAM"
            self._layers.append(LayerKV(cache.layout, parts))

    def choose(self, layout: BatchLayout, views: Iterable[AttentionSpec], written: list[int]) -> Attended:
        """`layout` is on the host."""
        cache, found = self._cache, Attended()
        num_splits = -(-layout.block_tables.shape[1] * cache.block_size // SPLIT_KEYS)
        room = self._beside.room(layout.num_tokens, num_splits)
        if not room or layout.prefix_lens is not None or layout.cross is not None:
            return found
        for view in views:
            chosen = self._choose(layout, view, frozenset(written), room)
            if chosen is not None:
                found[view] = chosen
        return found

    def _choose(
        self, layout: BatchLayout, view: AttentionSpec, written: frozenset[int], room: int
    ) -> ChosenSplits | None:
        cache, size = self._cache, SPLIT_KEYS // self._cache.block_size
        starts, tables = layout.query_start.tolist(), layout.block_tables.tolist()
        pasts = (layout.context_lens - layout.query_start.diff()).tolist()
        candidates = [
            (seq, split)
            for seq, (table, past) in enumerate(zip(tables, pasts, strict=True))
            for split in splits_in_ram(
                table, past, view.first_seen(past), cache.block_size, cache.num_resident, written
            )
        ]
        is_in_ram = torch.zeros(layout.block_tables.shape, dtype=torch.bool)
        items, blocks = list[tuple[int, int, int, int]](), list[list[int]]()
        for seq, split in candidates[: self._beside.num_asked(len(candidates))]:
            first, end = starts[seq], starts[seq + 1]
            if len(items) + end - first > room:
                break
            is_in_ram[seq, split * size : (split + 1) * size] = True
            of_split = [
                block - cache.num_resident for block in tables[seq][split * size : (split + 1) * size]
            ]
            for token in range(first, end):
                items.append((token, pasts[seq] + token - first, split, len(items)))
                blocks.append(of_split)
        if not items:
            return None
        device, numbers = cache.parts[0].device, torch.tensor(items, dtype=torch.int32)
        num_places = -(-len(items) // layout.num_tokens) * layout.num_tokens
        return ChosenSplits(
            is_in_ram,
            RamSplits(numbers, torch.tensor(blocks, dtype=torch.int32), num_places),
            is_in_ram.to(device),
            numbers[:, 0].long().to(device),
            numbers[:, 2].long().to(device),
        )

    def in_layer(self, index: int, layout: BatchLayout, chosen: ChosenSplits) -> BatchLayout:
        """The layout of a layer, without blocks where the processor attends."""
        in_ram = RamKV(self._layers[index], chosen.splits, chosen.tokens, chosen.numbers)
        tables = layout.block_tables.masked_fill(chosen.is_in_ram_there, -1)
        return replace(layout, block_tables=tables, in_ram=in_ram)
