"""Departures: blocks of preempted sequences that nobody gets before they are written. Numbers only.

A preempted sequence comes back by reading what is kept of it, or by computing its tokens again. Most of its
blocks were written soon after they were computed. The others, and the block that is not full, are written at
its preemption, where writing and reading them takes less time than computing their tokens: until then they
stay where they are, and a sequence that needs their room waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from penstock.generation.blocks.block_pool import BlockPool
from penstock.generation.blocks.block_store import BlockStore, KeptBlock, Writing
from penstock.generation.blocks.landing import Landing
from penstock.generation.blocks.prefix_cache import PrefixCache
from penstock.generation.sequence import Sequence
from penstock.metrics import Preemptions


def spared_s(compute_s: Callable[[int], float], num_tokens: int, num_kept: int) -> float:
    """Seconds that a sequence's coming back takes less if `num_kept` of the `num_tokens` tokens that it would
    compute need not be computed. compute_s: tokens -> seconds; 0: unknown. Where a step takes as long with
    a few tokens more, as one does that reads all weights, these tokens spare nothing."""
    return compute_s(num_tokens) - compute_s(num_tokens - num_kept)


@dataclass(frozen=True)
class _Departing:
    writing: Writing
    blocks: list[int]

    @property
    def is_done(self) -> bool:
        return self.writing.is_done


class Departures(Landing[_Departing]):
    """Decides at each preemption, and holds the blocks that are written. Blocks that are written, or take
    longer to write than to compute, are free when they land."""

    def __init__(
        self,
        pool: BlockPool,
        prefix_cache: PrefixCache,
        store: BlockStore | None,
        compute_s: Callable[[int], float],
    ) -> None:
        """compute_s: tokens of a prompt -> seconds that computing them takes; 0: unknown, and then no block
        waits for its writing. Without a store nothing is moved."""
        super().__init__()
        self.counts = Preemptions()
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._store = store
        self._compute_s = compute_s

    @property
    def num_blocks(self) -> int:
        """Blocks that become free without another preemption."""
        return sum(len(each.blocks) for each in self._moving.values())

    def leave(self, members: list[Sequence]) -> None:
        """These sequences, which run together, are about to lose their blocks to others."""
        for member in members:
            self._prefix_cache.keep_tail(member)
        kept = self._own_blocks(members)
        store = self._store
        if store is None or not kept:
            self.counts.num_recomputed += 1
            return
        there = [each for each in kept if each.key in store]
        leaving = [each for each in kept if each.key not in store]
        num_tokens = len(members) + sum(each.num_tokens for each in kept)  # the last token is computed anyway
        limit_s = self._spared_s(num_tokens, leaving)
        if not (store.can_write and leaving and self._write_s(leaving) + self._read_s(leaving) < limit_s):
            leaving = []
        if self._read_s(there + leaving) + self._write_s(leaving) >= self._spared_s(
            num_tokens, there + leaving
        ):
            self.counts.num_recomputed += 1
            return
        self.counts.num_moved += 1
        if leaving:
            for each in leaving:
                self._pool.own(each.block)
            offers = [(block, key, before, self._pool.watch(block)) for block, key, before, _ in leaving]
            writing = store.write(offers, limit_s)
            self._moving[members[0]] = _Departing(writing, [each.block for each in leaving])

    def _end(self, sequence: Sequence, moving: _Departing) -> None:
        """The blocks of a sequence that was preempted are free, written or not."""
        self.counts.write_s += moving.writing.elapsed_s
        for block in reversed(moving.blocks):
            self._pool.disown(block)

    def _own_blocks(self, members: list[Sequence]) -> list[KeptBlock]:
        """The blocks that no other sequence has, in the order of the text."""
        found = {
            each.block: each for member in members for each in self._prefix_cache.lookup.kept_blocks(member)
        }
        tables = (table for member in members for table in member.block_tables)
        owners = Counter(block for table in tables for block in table)
        return [each for block, each in found.items() if self._pool.num_owners[block] == owners[block]]

    def _spared_s(self, num_tokens: int, kept: list[KeptBlock]) -> float:
        return spared_s(self._compute_s, num_tokens, sum(each.num_tokens for each in kept))

    def _write_s(self, blocks: list[KeptBlock]) -> float:
        return self._store.expected_write_s(len(blocks)) if self._store is not None else 0.0

    def _read_s(self, blocks: list[KeptBlock]) -> float:
        return self._store.expected_read_s([each.key for each in blocks]) if self._store is not None else 0.0
