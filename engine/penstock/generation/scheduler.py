"""Scheduler: which tokens of which sequences make up the next step. Numbers only: no torch, no clock.

There are no phases. Every sequence has pending tokens (a prompt, the last sampled token, or everything after
a preemption) and a step takes as many as fit:

- who has one pending token rides along;
- of what is left, each prompt is owed a little, so that all advance in every step, and the one that has run
  longest half, so that it ends in at most twice the time; then the shortest goes first, and does not wait for
  a long one;
- what still is left is for drafts: guesses of what follows a sequence's tokens, computed with them. update()
  learns which were right.

Who waits comes in by priority, then by what its client has had (a virtual token counter: Sheng et al.,
"Fairness in Serving Large Language Models", arXiv 2401.00588), then by age. Nobody overtakes the first of
them, so a long prompt gets its blocks in the end. When blocks run out, the last to come in of the lowest
priority gives way.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Container, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import NamedTuple

from penstock.generation.block_manager import BlockManager
from penstock.generation.chosen import Chosen
from penstock.generation.drafter import NO_DRAFTS, Drafter
from penstock.generation.fair_queue import OUTPUT_WEIGHT, FairQueue
from penstock.generation.sequence import NONE_SCORED, FinishReason, Sequence
from penstock.spec import RopeSpec

#: Tokens that each prompt advances by in a step, if there is room at all.
MIN_CHUNK = 32


class ScheduledSequence(NamedTuple):
    """A sequence's part in a step: its next `num_new_tokens` pending tokens, and guesses of what follows. A
    tuple, since there is one for each sequence and step."""

    sequence: Sequence
    num_new_tokens: int
    #: These are all that were pending, so the logits of the last one are wanted, and those of each draft.
    is_sampled: bool
    #: Tokens of the prompt, by index, whose log-probabilities are wanted: the logits of the one before each.
    scored: range = NONE_SCORED
    #: A chain: each follows the one before, the first one the pending tokens. Only where is_sampled.
    drafts: tuple[int, ...] = ()

    @classmethod
    def of(cls, sequence: Sequence, num_new_tokens: int) -> ScheduledSequence:
        is_sampled = num_new_tokens == sequence.num_pending_tokens
        if sequence.first_scored is None:
            return cls(sequence, num_new_tokens, is_sampled)
        scored = sequence.unscored(sequence.num_computed_tokens + num_new_tokens)
        return cls(sequence, num_new_tokens, is_sampled, scored)

    @property
    def num_rows(self) -> int:
        """Rows of logits that are wanted: of `scored` in order, then of the last token and the drafts."""
        return len(self.scored) + self.is_sampled + len(self.drafts)


@dataclass(frozen=True)
class Batch:
    """A step, decided."""

    scheduled: tuple[ScheduledSequence, ...]
    #: Blocks (source, destination) of K and V to be copied before anything is written; no destination is a
    #: source.
    block_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(item.num_new_tokens + len(item.drafts) for item in self.scheduled)

    @property
    def num_rows(self) -> int:
        return sum(item.num_rows for item in self.scheduled)

    @property
    def sampled(self) -> tuple[Sequence, ...]:
        """The sequences that get a token, in order."""
        return tuple(item.sequence for item in self.scheduled if item.is_sampled)

    def __bool__(self) -> bool:
        return bool(self.scheduled)


class Scheduler:
    """Admits, advances by chunks, preempts and resumes."""

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        step_time_target_s: float = 0.0,
        predict_s: Callable[[int], float] = lambda num_tokens: 0.0,
        rope: RopeSpec | None = None,
        drafter: Drafter = NO_DRAFTS,
    ) -> None:
        """step_time_target_s: seconds that a step should take at most; 0: it takes what it takes. predict_s:
        tokens of a step -> seconds; never falls with more tokens. `rope` is the model's: it says when a
        sequence's keys must be computed again."""
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._step_time_target_s = step_time_target_s
        self._predict_s = predict_s
        self._drafter = drafter
        self.waiting = FairQueue()
        #: By priority, then in order of admission.
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        #: Prompt tokens that were looked up, and found.
        self.num_queried_tokens = self.num_hit_tokens = 0
        #: None where no sequence's length changes anything.
        self._rope = rope if rope is not None and rope.short_length else None

    def __iter__(self) -> Iterator[Sequence]:
        """All sequences that are not finished."""
        yield from self.running
        yield from self.waiting

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. It must be able to run when alone: all blocks together hold it at its longest."""
        self._follow_length(sequence)
        self.waiting.add(sequence)

    def schedule(self) -> Batch:
        """Decide the next step and reserve its blocks. Empty only if there is no work. Then comes update() or
        rollback()."""
        self._make_way()
        may_admit = self._grow_running()
        riders = [sequence for sequence in self.running if sequence.num_pending_tokens == 1]
        budget = self._token_limit(len(riders))
        scheduled = {sequence: self._take(sequence, 1) for sequence in riders[:budget]}
        budget -= len(scheduled)
        while owed := self._owe(budget, scheduled, may_admit):
            for item in self._share(owed, budget):
                scheduled[item.sequence] = item
                budget -= item.num_new_tokens
        self._draft(scheduled, budget)
        return Batch(tuple(scheduled.values()), self.block_manager.take_copies())

    def update(self, batch: Batch, chosen: List[Chosen]) -> list[tuple[Sequence, Chosen]]:
        """A step was computed, and this is what was chosen for each of its sequences: its tokens are in the
        cache now, and the drafts that were right. Returns those that gained something; the tokens are
        appended by whoever makes text of them."""
        gained = []
        for item, choice in zip(batch.scheduled, chosen, strict=True):
            sequence = item.sequence
            if item.drafts:
                self.block_manager.accept(sequence, item.drafts[: choice.num_accepted])
                sequence.advance(choice.num_accepted)
            sequence.advance(item.num_new_tokens)
            if choice.scores:
                sequence.add_scores(item.scored.start, choice.scores)
            if item.is_sampled:
                self.waiting.charge(sequence.request.client, OUTPUT_WEIGHT * max(1, len(choice.tokens)))
                gained.append((sequence, choice))
        self.block_manager.confirm()
        return gained

    def rollback(self, batch: Batch) -> None:
        """A step was not computed, or only in part: its sequences begin again with what was there before."""
        self.block_manager.rollback()
        for item in reversed(batch.scheduled):
            self._suspend(item.sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence, wherever it is, and take its blocks back."""
        sequence.finish_reason = reason
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.block_manager.release(sequence)

    # ------------------------------------------------------------ blocks

    def _make_way(self) -> None:
        """Preempt those of lower priority than the first in the queue, if that gives it a place."""
        manager, first = self.block_manager, self.waiting.first
        if first is None or not self.running or self.running[-1].request.priority <= first.request.priority:
            return
        lower = [sequence for sequence in self.running if sequence.request.priority > first.request.priority]
        if manager.num_missing(first) > manager.num_free + sum(len(each.block_table) for each in lower):
            return
        while lower and not self._has_place(first):
            self._preempt(lower.pop())

    def _has_place(self, sequence: Sequence) -> bool:
        fits = self.block_manager.num_missing(sequence) <= self.block_manager.num_free
        return fits and len(self.running) < self.max_num_seqs

    def _grow_running(self) -> bool:
        """Blocks for all tokens of all that run, taken from the last ones if need be. False if somebody had
        to give way: whoever came in now would be thrown out again."""
        num_before = self.num_preemptions
        for sequence in list(self.running):
            if self._follow_length(sequence):
                self._drop(sequence)
                self._adopt(sequence)
            while sequence in self.running and not self.block_manager.grow(sequence):
                self._preempt(self.running[-1])
        return self.num_preemptions == num_before

    def _preempt(self, sequence: Sequence) -> None:
        """Drop what a sequence has computed; it resumes before all others of its priority that wait."""
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        self._suspend(sequence)

    def _suspend(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._drop(sequence)
        self._follow_length(sequence)
        self.waiting.put_back(sequence)

    def _drop(self, sequence: Sequence) -> None:
        """Let go of all that a sequence has computed."""
        self.block_manager.release(sequence)
        sequence.restart()

    def _follow_length(self, sequence: Sequence) -> bool:
        """Note which frequencies a sequence's length asks for. True if they have changed: its keys are of no
        use then, and other blocks hold its tokens. Whoever waits does not grow, so this is asked when a
        sequence begins to wait and before each step that it may have a part in."""
        length = self._rope_length(sequence, 0)
        if length == sequence.rope_length:
            return False
        sequence.follow_length(length)
        return True

    def _rope_length(self, sequence: Sequence, num_drafts: int) -> int:
        """RopeSpec.frequency_length() once so many guesses have been accepted."""
        if self._rope is None:
            return 0
        return self._rope.frequency_length(sequence.num_prompt_tokens, sequence.num_tokens + num_drafts)

    def _admit(self, sequence: Sequence) -> bool:
        """Only what fits whole: a sequence that got half its blocks would be the next to be preempted, and
        its sweep wasted."""
        if not self._has_place(sequence):
            return False
        if self.block_manager.is_looked_up(sequence) and not sequence.was_preempted:
            self.num_queried_tokens += sequence.num_prompt_tokens
        self._adopt(sequence)
        self.block_manager.grow(sequence)
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=lambda each: each.request.priority)
        if not sequence.has_started:
            sequence.has_started = True
            self.waiting.charge(sequence.request.client, sequence.num_pending_tokens)
        return True

    def _adopt(self, sequence: Sequence) -> None:
        """What others have computed, or will in this step, the sequence need not."""
        self.num_hit_tokens += sequence.skip_to(self.block_manager.adopt(sequence))

    # ------------------------------------------------------------ tokens

    def _token_limit(self, num_riders: int) -> int:
        """Most tokens that the step may have. With a target: as many as it allows, but as many as take no
        longer than the riders alone, and a chunk beside them in any case."""
        most = self.max_num_batched_tokens
        if not self._step_time_target_s:
            return most
        least = min(num_riders + MIN_CHUNK, most)
        limit_s = max(self._step_time_target_s, self._predict_s(max(1, num_riders)))
        beyond = bisect.bisect_right(range(most + 1), limit_s, lo=least, key=self._predict_s)
        return max(least, beyond - 1)

    def _owe(self, budget: int, others: Container[Sequence], may_admit: bool) -> dict[Sequence, int]:
        """Prompts that advance beside the others, and by how many tokens at least: half the budget for the
        one that has run longest, a little for each of the rest. Admits new ones while there is something for
        them."""
        prompts = [sequence for sequence in self.running if sequence not in others]
        half = budget // 2
        # Riders have become more since these came in: each gets less, rather than the last one nothing.
        chunk = max(1, min(MIN_CHUNK, half // max(1, len(prompts) - 1)))
        owed: dict[Sequence, int] = {}
        for sequence in prompts:
            due = min(sequence.num_pending_tokens, chunk if owed else budget - half)
            if 0 < due <= budget - sum(owed.values()):
                owed[sequence] = due
        while may_admit and (first := self.waiting.first):
            due = min(first.num_tokens, MIN_CHUNK if owed else budget - half)
            if not 0 < due <= budget - sum(owed.values()) or not self._admit(first):
                break
            owed[first] = min(due, first.num_pending_tokens)
        return owed

    def _share(self, owed: dict[Sequence, int], budget: int) -> Iterator[ScheduledSequence]:
        """Each gets what it is owed, and the shortest first what is left. What one computes in this step the
        next ones need not."""
        left = budget - sum(owed.values())
        for sequence in sorted(owed, key=lambda each: (each.request.priority, each.num_pending_tokens)):
            self._adopt(sequence)
            room = owed[sequence] + left
            count = min(sequence.num_pending_tokens, room)
            left = room - count
            yield self._take(sequence, count)

    def _take(self, sequence: Sequence, num_new_tokens: int) -> ScheduledSequence:
        self.block_manager.register(sequence, sequence.num_computed_tokens + num_new_tokens)
        return ScheduledSequence.of(sequence, num_new_tokens)

    def _draft(self, scheduled: dict[Sequence, ScheduledSequence], budget: int) -> None:
        """Guesses beside what is scheduled: as many as have room in the step, in the answer (which takes one
        token more than the guesses) and in blocks that nobody has."""
        ends = (sequence for sequence, item in scheduled.items() if item.is_sampled)
        for sequence, guess in self._drafter.propose(ends, budget).items():
            room = min(budget, sequence.max_total_tokens - sequence.num_tokens - 1)
            drafts = tuple(guess[: max(0, room)])
            while drafts and self._rope_length(sequence, len(drafts)) != sequence.rope_length:
                drafts = drafts[:-1]  # beyond it, all keys are computed anew
            drafts = drafts[: self.block_manager.extend(sequence, len(drafts))]
            scheduled[sequence] = scheduled[sequence]._replace(drafts=drafts)
            budget -= len(drafts)
