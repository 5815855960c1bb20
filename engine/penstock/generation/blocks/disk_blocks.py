"""DiskBlocks: blocks that are not in the cache, and come from disk before their sequence runs. Numbers only.

The first waiting sequence is looked up on disk once it has room for its blocks. Where reading should take
less time than computing, its blocks are taken and read while others compute, and the sequence comes in when
they are there. Then they are in the prefix cache, as if they had been computed just now."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.generation.blocks.block_pool import BlockPool
from penstock.generation.blocks.kept_states import ArrivingState, KeptStates
from penstock.generation.blocks.landing import Landing
from penstock.generation.blocks.prefix_cache import PrefixCache
from penstock.generation.blocks.prefix_lookup import FoundWith
from penstock.generation.scheduling.sequence_group import together
from penstock.generation.sequence import Sequence
from penstock.metrics import KVDiskReads, Preemptions

if TYPE_CHECKING:
    from penstock.generation.blocks.block_store import BlockStore, Reading


@dataclass(frozen=True)
class _Arriving:
    reading: Reading
    #: Blocks that the reading holds: some were in the cache already, the others are read, with their keys and
    #: the tokens that the keys stand for.
    held: list[int]
    wanted: list[tuple[bytes, int, int]]
    #: The recurrent state after the blocks, if it comes from disk, too.
    state: ArrivingState | None
    #: Tokens that need not be computed, if all arrives. Of a model with recurrent states none otherwise.
    num_tokens: int
    #: What computing the tokens would take; 0: unknown.
    compute_s: float

    @property
    def is_done(self) -> bool:
        return self.reading.is_done


class DiskBlocks(Landing[_Arriving]):
    """Reads blocks for waiting sequences. Blocks that have landed can be found."""

    def __init__(
        self,
        pool: BlockPool,
        prefix_cache: PrefixCache,
        store: BlockStore | None,
        compute_s: Callable[[int], float],
        preemptions: Preemptions,
        kept_states: KeptStates | None = None,
    ) -> None:
        """compute_s: tokens of a prompt -> seconds that computing them takes; 0: unknown, and then blocks are
        read. `preemptions` counts what preempted sequences find. Without a store nothing is done.
        kept_states: of a model with recurrent states."""
        super().__init__()
        #: By the name of the tier.
        self.reads = defaultdict[str, KVDiskReads](KVDiskReads)
        self._preemptions = preemptions
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._store = store
        self._compute_s = compute_s
        self._kept_states = kept_states
        #: Sequences that were looked up since they began to wait.
        self._looked_up = weakref.WeakSet[Sequence]()

    def is_awaited_by(self, sequence: Sequence) -> bool:
        """Whether blocks of a waiting sequence are on their way."""
        return sequence in self._moving

    def look_up(self, sequence: Sequence, num_missing: Callable[[Sequence], int]) -> None:
        """The sequence is the first that waits, and takes num_missing() free blocks. Begin to read what is on
        disk of its next tokens."""
        if self._store is None or sequence in self._looked_up:
            return
        if num_missing(sequence) > self._pool.num_free:
            return
        found, kept = self._find(sequence, self._store), self._kept_states
        pieces = kept.pieces_of(found.state) if kept is not None and found.state is not None else []
        wanted_keys = [*found.missing, *pieces]
        compute_s = self._compute_s(found.num_tokens) if wanted_keys else 0.0
        if not wanted_keys or 0 < compute_s <= self._store.expected_read_s(wanted_keys):
            self._looked_up.add(sequence)
            return
        state = kept.begin(found.state) if kept is not None and found.state is not None else None
        if pieces and state is None:
            return  # a later step may have a slot for the state
        self._looked_up.add(sequence)
        for block in found.held:
            self._pool.own(block)
        wanted = [(key, self._pool.take(), num_keyed) for key, num_keyed in found.missing.items()]
        numbered = state.wanted if state is not None else []
        reading = self._store.read(
            [(key, block) for key, block, _ in wanted] + numbered, compute_s or math.inf
        )
        arriving = _Arriving(reading, found.held, wanted, state, found.num_tokens, compute_s)
        self._moving[sequence] = arriving

    def _find(self, sequence: Sequence, store: BlockStore) -> FoundWith:
        """What is kept of a sequence and its group; of a model with recurrent states, of the sequence."""
        found = self._prefix_cache.lookup.find_with(sequence, store)
        if self._kept_states is not None:
            return found
        for member in together(sequence):
            if member is not sequence:
                more = self._prefix_cache.lookup.find_with(member, store)
                found = FoundWith(found.held + more.held, found.missing | more.missing)
        return found._replace(num_tokens=sum(found.missing.values()))

    def _end(self, sequence: Sequence, moving: _Arriving) -> None:
        """A sequence waits no longer: its blocks have arrived, they take too long, or it has ended."""
        arrived = moving.reading.end()
        for key, block, num_keyed in moving.wanted:
            if key in arrived:
                self._prefix_cache.land(sequence, block, key, num_keyed)
        # The last ones give way first: a prefix without its beginning can't be found.
        for block in reversed([*moving.held, *(block for _, block, _ in moving.wanted)]):
            self._pool.disown(block)
        if moving.state is not None and self._kept_states is not None:
            self._kept_states.end(moving.state, arrived)
        for tier, (keys, elapsed_s) in moving.reading.by_tier.items():
            self._count(sequence, moving, self.reads[tier], keys, elapsed_s)

    def forget(self, sequence: Sequence) -> None:
        """The sequence may be looked up again: it has lost what it had."""
        self._looked_up.discard(sequence)

    def _count(
        self,
        sequence: Sequence,
        arriving: _Arriving,
        reads: KVDiskReads,
        arrived: Set[bytes],
        elapsed_s: float,
    ) -> None:
        """What arrived from one tier. A recurrent state comes from one tier as a whole."""
        num_blocks = sum(key in arrived for key, _, _ in arriving.wanted)
        pieces = [] if arriving.state is None else arriving.state.wanted
        is_state_here = all(key in arrived for key, _ in pieces)
        reads.num_states += bool(pieces) and is_state_here
        if self._kept_states is None:
            num_tokens = sum(num_keyed for key, _, num_keyed in arriving.wanted if key in arrived)
        else:
            num_tokens = arriving.num_tokens * (is_state_here and num_blocks == len(arriving.wanted))
        reads.num_blocks += num_blocks
        reads.num_tokens += num_tokens
        reads.read_s += elapsed_s
        spared_s = arriving.compute_s * num_tokens / arriving.num_tokens
        saved_s = max(0.0, spared_s - elapsed_s)
        reads.saved_s += saved_s
        if sequence.was_preempted:
            self._preemptions.moved_tokens += num_tokens
            self._preemptions.saved_s += saved_s
