"""The room that a waiting sequence needs, beside what it really takes when it comes in."""

from __future__ import annotations

import pytest

from penstock.generation.blocks.block_manager import BlockManager
from penstock.generation.blocks.state_pool import StatePool
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.scheduling.sequence_group import SequenceGroup
from penstock.generation.sequence import Sequence

BLOCK_SIZE = 16


def preempted(blocks: BlockManager, sequence_id: int, num_prompt: int, num_computed: int) -> Sequence:
    """A sequence that lost its blocks when so many of its tokens were computed, and one more was chosen."""
    sequence = Sequence(sequence_id, GenerationRequest(range(num_prompt), SamplingParams()), 100)
    for token_id in range(num_prompt, num_computed):
        sequence.append(token_id)
    assert blocks.grow(sequence)
    blocks.prefix_cache.register(sequence, num_computed)
    sequence.advance(num_computed)
    sequence.append(num_computed)
    blocks.departures.leave([sequence])
    blocks.release(sequence)
    sequence.restart()
    return sequence


def come_in(blocks: BlockManager, sequence: Sequence) -> bool:
    """Whether there was room for a sequence whose blocks are looked up and given."""
    sequence.skip_to(blocks.adopt(sequence))
    return blocks.grow(sequence)


def leave_free(blocks: BlockManager, num_free: int) -> None:
    """Others take all blocks but so many."""
    while blocks.pool.num_free > num_free:
        blocks.pool.take()


@pytest.mark.parametrize("num_free", [0, 1])
@pytest.mark.parametrize(("num_computed", "num_needed"), [(20, 1), (24, 1), (31, 1), (32, 1)])
def test_who_comes_back_to_a_shared_block_needs_room_for_its_copy(
    num_computed: int, num_needed: int, num_free: int
) -> None:
    """Or for the block behind it, where the shared block is full."""
    blocks = BlockManager(10, BLOCK_SIZE)
    first, second = (preempted(blocks, number, 18, num_computed) for number in (0, 1))
    assert come_in(blocks, first)
    leave_free(blocks, num_free)
    assert blocks.num_missing(second) == num_needed
    assert come_in(blocks, second) == (num_needed <= num_free)
    if num_free:
        copied = num_computed % BLOCK_SIZE > 0
        assert len(blocks.take_copies()) == copied and blocks.pool.num_free == 0
        assert first.block_table[-1] != second.block_table[-1]


def test_a_block_that_nobody_else_has_is_not_copied() -> None:
    blocks = BlockManager(10, BLOCK_SIZE)
    sequence = preempted(blocks, 0, 18, 20)
    leave_free(blocks, 2)
    assert blocks.num_missing(sequence) == 2 and come_in(blocks, sequence)
    assert not blocks.take_copies() and blocks.pool.num_free == 0


def test_the_members_of_a_group_copy_each_others_block() -> None:
    """Both find the same two free blocks: two blocks for the first, and a copy for the second."""
    blocks = BlockManager(10, BLOCK_SIZE)
    first, second = (preempted(blocks, number, 18, 20) for number in (0, 1))
    group = second.group = SequenceGroup(first, 2)
    group.members.append(second)
    leave_free(blocks, 3)
    assert blocks.num_missing(first) == 3, "more than all their blocks would be awaited forever"
    assert come_in(blocks, first) and come_in(blocks, second)
    assert len(blocks.take_copies()) == 1 and blocks.pool.num_free == 0


def test_a_prompt_that_ends_in_a_shared_block_is_not_copied() -> None:
    """Its last token is written there once more, with the same keys and values."""
    blocks = BlockManager(10, BLOCK_SIZE)
    one, other = (Sequence(n, GenerationRequest(range(20), SamplingParams()), 100) for n in (0, 1))
    assert come_in(blocks, one)
    blocks.prefix_cache.register(one, 20)
    leave_free(blocks, 0)
    assert blocks.num_missing(other) == 0 and come_in(blocks, other)
    assert one.block_table == other.block_table


def test_nothing_is_found_once_all_is_forgotten() -> None:
    """No block, and no copy of a recurrent state."""
    manager = BlockManager(8, 16, states=StatePool(4, 2))
    assert manager.states.save(b"key") is not None
    manager.states.end_step(is_computed=True)
    assert b"key" in manager.states
    manager.forget_all()
    assert b"key" not in manager.states
