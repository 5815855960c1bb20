"""StatePool: the slot of each sequence's recurrent state, in models whose layers have one, and copies of
states for later prompts. Numbers only.

A state stands for all tokens that the sequence has computed, and each step overwrites it. So a sequence that
goes on as several others (a beam) is copied, and a sequence that loses its slot begins again: with zeros, or
with a copy that was made at the end of a block. A copy has the key of this block.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.generation.blocks.block_pool import BlockPool
from penstock.generation.blocks.guess_rows import GuessRows
from penstock.generation.sequence import Sequence
from penstock.state_layout import NO_ROOM, GuessRoom


class StatePool:
    """Has the slots 0 .. num_slots - 1, of which `num_sequences` are for sequences that run at a time. With 0
    slots the model has no states, and nothing is done."""

    def __init__(self, num_slots: int = 0, num_sequences: int = 0, guesses: GuessRoom = NO_ROOM) -> None:
        #: What drafts bring to the states.
        self.guesses = GuessRows(guesses if num_slots else None)
        # A copy is a slot that has a key and no owner. The copy that was used least recently gives way.
        self._pool = BlockPool(num_slots)
        self._most_saves = num_slots - num_sequences
        #: Slots that the step fills with copies, and the keys of these.
        self._saves: list[tuple[int, bytes]] = []
        self._copies: list[tuple[int, int]] = []
        #: Slots into which copies are read from disk.
        self._num_reading = 0

    @property
    def is_needed(self) -> bool:
        return self._pool.num_blocks > 0

    @property
    def is_full(self) -> bool:
        """No further sequence can have a slot now."""
        return self.is_needed and not self._pool.num_free

    def place(self, sequence: Sequence) -> None:
        """Before a step: a slot that no other sequence has. What the slot holds does not matter to a sequence
        that begins."""
        if not self.is_needed:
            return
        shared = sequence.state_slot
        if shared is None:
            sequence.state_slot = self._pool.take()
        elif self._pool.num_owners[shared] > 1:
            sequence.state_slot = self._pool.take()
            self._pool.disown(shared)
            self._copies.append((shared, sequence.state_slot))

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Let a sequence go on from the state of another one. The first of the two that has a part in a step
        gets a copy: place()."""
        child.state_slot = parent.state_slot
        if child.state_slot is not None:
            self._pool.own(child.state_slot)

    def release(self, sequence: Sequence) -> None:
        """Take a sequence's slot back, and right guesses that the state does not have yet."""
        self.guesses.forget(sequence)
        if sequence.state_slot is not None:
            self._pool.disown(sequence.state_slot)
            sequence.state_slot = None

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """The copies (source, destination) that the step has to make in this order before it writes."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def __contains__(self, key: bytes) -> bool:
        """Whether there is a copy with this key."""
        return self._pool.find(key) is not None

    def watch(self, key: bytes) -> tuple[int, Callable[[], bool]] | None:
        """The slot of the copy with this key, and a function that says, on any thread, whether the copy is
        still there; None if there is no such copy."""
        slot = self._pool.find(key)
        return None if slot is None else (slot, self._pool.watch(slot))

    def begin_read(self) -> int | None:
        """Between two steps: a slot into which a copy is read, until end_read(); None if sequences and
        other copies need them all."""
        if self._num_reading == self._most_saves:
            return None
        self._num_reading += 1
        return self._pool.take()

    def end_read(self, slot: int, key: bytes | None) -> None:
        """The slot has the copy with this key, which can be found from now on; None: it has none."""
        self._num_reading -= 1
        if key is not None:
            self._pool.set_key(slot, key, 0)
        self._pool.disown(slot)

    def adopt(self, sequence: Sequence, key: bytes) -> None:
        """Let a sequence go on from a copy that is there."""
        copy = self._pool.find(key)
        assert copy is not None
        self.guesses.forget(sequence)
        self._pool.own(copy)
        self._pool.disown(copy)  # the copy counts as used, and is the last to give way
        self.place(sequence)
        assert sequence.state_slot is not None
        if sequence.state_slot != copy:  # the copy is the last free slot, if there is no other
            self._copies.append((copy, sequence.state_slot))

    def save(self, key: bytes) -> int | None:
        """The slot for a copy that the step makes; None if there is none. The copy can be found when the step
        was computed: confirm()."""
        if len(self._saves) + self._num_reading == self._most_saves:
            return None
        slot = self._pool.take()
        self._saves.append((slot, key))
        return slot

    def drop(self, key: bytes) -> None:
        """Nobody will want the copy with this key, if there is one."""
        slot = self._pool.find(key)
        if slot is not None:
            self._pool.own(slot)
            self._pool.drop_key(slot)
            self._pool.disown(slot)

    def forget_all(self) -> None:
        """Between steps: no copy holds what it held, and none can be found."""
        self._copies.clear()
        for slot in range(self._pool.num_blocks):
            self._pool.drop_key(slot)

    def end_step(self, is_computed: bool) -> None:
        """The step's copies can be found from now on, if the step was computed."""
        for slot, key in self._saves:
            if is_computed:
                self._pool.set_key(slot, key, 0)
            self._pool.disown(slot)
        self._saves.clear()
