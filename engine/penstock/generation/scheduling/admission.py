"""Admission: which sequences run and which wait. Numbers only.

Waiting sequences come in by priority, then by what their clients have had (FairQueue), then by age. No
sequence overtakes the first in the queue, so a long prompt gets its blocks in the end. When blocks run out,
the sequence of the lowest priority that came in last gives way.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from penstock.generation.scheduling.block_manager import BlockManager
from penstock.generation.scheduling.fair_queue import FairQueue
from penstock.generation.scheduling.rope_lengths import RopeLengths
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
        #: Sequences whose inputs have to be encoded in the step that is being decided.
        self._encoded: list[Sequence] = []
        self._max_encoder_tokens = max_encoder_tokens
        self.waiting = FairQueue()
        #: By priority, then in order of admission.
        self.running: list[Sequence] = []
        self.num_preemptions = 0
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
        """End a sequence, running or waiting, and take its blocks back."""
        sequence.finish_reason = reason
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._block_manager.release(sequence)

    def make_way(self) -> None:
        """Preempt running sequences of lower priority than the first in the queue, if that gives the first a
        place."""
        manager, first = self._block_manager, self.waiting.first
        if first is None or not self.running or self.running[-1].request.priority <= first.request.priority:
            return
        lower = [sequence for sequence in self.running if sequence.request.priority > first.request.priority]
        if manager.num_missing(first) > manager.num_free + sum(each.num_blocks for each in lower):
            return
        while lower and not self._has_place(first):
            self._preempt(lower.pop())

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
            else:
                self._preempt(running[-1])
        return self.num_preemptions == num_before

    def admit(self, sequence: Sequence) -> bool:
        """Let a waiting sequence run, if all its tokens get blocks. With half its blocks the sequence would
        be the next to be preempted, and its sweep wasted."""
        if not self._has_place(sequence):
            return False
        if self._block_manager.prefix_cache.is_read_by(sequence) and not sequence.was_preempted:
            self.num_queried_tokens += sequence.num_prompt_tokens
        self.adopt(sequence)
        self._block_manager.grow(sequence)
        if sequence.encoder is not None and self._block_manager.place_encoder(sequence):
            self._encoded.append(sequence)
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=lambda each: each.request.priority)
        if not sequence.has_started:
            sequence.has_started = True
            self.waiting.charge(sequence.request.client, sequence.num_pending_tokens)
        return True

    def adopt(self, sequence: Sequence) -> None:
        """Skip the tokens that others have computed, or will in this step."""
        self.num_hit_tokens += sequence.skip_to(self._block_manager.adopt(sequence))

    def take_encoded(self) -> tuple[Sequence, ...]:
        """The sequences whose inputs have to be encoded in the step."""
        encoded = tuple(self._encoded)
        self._encoded.clear()
        return encoded

    def suspend(self, sequence: Sequence) -> None:
        """Let a running sequence wait; what it has computed is dropped. The sequence comes in again before
        all others of its priority."""
        self.running.remove(sequence)
        self._drop(sequence)
        self._rope_lengths.follow(sequence)
        self.waiting.put_back(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Suspend a sequence because others need its blocks or its place."""
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        self.suspend(sequence)

    def _drop(self, sequence: Sequence) -> None:
        """Let go of all that a sequence has computed."""
        self._block_manager.release(sequence)
        sequence.restart()

    def _has_place(self, sequence: Sequence) -> bool:
        fits = self._block_manager.num_missing(sequence) <= self._block_manager.num_free
        return fits and len(self.running) < self.max_num_seqs and self._can_encode(sequence)

    def _can_encode(self, sequence: Sequence) -> bool:
        """Whether the step has room for the sequence's encoded input."""
        if sequence.encoder is None or not self._encoded or self._block_manager.find_encoder(sequence):
            return True
        num_tokens = sum(each.num_input_tokens for each in self._encoded)
        return num_tokens + sequence.num_input_tokens <= self._max_encoder_tokens
