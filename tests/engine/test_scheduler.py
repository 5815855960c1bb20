"""The scheduler against its invariants, on random work: nothing lost, nothing shared, all blocks back."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.generation.block_manager import BlockManager
from penstock.generation.scheduler import Scheduler
from penstock.generation.sequence import FinishReason, SamplingParams, Sequence


def scheduler(num_blocks: int, max_num_seqs: int = 8, max_num_batched_tokens: int = 32) -> Scheduler:
    return Scheduler(BlockManager(num_blocks, 16), max_num_seqs, max_num_batched_tokens)


def sequence(sequence_id: int, num_prompt: int, num_output: int = 8) -> Sequence:
    return Sequence(sequence_id, [7] * num_prompt, SamplingParams(), num_prompt + num_output)


def run_step(decider: Scheduler) -> list[Sequence]:
    """Schedule, pretend to compute, append a token to each sampled sequence, finish those at their end."""
    batch = decider.schedule()
    sampled = batch.sampled
    decider.advance(batch)
    for seq in sampled:
        seq.token_ids.append(1)
        if seq.num_tokens >= seq.max_total_tokens:
            decider.finish(seq, FinishReason.LENGTH)
    return list(sampled)


def test_a_long_prompt_advances_by_chunks_and_is_sampled_once() -> None:
    decider = scheduler(num_blocks=10)
    decider.add(long := sequence(0, 70))
    sizes = []
    while not long.num_output_tokens:
        batch = decider.schedule()
        sizes.append(batch.num_tokens)
        assert bool(batch.sampled) == (sum(sizes) == 70)
        decider.advance(batch)
        if batch.sampled:
            long.token_ids.append(1)
    assert sizes == [32, 32, 6]


def test_pending_prompts_and_single_tokens_share_a_step() -> None:
    decider = scheduler(num_blocks=10)
    decider.add(first := sequence(0, 3))
    run_step(decider)
    decider.add(second := sequence(1, 50))
    batch = decider.schedule()
    assert [(item.sequence, item.num_new_tokens) for item in batch.scheduled] == [(first, 1), (second, 31)]
    assert batch.sampled == (first,)


def test_the_youngest_gives_way_and_resumes_where_it_was() -> None:
    decider = scheduler(num_blocks=4)
    decider.add(old := sequence(0, 31, num_output=20))
    decider.add(young := sequence(1, 30, num_output=10))
    while not decider.num_preemptions:
        run_step(decider)
    tokens = list(young.token_ids)
    assert young.num_computed_tokens == 0 and not young.block_table
    assert decider.waiting[0] is young and decider.running == [old]
    while decider.has_work:
        run_step(decider)
        assert old.num_computed_tokens, "the older one gave way"
    assert young.token_ids[: len(tokens)] == tokens
    assert young.num_output_tokens == 10


def test_admission_is_in_order_and_only_of_what_fits() -> None:
    decider = scheduler(num_blocks=4)
    for index, size in enumerate((40, 60, 5)):
        decider.add(sequence(index, size))
    run_step(decider)
    # 60 tokens don't fit beside 40; the small one behind them must not overtake.
    assert [seq.sequence_id for seq in decider.running] == [0]


def test_max_num_seqs_is_kept() -> None:
    decider = scheduler(num_blocks=100, max_num_seqs=3)
    for index in range(5):
        decider.add(sequence(index, 2))
    assert len(decider.schedule().scheduled) == 3


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40), st.integers(0, 30)), max_size=12),
    num_blocks=st.integers(7, 30),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 64),
    aborts=st.sets(st.integers(0, 11)),
)
def test_random_work_ends_whole(
    prompts: list[tuple[int, int, int]],
    num_blocks: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    aborts: set[int],
) -> None:
    """7 blocks of 16 hold the largest sequence (100 tokens), so everything can run."""
    decider = scheduler(num_blocks, max_num_seqs, max_num_batched_tokens)
    sequences = [sequence(i, size, output) for i, (size, output, _) in enumerate(prompts)]
    arrivals = {i: step for i, (_, _, step) in enumerate(prompts)}
    limit = sum(seq.max_total_tokens for seq in sequences) * (len(sequences) + 1) + 40
    for step in range(limit):
        for seq in sequences:
            if arrivals[seq.sequence_id] == step:
                decider.add(seq)
        for index in aborts:
            if index < len(sequences) and step == arrivals[index] + 3 and not sequences[index].is_finished:
                decider.finish(sequences[index], FinishReason.ABORT)
        had_work = decider.has_work
        batch_tokens = check_step(decider, max_num_batched_tokens)
        assert batch_tokens or not had_work, "work, but an empty step: it would spin for ever"
        if step > 30 and not decider.has_work:
            break
    assert all(seq.is_finished for seq in sequences)
    assert decider.block_manager.num_free == num_blocks
    for seq in sequences:
        if seq.finish_reason is FinishReason.LENGTH:
            assert seq.num_tokens == seq.max_total_tokens


def check_step(decider: Scheduler, max_num_batched_tokens: int) -> int:
    """One step with its invariants; the number of tokens in it."""
    batch = decider.schedule()
    assert batch.num_tokens <= max_num_batched_tokens
    assert len(decider.running) <= decider.max_num_seqs
    owned = [block for seq in decider for block in seq.block_table]
    assert len(owned) == len(set(owned)), "two sequences own one block"
    assert len(owned) + decider.block_manager.num_free == decider.block_manager.num_blocks
    for item in batch.scheduled:
        end = item.sequence.num_computed_tokens + item.num_new_tokens
        assert 0 < item.num_new_tokens <= item.sequence.num_pending_tokens
        assert len(item.sequence.block_table) * 16 >= end
    sampled = batch.sampled
    decider.advance(batch)
    for seq in sampled:
        seq.token_ids.append(1)
        if seq.num_tokens >= seq.max_total_tokens:
            decider.finish(seq, FinishReason.LENGTH)
    return batch.num_tokens
