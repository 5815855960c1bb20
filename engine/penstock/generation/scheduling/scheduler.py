"""Scheduler: which tokens of which sequences make up the next step. Numbers only: no torch, no clock.

There are no phases. Every sequence has pending tokens (a prompt, the last sampled token, or everything after
a preemption), and a step takes as many as fit:

- Riders come first: the sequences with one pending token.
- Of the tokens that are left, each prompt is owed a few, so that all prompts advance in every step. The
  prompt that has run longest is owed half, so that it ends in at most twice the time. The rest goes to the
  shortest prompt first, so that a short prompt does not wait for a long one.
- A prompt that is seen both ways can't be cut: a step computes all of it. The step's first such prompt
  comes in whatever is left, and the step is longer than its limit by the riders at most.
- What is still left is for drafts: guesses of what follows a sequence's tokens, computed with them. update()
  learns which guesses were right.

Where machines compute one after the other, several steps are on their way at once (`num_groups`), and end in
the order in which they began. The riders are divided among them, a prompt's chunks follow each other, and
drafts are for a step that has the machines to itself. Each machine computes the steps in their order, so
blocks may change hands while steps are on their way. A step that would take blocks from a sequence on its way
waits until nothing is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import replace

from penstock.generation.blocks.block_manager import BlockManager
from penstock.generation.blocks.draft_blocks import DraftBlocks
from penstock.generation.chosen import Chosen
from penstock.generation.drafting.drafter import NO_DRAFTS, Drafter
from penstock.generation.scheduling.admission import Admission
from penstock.generation.scheduling.batch import NOTHING_SCHEDULED, Batch, ScheduledSequence
from penstock.generation.scheduling.fair_queue import OUTPUT_WEIGHT
from penstock.generation.scheduling.rope_lengths import RopeLengths
from penstock.generation.scheduling.step_limit import MIN_CHUNK, StepLimit
from penstock.generation.sequence import FinishReason, Sequence
from penstock.spec import RopeSpec


class Scheduler:
    """Decides step after step, and notes what each step computed."""

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        step_time_target_s: float = 0.0,
        predict_s: Callable[[int], float] = lambda num_tokens: 0.0,
        rope: RopeSpec | None = None,
        drafter: Drafter = NO_DRAFTS,
        num_groups: int = 1,
    ) -> None:
        """step_time_target_s: seconds that a step should take at most; 0: no limit. predict_s: tokens of a
        step -> seconds; more tokens never take less. `rope` is the model's; it says when a sequence's keys
        must be computed again. num_groups: steps that are on their way at once."""
        self.block_manager = block_manager
        self.limit = StepLimit(max_num_batched_tokens, step_time_target_s, predict_s)
        self._rope_lengths = RopeLengths(rope)
        self.admission = Admission(block_manager, max_num_seqs, self._rope_lengths, max_num_batched_tokens)
        self._drafter = drafter
        self._draft_blocks = DraftBlocks(block_manager)
        self._num_groups = num_groups
        self._num_in_flight = 0

    def __iter__(self) -> Iterator[Sequence]:
        """All sequences that are not finished."""
        return iter(self.admission)

    @property
    def has_work(self) -> bool:
        return bool(self.admission.running or self.admission.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. It must be able to run alone: all blocks together hold it at its longest."""
        self.admission.add(sequence)

    def schedule(self) -> Batch:
        """Decide the next step and reserve its blocks. The batch is empty only if there is no work, or if all
        work waits: for blocks from or to disk, or for steps on their way. The next call is update() or
        rollback(), or (with several groups) launch()."""
        self.admission.look_up()
        self.admission.make_way()
        may_admit = self.admission.grow_running()
        if self.admission.is_held_up:
            return NOTHING_SCHEDULED
        running = self.admission.running
        riders = [each for each in running if each.num_pending_tokens == 1 and not each.is_in_step]
        budget = self.limit.num_tokens(len(riders))
        most = min(budget, -(-len(running) // self._num_groups))
        scheduled = {sequence: self._take(sequence, 1) for sequence in riders[:most]}
        budget -= len(scheduled)
        while owed := self._owe(budget, scheduled, may_admit):
            for item in self._share(owed, budget):
                scheduled[item.sequence] = item
                budget -= item.num_new_tokens
        if not self._num_in_flight:
            self._draft(scheduled, max(0, budget))
        copies, encoded = self.block_manager.take_copies(), self.admission.encoder_turns.take()
        states = self.block_manager.states.take_copies()
        return Batch(tuple(scheduled.values()), copies, encoded, states, self._drafter.num_followers)

    def launch(self, batch: Batch) -> Batch:
        """A step of several is on its way: its tensors are made. Returns the part of it that update() gets
        when it ends. The other sequences go on at once: chunks of prompts from which nothing is wanted."""
        self._num_in_flight += 1
        rest = tuple(item for item in batch.scheduled if item.num_rows)
        for item in batch.scheduled:
            if item.num_rows:
                item.sequence.is_in_step = True
            else:
                item.sequence.advance(item.num_new_tokens)
        return replace(batch, scheduled=rest)

    def reset(self) -> None:
        """All steps on their way are lost, with all keys and values. Every running sequence waits, and
        computes its tokens again."""
        self._num_in_flight = 0
        self._draft_blocks.end_step()
        self.block_manager.forget_all()
        for sequence in reversed(list(self.admission.running)):
            sequence.is_in_step = False
            if sequence in self.admission.running:  # it may have been suspended with another one of its group
                self.admission.suspend(sequence)

    def update(self, batch: Batch, chosen: List[Chosen]) -> list[tuple[Sequence, Chosen]]:
        """A step was computed, and `chosen` has what was chosen for each of its sequences. The step's tokens
        are in the cache now, and so are the drafts that were right. Returns the sequences that gained
        something; the code that makes text of the tokens appends them."""
        gained, waiting = [], self.admission.waiting
        self._num_in_flight = max(0, self._num_in_flight - 1)
        for item, choice in zip(batch.scheduled, chosen, strict=True):
            sequence = item.sequence
            sequence.is_in_step = False
            if sequence.finish_reason is not None:  # nobody waited for the step
                continue
            if item.drafts or choice.followers:
                self._accept(item, choice)
            sequence.advance(item.num_new_tokens)
            if choice.scores and sequence.prompt_scores is not None:
                sequence.prompt_scores.add(item.scored.start, choice.scores)
            if item.is_sampled:
                waiting.charge(sequence.request.client, OUTPUT_WEIGHT * max(1, len(choice.tokens)))
                gained.append((sequence, choice))
        self._draft_blocks.end_step()
        self.block_manager.prefix_cache.confirm()
        return gained

    def rollback(self, batch: Batch) -> None:
        """A step was not computed, or only in part. Its sequences wait, and compute again what the prefix
        cache does not hold from earlier steps."""
        self._draft_blocks.end_step()
        self.block_manager.prefix_cache.rollback()
        for item in reversed(batch.scheduled):
            # A sequence may have been suspended with another member of its group.
            if item.sequence in self.admission.running:
                self.admission.suspend(item.sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence with its group, running or waiting, and take the blocks back."""
        self.admission.finish(sequence, reason)

    def _owe(
        self, budget: int, others: Mapping[Sequence, ScheduledSequence], may_admit: bool
    ) -> dict[Sequence, int]:
        """Prompts that advance beside the others, and by how many tokens at least: half the budget for the
        prompt that has run longest, a little for each of the rest. New prompts are admitted while there are
        tokens for them."""
        waiting = self.admission.waiting
        running = self.admission.running
        # A beam that waits for the rest of its group has no pending tokens.
        prompts = [
            each for each in running
            if each not in others and each.num_pending_tokens > 1 and not each.is_in_step
        ]  # fmt: skip
        half = budget // 2
        # There may be more riders than when the prompts came in: each prompt gets less then, rather than the
        # last one nothing.
        chunk = max(1, min(MIN_CHUNK, half // max(1, len(prompts) - 1)))
        owed: dict[Sequence, int] = {}
        is_alone = budget > 0 and all(item.num_new_tokens == 1 for item in others.values())
        for sequence in prompts:
            due = min(sequence.num_pending_tokens, chunk if owed else budget - half)
            due = max(due, sequence.num_whole_tokens)
            if 0 < due <= budget - sum(owed.values()) or (due and is_alone and not owed):
                owed[sequence] = due
        while may_admit and (first := waiting.first):
            due = min(first.num_tokens, MIN_CHUNK if owed else budget - half)
            due = max(due, first.num_whole_tokens)
            has_room = 0 < due <= budget - sum(owed.values()) or (is_alone and not owed)
            if not has_room or not self.admission.admit(first):
                break
            owed[first] = min(due, first.num_pending_tokens)
        return owed

    def _share(self, owed: dict[Sequence, int], budget: int) -> Iterator[ScheduledSequence]:
        """Each prompt gets what it is owed, and the shortest first what is left. What one prompt computes in
        this step the next prompts need not."""
        left = max(0, budget - sum(owed.values()))
        for sequence in sorted(owed, key=lambda each: (each.request.priority, each.num_pending_tokens)):
            self.admission.adopt(sequence)
            room = owed[sequence] + left
            count = min(sequence.num_pending_tokens, room)
            left = room - count
            yield self._take(sequence, count)

    def _take(self, sequence: Sequence, num_new_tokens: int) -> ScheduledSequence:
        end = sequence.num_computed_tokens + num_new_tokens
        saves = self.block_manager.prefix_cache.register(sequence, end)
        replayed = self.block_manager.states.guesses.replay(sequence)
        scheduled = ScheduledSequence.of(sequence, num_new_tokens)
        return scheduled._replace(saves=saves, replayed=replayed) if saves or replayed else scheduled

    def _draft(self, scheduled: dict[Sequence, ScheduledSequence], budget: int) -> None:
        """Add guesses to what is scheduled: as many as have room in the step, in the answer (which takes one
        token more than the guesses), in free blocks and, of models with recurrent states, in GuessRows."""
        budget = self.block_manager.states.guesses.within(budget)
        ends = (
            sequence for sequence, item in scheduled.items() if item.is_sampled and sequence.group is None
        )
        num_tokens = sum(item.num_new_tokens for item in scheduled.values())
        for sequence, guess in self._drafter.propose(ends, num_tokens, budget).items():
            depth = min(guess.num_nodes, sequence.max_total_tokens - sequence.num_tokens - 1)
            while depth > 0 and not self._rope_lengths.keeps(sequence, depth):
                depth -= 1  # other frequencies would need all keys computed again
            drafts = guess.within(max(0, budget), max(0, depth)).in_runs()
            scheduled[sequence] = self._draft_blocks.place(scheduled[sequence], drafts)
            budget -= scheduled[sequence].drafts.num_nodes

    def _accept(self, item: ScheduledSequence, choice: Chosen) -> None:
        """Drafts may have been computed, and some of them may have been right."""
        right = item.drafts.follow(token.token_id for token in choice.tokens[: choice.num_right])
        self._drafter.learn(item.sequence, item.drafts, right, choice.followers)
        if not item.drafts:
            return
        accepted = right[: choice.num_accepted]
        self._draft_blocks.accept(item, accepted)
        item.sequence.advance(len(accepted))
