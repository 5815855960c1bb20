"""Admission: which sequences run and which wait. Numbers only.

Waiting sequences come in by priority, then by what their clients have had (FairQueue), then by age. No
sequence overtakes the first in the queue, so a long prompt gets its blocks in the end. When blocks run out,
the sequence of the lowest priority that came in last gives way. The sequences of a group (SequenceGroup) come
in together, and give way together.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from penstock.generation.blocks.block_manager import BlockManager
from penstock.generation.scheduling.encoder_turns import EncoderTurns
from penstock.generation.scheduling.fair_queue import FairQueue
from penstock.generation.scheduling.rope_lengths import RopeLengths
from penstock.generation.scheduling.sequence_group import Places, SequenceGroup, together
from penstock.generation.sequence import FinishReason, Sequence


class Admission:
    """Admits sequences, gives them blocks, and preempts them."""

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        rope_lengths: RopeLengths,
        max_encoder_tokens: int,
    ) -> None:
        """max_encoder_tokens: inputs of so many tokens together are encoded in a step, or one longer
        input."""
        self.max_num_seqs = max_num_seqs
        self.encoder_turns = EncoderTurns(block_manager, max_encoder_tokens)
        self.waiting = FairQueue()
        #: By priority, then in order of admission.
        self.running: list[Sequence] = []
        self._places = Places(max_num_seqs)
        self.num_preemptions = 0
        #: The next step needs blocks or a place of a sequence whose step is on its way, or blocks that are
        #: being written.
        self.is_held_up = False
        #: Prompt tokens that were looked up in the prefix cache, and those that were found there.
        self.num_queried_tokens = self.num_hit_tokens = 0
        self._block_manager = block_manager
        self._rope_lengths = rope_lengths

    def __iter__(self) -> Iterator[Sequence]:
        """All sequences that are not finished."""
        yield from self.running
        yield from self.waiting

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._rope_lengths.follow(sequence)
        self.waiting.add(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence with its group, running or waiting, and take the blocks back."""
        for member in together(sequence):
            member.finish_reason = reason
            if member in self.running:
                self.running.remove(member)
            else:
                self.waiting.remove(member)
            self._block_manager.release(member)
            self._block_manager.disk.end(member)
            self._block_manager.departures.end(member)
        self._places.leave(sequence.group)

    def replace(self, group: SequenceGroup, branches: list[tuple[Sequence, Sequence]]) -> None:
        """The members of a running group end, and other sequences take their places. branches: (member,
        sequence that goes on from the member) pairs; a member may go on as several sequences, or as none."""
        children = [child for _, child in branches]
        for parent, child in branches:
            self._block_manager.share(parent, child)
        for member in group.members:
            self._block_manager.release(member)
        first = self.running.index(group.members[0])
        self.running[first : first + len(group.members)] = children
        group.members = children

    def look_up(self) -> None:
        """Let blocks that have come from disk be found, and look the first waiting sequence up there. Blocks
        that were on their way to disk are free."""
        disk, first = self._block_manager.disk, self.waiting.first
        disk.land()
        self._block_manager.departures.land()
        if first is not None:
            disk.look_up(first, self._block_manager.num_missing)

    def make_way(self) -> None:
        """Preempt running sequences of lower priority than the first in the queue, if that gives the first a
        place."""
        self.is_held_up = False
        first = self.waiting.first
        if first is None or not self.running or self.running[-1].request.priority <= first.request.priority:
            return
        if self._block_manager.disk.is_awaited_by(first):
            return  # it has its blocks already
        lower = [sequence for sequence in self.running if sequence.request.priority > first.request.priority]
        if not self._would_have_place(first, lower):
            return
        if any(sequence.is_in_step for sequence in lower) and not self._has_place(first):
            self.is_held_up = True
            return
        while lower and not self._has_place(first, self._block_manager.departures.num_blocks):
            last = lower[-1]
            lower = lower[: -len(together(last))]
            self._preempt(last)
        self.look_up()

    def grow_running(self) -> bool:
        """Blocks for all tokens of all running sequences; the last sequences give way where blocks are too
        few. False if one gave way: a sequence that came in now would be preempted next."""
        running, num_before = self.running, self.num_preemptions
        index = 0
        while index < len(running):
            sequence = running[index]
            if self._rope_lengths.follow(sequence):
                self._drop(sequence)
                self.adopt(sequence)
            if self._block_manager.grow(sequence):
                index += 1
            elif any(each.is_in_step for each in running) or self._block_manager.departures.num_blocks:
                self.is_held_up = True
                return False
            else:
                self._preempt(running[-1])
        return self.num_preemptions == num_before

    def admit(self, sequence: Sequence) -> bool:
        """Let a waiting sequence run with its group, if all its tokens get blocks. With half its blocks the
        sequence would be the next to be preempted, and its sweep wasted."""
        disk = self._block_manager.disk
        if disk.is_awaited_by(sequence) or not self._has_place(sequence):
            return False
        disk.look_up(sequence, self._block_manager.num_missing)  # its room may be new
        if disk.is_awaited_by(sequence):
            return False
        self._places.enter(sequence.group)
        for member in together(sequence):
            self._enter(member)
        return True

    def _enter(self, sequence: Sequence) -> None:
        """Let a waiting sequence run that has a place."""
        if self._block_manager.prefix_cache.lookup.is_read_by(sequence) and not sequence.was_preempted:
            self.num_queried_tokens += sequence.num_encoder_tokens or sequence.num_prompt_tokens
        self.adopt(sequence)
        has_blocks = self._block_manager.grow(sequence)
        assert has_blocks, "a sequence has a place only if all its tokens get blocks"
        num_encoded = self.encoder_turns.enter(sequence)
        if not num_encoded:
            self.num_hit_tokens += sequence.skip_encoder()
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=lambda each: each.request.priority)
        if not sequence.has_started:
            sequence.has_started = True
            self.waiting.charge(sequence.request.client, num_encoded + sequence.num_pending_tokens)

    def adopt(self, sequence: Sequence) -> None:
        """Skip the tokens that others have computed, or will in this step."""
        self.num_hit_tokens += sequence.skip_to(self._block_manager.adopt(sequence))

    def suspend(self, sequence: Sequence) -> None:
        """Let a running sequence wait with its group; what they have computed is dropped. They come in again
        before all others of their priority."""
        for member in reversed(together(sequence)):
            self.running.remove(member)
            self._drop(member)
            self._rope_lengths.follow(member)
            self.waiting.put_back(member)
        self._places.leave(sequence.group)

    def _preempt(self, sequence: Sequence) -> None:
        """Suspend a sequence because others need its blocks or its place."""
        self.num_preemptions += 1
        for member in together(sequence):
            member.num_preemptions += 1
        self._block_manager.departures.leave(together(sequence))
        self.suspend(sequence)

    def _drop(self, sequence: Sequence) -> None:
        """Let go of all that a sequence has computed."""
        self._block_manager.disk.forget(sequence)
        self._block_manager.release(sequence)
        sequence.restart()

    def _would_have_place(self, sequence: Sequence, lower: list[Sequence]) -> bool:
        """Whether there were blocks and places if the last running sequences, `lower`, did not run."""
        others = self.running[: -len(lower)]
        num_free = self._block_manager.pool.num_free + self._block_manager.departures.num_blocks
        num_free += len(_blocks(lower) - _blocks(others))
        has_room = self._places.have_room(len(others), sequence.group, {each.group for each in others})
        return has_room and self._block_manager.num_missing(sequence) <= num_free

    def _has_place(self, sequence: Sequence, num_leaving: int = 0) -> bool:
        """Whether there is a place, and blocks when the leaving ones are free."""
        num_free = self._block_manager.pool.num_free + num_leaving
        fits = self._block_manager.num_missing(sequence) <= num_free
        has_room = self._places.have_room(len(self.running), sequence.group)
        return fits and has_room and self.encoder_turns.have_room(sequence)


def _blocks(sequences: list[Sequence]) -> set[int]:
    """The blocks of sequences, each once: the beams of a search share some."""
    return {block for each in sequences for table in each.block_tables for block in table}
