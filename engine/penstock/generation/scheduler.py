"""Scheduler: which tokens of which sequences make up the next step. Numbers only: no torch, no clock.

There are no phases. Every sequence has pending tokens (a prompt, the last sampled token, or everything
after a preemption) and a step takes as many as fit. Running sequences come before waiting ones, oldest
first, so a sequence that has begun is never starved by one that has not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.generation.block_manager import BlockManager
from penstock.generation.sequence import FinishReason, Sequence


@dataclass(frozen=True)
class ScheduledSequence:
    """A sequence's part in a step: its next `num_new_tokens` pending tokens."""

    sequence: Sequence
    num_new_tokens: int
    #: These are all that were pending, so the next token can be chosen.
    is_sampled: bool

    @classmethod
    def of(cls, sequence: Sequence, num_new_tokens: int) -> ScheduledSequence:
        return cls(sequence, num_new_tokens, num_new_tokens == sequence.num_pending_tokens)


@dataclass(frozen=True)
class Batch:
    """A step, decided."""

    scheduled: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        return sum(item.num_new_tokens for item in self.scheduled)

    @property
    def sampled(self) -> tuple[Sequence, ...]:
        """The sequences that get a token, in order."""
        return tuple(item.sequence for item in self.scheduled if item.is_sampled)

    def __bool__(self) -> bool:
        return bool(self.scheduled)


class Scheduler:
    """Admits, advances by chunks, preempts and resumes."""

    def __init__(self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        #: In order of admission.
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def __iter__(self) -> Iterator[Sequence]:
        """All sequences that are not finished."""
        yield from self.running
        yield from self.waiting

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. It must be able to run when alone: all blocks together hold it at its longest."""
        self.waiting.append(sequence)

    def schedule(self) -> Batch:
        """Decide the next step and reserve its blocks. Empty only if there is no work."""
        budget = self.max_num_batched_tokens
        preemptions_before = self.num_preemptions
        scheduled: list[ScheduledSequence] = []
        # A copy: preempting shortens the list from its end while we walk it from its start.
        for sequence in list(self.running):
            if budget == 0 or sequence not in self.running:
                break
            count = self._reserve(sequence, budget)
            if count:
                scheduled.append(ScheduledSequence.of(sequence, count))
                budget -= count
        while budget and self.waiting and len(self.running) < self.max_num_seqs:
            if self.num_preemptions > preemptions_before:
                break  # blocks ran out just now: whoever came in would be thrown out again
            sequence = self.waiting[0]
            # Admit only what fits whole: a sequence that got half its blocks would be the next to be
            # preempted, and its sweep wasted.
            if not self.block_manager.can_grow(sequence, sequence.num_tokens):
                break
            self.running.append(self.waiting.popleft())
            count = min(budget, sequence.num_pending_tokens)
            self.block_manager.grow(sequence, sequence.num_tokens)
            scheduled.append(ScheduledSequence.of(sequence, count))
            budget -= count
        return Batch(tuple(scheduled))

    def _reserve(self, sequence: Sequence, budget: int) -> int:
        """Blocks for the sequence's next tokens, preempting younger ones if need be; how many tokens it
        may compute (0: it was itself the youngest and had to give way)."""
        count = min(budget, sequence.num_pending_tokens)
        end = sequence.num_computed_tokens + count
        while not self.block_manager.can_grow(sequence, end):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return 0
        self.block_manager.grow(sequence, end)
        return count

    def _preempt(self, sequence: Sequence) -> None:
        """Drop what a sequence has computed; it resumes, recomputed, before all others that wait."""
        self.running.remove(sequence)
        self.block_manager.release(sequence)
        sequence.num_computed_tokens = 0
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def advance(self, batch: Batch) -> None:
        """A step was computed: its tokens are in the cache now."""
        for item in batch.scheduled:
            item.sequence.num_computed_tokens += item.num_new_tokens

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence, wherever it is, and take its blocks back."""
        sequence.finish_reason = reason
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.block_manager.release(sequence)
