"""DiskBlocks: blocks that are not in the cache, and come from disk before their sequence runs. Numbers only.

The first waiting sequence is looked up on disk once it has room for its blocks. Where reading should take
less time than computing, its blocks are taken and read while others compute, and the sequence comes in when
they are there. Then they are in the prefix cache, as if they had been computed just now."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from penstock.generation.scheduling.block_pool import BlockPool
from penstock.generation.scheduling.moving.block_store import BlockStore, Reading
from penstock.generation.scheduling.prefix_cache import PrefixCache
from penstock.generation.scheduling.sequence_group import together
from penstock.generation.sequence import Sequence
from penstock.metrics import KVDiskReads, Preemptions


@dataclass(frozen=True)
class _Arriving:
    reading: Reading
    #: Blocks that the reading holds: some were in the cache already, the others are read, with their keys and
    #: the tokens that the keys stand for.
    held: list[int]
    wanted: list[tuple[bytes, int, int]]
    #: What computing the tokens would take; 0: unknown.
    compute_s: float


class DiskBlocks:
    """Reads blocks for waiting sequences."""

    def __init__(
        self,
        pool: BlockPool,
        prefix_cache: PrefixCache,
        store: BlockStore | None,
        compute_s: Callable[[int], float],
        preemptions: Preemptions,
    ) -> None:
        """compute_s: tokens of a prompt -> seconds that computing them takes; 0: unknown, and then blocks are
        read. `preemptions` counts what preempted sequences find. Without a store nothing is done."""
        self.reads = KVDiskReads()
        self._preemptions = preemptions
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._store = store
        self._compute_s = compute_s
        self._arriving: dict[Sequence, _Arriving] = {}
        #: Sequences that were looked up since they began to wait.
        self._looked_up = weakref.WeakSet[Sequence]()

    def is_awaited_by(self, sequence: Sequence) -> bool:
        """Whether blocks of a waiting sequence are on their way."""
        return sequence in self._arriving

    def look_up(self, sequence: Sequence, num_missing: Callable[[Sequence], int]) -> None:
        """The sequence is the first that waits, and takes num_missing() free blocks. Begin to read what is on
        disk of its next tokens."""
        if self._store is None or sequence in self._looked_up:
            return
        if num_missing(sequence) > self._pool.num_free:
            return
        self._looked_up.add(sequence)
        held, keys = self._find(sequence)
        num_tokens = sum(keys.values())
        compute_s = self._compute_s(num_tokens) if keys else 0.0
        if not keys or 0 < compute_s <= self._store.expected_read_s(len(keys)):
            return
        for block in held:
            self._pool.own(block)
        wanted = [(key, self._pool.take(), num_keyed) for key, num_keyed in keys.items()]
        reading = self._store.read([(key, block) for key, block, _ in wanted], compute_s or math.inf)
        self._arriving[sequence] = _Arriving(reading, held, wanted, compute_s)

    def _find(self, sequence: Sequence) -> tuple[list[int], dict[bytes, int]]:
        """What is kept of a sequence and its group: blocks in the cache, and the keys of others with the
        tokens that these stand for."""
        held, keys = list[int](), dict[bytes, int]()
        for member in together(sequence):
            here, elsewhere = self._prefix_cache.find_with(member, self._store or ())
            held += here
            keys |= elsewhere
        return held, keys

    def land(self) -> None:
        """Blocks that have arrived can be found from now on."""
        for sequence in [each for each, arriving in self._arriving.items() if arriving.reading.is_done]:
            self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        """A sequence waits no longer: its blocks have arrived, they take too long, or it has ended."""
        arriving = self._arriving.pop(sequence, None)
        if arriving is None:
            return
        arrived = arriving.reading.end()
        num_tokens = 0
        for key, block, num_keyed in arriving.wanted:
            if key in arrived:
                self._pool.set_key(block, key, num_keyed)
                num_tokens += num_keyed
        # The last ones give way first: a prefix without its beginning can't be found.
        for block in reversed([*arriving.held, *(block for _, block, _ in arriving.wanted)]):
            self._pool.disown(block)
        self._count(sequence, arriving, len(arrived), num_tokens)

    def forget(self, sequence: Sequence) -> None:
        """The sequence may be looked up again: it has lost what it had."""
        self._looked_up.discard(sequence)

    def _count(self, sequence: Sequence, arriving: _Arriving, num_blocks: int, num_tokens: int) -> None:
        reads, elapsed_s = self.reads, arriving.reading.elapsed_s
        reads.num_blocks += num_blocks
        reads.num_tokens += num_tokens
        reads.read_s += elapsed_s
        computed_s = arriving.compute_s * num_blocks / len(arriving.wanted)
        saved_s = max(0.0, computed_s - elapsed_s)
        reads.saved_s += saved_s
        if sequence.was_preempted:
            self._preemptions.moved_tokens += num_tokens
            self._preemptions.saved_s += saved_s
