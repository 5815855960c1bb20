"""Groups of sequences that branch, on invented work, with the scheduler's twin of the KV cache: what a member
attends to is its own tokens. All members of a group run, or all wait."""

from __future__ import annotations

import random

import pytest
from test_scheduler import BLOCK_SIZE, Guesses, PlainCache, check, choose, scheduler, sequence

from penstock.generation.scheduling.batch import Batch
from penstock.generation.scheduling.scheduler import Scheduler
from penstock.generation.scheduling.sequence_group import SequenceGroup, branch
from penstock.generation.sequence import FinishReason, Sequence


class Search:
    """A group that goes on as any of its members, as often as it likes."""

    def __init__(self, decider: Scheduler, first: Sequence, width: int, dice: random.Random) -> None:
        self.decider, self.width, self.dice = decider, width, dice
        self.group = SequenceGroup(first, width)
        self.done: set[Sequence] = set()
        decider.add(first)

    def take(self, member: Sequence) -> None:
        """A step has computed all of a member's tokens."""
        self.done.add(member)
        if any(each.num_pending_tokens or each not in self.done for each in self.group.members):
            return
        if member.num_tokens + 1 >= member.max_total_tokens:
            return self.decider.finish(member, FinishReason.LENGTH)
        branches = [(parent, branch(parent)) for parent in self.parents()]
        for number, (_, child) in enumerate(branches):
            child.append(number)
        self.decider.admission.replace(self.group, branches)

    def parents(self) -> list[Sequence]:
        return [self.dice.choice(self.group.members) for _ in range(self.dice.randint(1, self.width))]


class SteadySearch(Search):
    """A group of four members, each of which goes on as one."""

    def parents(self) -> list[Sequence]:
        return (self.group.members * 4)[:4]


def run_step(
    decider: Scheduler, cache: PlainCache, searches: list[Search], is_failing: bool = False
) -> Batch:
    batch = decider.schedule()
    check(decider, batch)
    cache.compute(batch, is_failing)
    if is_failing:
        decider.rollback(batch)
        return batch
    for seq, choice in decider.update(batch, [choose(item) for item in batch.scheduled]):
        if seq.group is not None:
            next(each for each in searches if each.group is seq.group).take(seq)
            continue
        seq.append(choice.tokens[0].token_id)
        if seq.num_tokens >= seq.max_total_tokens:
            decider.finish(seq, FinishReason.LENGTH)
    return batch


@pytest.mark.parametrize("is_caching", [True, False])
def test_members_branch_and_attend_to_their_own_tokens(is_caching: bool) -> None:
    assert sum(num_preemptions(random.Random(seed), is_caching) for seed in range(20)) > 5


def num_preemptions(dice: random.Random, is_caching: bool) -> int:
    # The widest group has room for its longest members, three blocks each, if it is alone.
    decider = scheduler(num_blocks=12, max_num_seqs=6, max_num_batched_tokens=8, is_caching=is_caching)
    cache, searches, num_steps = PlainCache(decider), list[Search](), 0
    for index in range(8):
        made = sequence(index, dice.choice((1, 15, 16, 30)), 17, priority=-dice.randint(0, 2))
        if index % 2:
            decider.add(made)
        else:
            searches.append(Search(decider, made, dice.randint(1, 4), dice))
        for _ in range(dice.randint(0, 9)):
            run_step(decider, cache, searches, is_failing=dice.random() < 0.1)
            check_groups(decider, searches)
    while decider.has_work:
        num_steps += 1
        assert run_step(decider, cache, searches), "work, but an empty step: it would spin for ever"
        check_groups(decider, searches)
        assert num_steps < 2000
    assert decider.block_manager.pool.num_free == 12, "somebody keeps blocks"
    return decider.admission.num_preemptions


def check_groups(decider: Scheduler, searches: list[Search]) -> None:
    running = decider.admission.running
    for search in searches:
        members = search.group.members
        num_running = sum(member in running for member in members)
        assert num_running in (0, len(members))
        if num_running:
            first = running.index(members[0])
            assert running[first : first + len(members)] == members


def test_the_prompt_is_computed_once_and_its_blocks_are_shared() -> None:
    decider = scheduler(num_blocks=40, max_num_batched_tokens=100)
    cache = PlainCache(decider)
    search = SteadySearch(decider, sequence(0, 60, 10), 4, random.Random(3))
    sizes = [run_step(decider, cache, [search]).num_tokens for _ in range(4)]
    assert sizes == [60, 4, 4, 4]
    # Three full blocks of the prompt, and each member's own last block.
    assert decider.block_manager.num_blocks - decider.block_manager.pool.num_free == 3 + 4
    assert len(search.group.members[0].block_table) == -(-64 // BLOCK_SIZE)


def test_a_member_that_is_dropped_frees_its_blocks_at_once() -> None:
    decider = scheduler(num_blocks=40, is_caching=False)
    cache = PlainCache(decider)
    search = SteadySearch(decider, sequence(0, 16, 30), 4, random.Random(3))
    for _ in range(3):
        run_step(decider, cache, [search])
    assert decider.block_manager.pool.num_free == 40 - 1 - 4
    (survivor, *_) = members = search.group.members
    child = branch(survivor)
    child.append(7)
    decider.admission.replace(search.group, [(survivor, child)])
    assert decider.block_manager.pool.num_free == 40 - 1 - 1 and members != search.group.members
    decider.finish(child, FinishReason.ABORT)
    assert decider.block_manager.pool.num_free == 40 and not decider.has_work


def test_nobody_gives_way_to_a_group_that_has_no_place_even_then() -> None:
    """Of four places one is taken by a sequence that stays, and the group needs four."""
    decider = scheduler(num_blocks=100, max_num_seqs=4, max_num_batched_tokens=64)
    stays, lower = sequence(0, 8, 8, priority=0), sequence(1, 8, 20, priority=1)
    decider.add(stays)
    decider.add(lower)
    cache = PlainCache(decider)
    run_step(decider, cache, [])
    search = SteadySearch(decider, sequence(2, 8, 8, priority=0), 4, random.Random(0))
    run_step(decider, cache, [search])
    assert lower in decider.admission.running and decider.admission.num_preemptions == 0
    decider.finish(stays, FinishReason.STOP)
    run_step(decider, cache, [search])
    assert decider.admission.running == search.group.members and lower.was_preempted


def test_blocks_that_members_share_count_once() -> None:
    """The group has 8 blocks, of which its 4 members share most; a sequence that needs 9 waits."""
    decider = scheduler(num_blocks=8, max_num_seqs=8, max_num_batched_tokens=256, is_caching=False)
    search = SteadySearch(decider, sequence(0, 4 * BLOCK_SIZE, 8, priority=1), 4, random.Random(0))
    cache = PlainCache(decider)
    for _ in range(3):
        run_step(decider, cache, [search])
    assert sum(len(each.block_table) for each in search.group.members) > 9
    decider.add(sequence(9, 9 * BLOCK_SIZE, 4, priority=0))
    run_step(decider, cache, [search])
    assert decider.admission.running == search.group.members and decider.admission.num_preemptions == 0


def test_a_member_has_no_drafts() -> None:
    guesses = Guesses(random.Random(0))
    guesses.guess = lambda seq: [9, 9]  # type: ignore[method-assign]
    decider = scheduler(num_blocks=40, drafter=guesses)
    search = SteadySearch(decider, sequence(0, 16, 30), 4, random.Random(3))
    decider.add(plain := sequence(1, 16, 30))
    cache, num_drafted = PlainCache(decider), 0
    for _ in range(12):
        batch = run_step(decider, cache, [search])
        drafted = {item.sequence for item in batch.scheduled if item.drafts}
        assert drafted <= {plain}
        num_drafted += len(drafted)
    assert num_drafted
