"""LayerCaches: what each layer of a sweep gets of the KV cache, and which rows its tokens have there.

A cache that is all in memory has tensors for each layer, and blocks keep their numbers. Of a spilled cache,
layers get the same tensors, in which a block has another row in each layer; the layer's spilled blocks are
there when it begins, or the processor attends to them (ram_attention.py)."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.cache.kv_cache import KVCache
from penstock.generation.model_inputs import ModelInputs
from penstock.kernels import AttentionSpec, BatchLayout, LayerKV
from penstock.memory.lane import Inlet
from penstock.memory.planning.splits_in_ram import NOTHING_SPILLED, AttendsInRam, SpilledKeys
from penstock.spec import ModelSpec

if TYPE_CHECKING:
    from penstock.cache.spill.spilled_cache import SpilledKVCache, Turns
    from penstock.generation.ram_attention import Attended, ChosenSplits, Past, RamAttention

#: Bytes that are read in vain, rather than with a read of their own before and after them.
GAP_BYTES = 128 << 10

#: Pairs of blocks (source, destination).
Copies = Sequence[tuple[int, int]]


class KVSweep(Protocol):
    """The KV cache during one sweep."""

    def layer(self, index: int, layout: BatchLayout) -> AbstractContextManager[tuple[LayerKV, BatchLayout]]:
        """What a layer computes with: its keys and values, and the layout by whose blocks and slots it finds
        them. Raises CorruptFile."""

    def layers(self, indices: Sequence[int]) -> list[LayerKV] | None:
        """The keys and values of several layers at the same time, with the step's own layout; None: they come
        one by one."""


class LayerCaches(Protocol):
    """A KV cache as layers see it."""

    def sweep(self, inputs: ModelInputs) -> AbstractContextManager[KVSweep]:
        """A sweep of a step. Its copies of blocks are made before a layer writes."""

    def expected(self, pasts: Iterable[Past]) -> SpilledKeys:
        """What a step of sequences with these pasts has of spilled blocks, as far as can be known before the
        step."""


def layer_caches(
    cache: KVCache | SpilledKVCache, spec: ModelSpec, inlet: Inlet, beside: AttendsInRam | None = None
) -> LayerCaches:
    """Of either kind of cache. `inlet`: brings tables to where layers are computed. `beside`: how the
    processor attends to blocks in RAM, if it does."""
    return ResidentCaches(cache) if isinstance(cache, KVCache) else SpilledCaches(cache, spec, inlet, beside)


class ResidentCaches:
    """All blocks are in memory."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._layers = [
            LayerKV(cache.layout, *parts)
            for parts in zip(cache.layers, cache.states, cache.kept, cache.ahead, strict=True)
        ]

    @contextlib.contextmanager
    def sweep(self, inputs: ModelInputs) -> Generator[ResidentCaches, None, None]:
        self._cache.copy_blocks(inputs.block_copies)
        self._cache.copy_states(inputs.state_copies)
        yield self

    def layer(self, index: int, layout: BatchLayout) -> AbstractContextManager[tuple[LayerKV, BatchLayout]]:
        return contextlib.nullcontext((self._layers[index], layout))

    def layers(self, indices: Sequence[int]) -> list[LayerKV] | None:
        return [self._layers[index] for index in indices]

    def expected(self, pasts: Iterable[Past]) -> SpilledKeys:
        return NOTHING_SPILLED


class SpilledCaches:
    """Some blocks are in a file, or beside a card in the host's memory."""

    def __init__(
        self, cache: SpilledKVCache, spec: ModelSpec, inlet: Inlet, beside: AttendsInRam | None = None
    ) -> None:
        self._cache, self._inlet = cache, inlet
        self._beside: RamAttention | None = None
        if beside is not None:
            from penstock.generation.ram_attention import RamAttention

            self._beside = RamAttention(cache, spec, beside)
        self._kv = LayerKV(cache.layout, cache.parts)
        #: What a layer sees of the past.
        self._views = [
            AttentionSpec(1, 1.0, window=spec.sliding_window(index), chunk=spec.attention_chunk(index))
            for index in range(spec.num_layers)
        ]

    @contextlib.contextmanager
    def sweep(self, inputs: ModelInputs) -> Generator[KVSweep, None, None]:
        from penstock.generation.ram_attention import Attended

        cache, layout, copies = self._cache, inputs.layout, inputs.block_copies
        written, attended = _written(layout, copies, cache), Attended()
        if self._beside is not None:
            attended = self._beside.choose(layout, set(self._views), written)
        plan = _SpillPlan.of(layout, copies, cache, self._views, written, attended)
        rows = _Rows.of(layout, cache)
        # All tables come at once, and don't wait behind a layer's weights.
        tables = [table for chosen in attended.values() for table in chosen.tables]
        there = iter(self._inlet.bring([*rows.tensors(), *tables]))
        rows, attended = rows.with_tensors(there), attended.with_tables(there)
        sweep = _SpilledSweep(cache, self._kv, rows, copies, None, self._views, attended, self._beside)
        if not plan.writes and not any(plan.reads):
            yield sweep
            return
        with cache.turns(plan.reads, plan.writes) as turns:
            yield sweep._replace(turns=turns)
            turns.finish()

    def expected(self, pasts: Iterable[Past]) -> SpilledKeys:
        """Each block counts once for a layer, even if several sequences have it. Every sequence writes into
        the block of its next token."""
        first, size, pasts = self._cache.num_resident, self._cache.block_size, list(pasts)
        num_read = 0
        for view, num_layers in Counter(self._views).items():
            seen = {
                block
                for table, num_past in pasts
                for block in table[view.first_seen(num_past) // size : -(-num_past // size)]
            }
            num_read += num_layers * sum(block >= first for block in seen)
        next_blocks = {block for table, num_past in pasts for block in table[num_past // size :][:1]}
        num_written = len(self._views) * sum(block >= first for block in next_blocks)
        num_bytes = (num_read + num_written) * self._cache.layer_block_bytes
        if self._beside is None:
            return SpilledKeys(num_bytes)
        return self._beside.expected(num_bytes, pasts, Counter(self._views))


class _SpilledSweep(NamedTuple):
    cache: SpilledKVCache
    kv: LayerKV
    rows: _Rows
    copies: Copies
    turns: Turns | None
    views: Sequence[AttentionSpec]
    attended: Attended
    beside: RamAttention | None

    def layers(self, indices: Sequence[int]) -> list[LayerKV] | None:
        return None

    @contextlib.contextmanager
    def layer(self, index: int, layout: BatchLayout) -> Generator[tuple[LayerKV, BatchLayout], None, None]:
        if self.turns is not None:
            self.turns.begin(index)
        self.cache.copy_blocks(index, self.copies)
        rows = self.rows.in_layer(index, layout, self.cache)
        chosen = self.attended.get(self.views[index])
        if chosen is not None and self.beside is not None:
            rows = self.beside.in_layer(index, rows, chosen)
        yield self.kv, rows
        if self.turns is not None:
            self.turns.end(index)


class _SpillPlan(NamedTuple):
    """Which spilled blocks each layer reads, and which ones all layers write."""

    reads: list[tuple[range, ...]]
    writes: tuple[range, ...]

    @classmethod
    def of(
        cls,
        layout: BatchLayout,
        copies: Copies,
        cache: SpilledKVCache,
        views: Sequence[AttentionSpec],
        written: list[int],
        attended: Attended,
    ) -> _SpillPlan:
        from penstock.cache.spill.runs import runs

        first, size = cache.num_resident, cache.block_size
        gap = GAP_BYTES // cache.part_bytes
        sources = torch.tensor([source for source, _ in copies], dtype=torch.int64)
        of_view = {
            view: runs(_spilled([*_past_blocks(layout, view, size, attended.get(view)), sources], first), gap)
            for view in set(views)
        }
        return cls([of_view[view] for view in views], runs(written))


def _written(layout: BatchLayout, copies: Copies, cache: SpilledKVCache) -> list[int]:
    """The spilled blocks that every layer changes, in rising order."""
    targets = torch.tensor([target for _, target in copies], dtype=torch.int64)
    slots = [layout.slot_mapping]
    slots += [] if layout.copied_slots is None else [layout.copied_slots]
    return _spilled([*(each // cache.block_size for each in slots), targets], cache.num_resident)


def _spilled(blocks: Sequence[Tensor], first: int) -> list[int]:
    """Each of the blocks from `first` on once, in rising order."""
    found = torch.unique(torch.cat([each.long() for each in blocks]))
    chosen: list[int] = found[found >= first].tolist()
    return chosen


def _past_blocks(
    layout: BatchLayout, view: AttentionSpec, block_size: int, attended: ChosenSplits | None
) -> list[Tensor]:
    """The blocks of each sequence with tokens that were computed before, and that its tokens see on the
    card."""
    tables = layout.block_tables
    if attended is not None:
        tables = tables.masked_fill(attended.is_in_ram, -1)
    past = layout.context_lens - layout.query_start.diff()
    sees_all = layout.prefix_lens is not None
    return [
        table[(0 if sees_all else view.first_seen(num_past)) // block_size : -(-num_past // block_size)]
        for table, num_past in zip(tables, past.tolist(), strict=True)
    ]


class _Rows(NamedTuple):
    """Which entries of a layout are of spilled blocks, 1 or 0: on the host, or where the layers are
    computed."""

    of_tables: Tensor
    of_slots: Tensor
    of_copied: Tensor | None

    @classmethod
    def of(cls, layout: BatchLayout, cache: SpilledKVCache) -> _Rows:
        """`layout` is on the host."""
        first, size, copied = cache.num_resident, cache.block_size, layout.copied_slots
        return cls(
            (layout.block_tables >= first).to(torch.int32),
            (layout.slot_mapping >= first * size).long(),
            None if copied is None else (copied >= first * size).long(),
        )

    def tensors(self) -> list[Tensor]:
        return [each for each in self if each is not None]

    def with_tensors(self, others: Iterator[Tensor]) -> _Rows:
        """The same with others in place of tensors(), in their order."""
        return _Rows(next(others), next(others), None if self.of_copied is None else next(others))

    def in_layer(self, index: int, layout: BatchLayout, cache: SpilledKVCache) -> BatchLayout:
        """The layout with rows of the cache's tensors in place of blocks."""
        here, size = cache.shift(index, is_spilled=False), cache.block_size
        more = cache.shift(index, is_spilled=True) - here
        copied = layout.copied_slots
        if copied is not None and self.of_copied is not None:
            copied = copied + here * size + self.of_copied * (more * size)
        return replace(
            layout,
            block_tables=layout.block_tables + here + self.of_tables * more,
            slot_mapping=layout.slot_mapping + here * size + self.of_slots * (more * size),
            copied_slots=copied,
        )
