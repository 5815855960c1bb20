"""RamAttention: which keys in RAM a step's tokens meet there, and not in the card's memory."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.kernels import AttentionSpec, BatchLayout, LayerKV, RamKV, RamSplits
from penstock.memory.planning.splits_in_ram import SPLIT_KEYS, AttendsInRam, SpilledKeys, splits_in_ram
from penstock.spec import ModelSpec

if TYPE_CHECKING:
    from penstock.cache.spill.spilled_cache import SpilledKVCache

#: The blocks of a sequence, and how many of its tokens are computed.
Past = tuple[Sequence[int], int]


@dataclass(frozen=True)
class ChosenSplits:
    """What the processor attends to in the layers with one view of the past."""

    #: Entries of block_tables: bool [num_seqs, max_blocks], and how many these are.
    is_in_ram: Tensor
    num_blocks: int
    splits: RamSplits
    #: is_in_ram, and the tokens and the numbers of RamKV: on the host, or where the layers are computed.
    tables: tuple[Tensor, Tensor, Tensor]


class Attended(dict[AttentionSpec, ChosenSplits]):
    """By the views of layers that have such splits in a step."""

    def with_tables(self, others: Iterator[Tensor]) -> Attended:
        """The same with others in place of all tables, in their order."""
        return Attended(
            (view, replace(chosen, tables=(next(others), next(others), next(others))))
            for view, chosen in self.items()
        )


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
        candidates = self._candidates(zip(tables, pasts, strict=True), view, written)
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
        numbers = torch.tensor(items, dtype=torch.int32)
        num_places = -(-len(items) // layout.num_tokens) * layout.num_tokens
        return ChosenSplits(
            is_in_ram,
            int(is_in_ram.sum()),
            RamSplits(numbers, torch.tensor(blocks, dtype=torch.int32), num_places),
            (is_in_ram, numbers[:, 0].long(), numbers[:, 2].long()),
        )

    def _candidates(
        self, pasts: Iterable[Past], view: AttentionSpec, written: Container[int]
    ) -> list[tuple[int, int]]:
        """The splits to which the processor may attend, and their sequences."""
        size, first = self._cache.block_size, self._cache.num_resident
        return [
            (seq, split)
            for seq, (table, past) in enumerate(pasts)
            for split in splits_in_ram(table, past, view.first_seen(past), size, first, written)
        ]

    def expected(
        self, num_bytes: int, pasts: Sequence[Past], num_layers: Mapping[AttentionSpec, int]
    ) -> SpilledKeys:
        """What LayerCaches.expected() says. `num_bytes` are read and written if the card attends to all;
        `num_layers`: how many layers have a view."""
        size = self._cache.block_size
        split_bytes = SPLIT_KEYS // size * self._cache.layer_block_bytes
        splits = tuple(
            (len(self._candidates(pasts, view, ())), number * split_bytes)
            for view, number in num_layers.items()
        )
        longest = max((len(table) for table, _ in pasts), default=0)
        return SpilledKeys(num_bytes, self._beside, splits, len(pasts), -(-longest * size // SPLIT_KEYS))

    def in_layer(self, index: int, layout: BatchLayout, chosen: ChosenSplits) -> BatchLayout:
        """The layout of a layer, without blocks where the processor attends."""
        self._cache.stats.attended_bytes += chosen.num_blocks * self._cache.layer_block_bytes
        is_in_ram, tokens, numbers = chosen.tables
        in_ram = RamKV(self._layers[index], chosen.splits, tokens, numbers)
        tables = layout.block_tables.masked_fill(is_in_ram, -1)
        return replace(layout, block_tables=tables, in_ram=in_ram)
