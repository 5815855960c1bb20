"""The scheduler on invented work. Its twin of the KV cache is one Python value for each slot, which says what
all the tokens before it were: what a sequence would attend to must be its own tokens, whoever computed
them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.generation.blocks.block_manager import BlockManager
from penstock.generation.chosen import NOTHING, Chosen, SampledToken
from penstock.generation.drafting.draft_tree import DraftTree
from penstock.generation.drafting.drafter import NO_DRAFTS, Drafter
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.scheduling.batch import Batch, ScheduledSequence
from penstock.generation.scheduling.scheduler import Scheduler
from penstock.generation.sequence import FinishReason, Sequence
from penstock.spec import RopeSpec

BLOCK_SIZE = 16


def scheduler(
    num_blocks: int,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    is_caching: bool = True,
    rope: RopeSpec | None = None,
    drafter: Drafter = NO_DRAFTS,
) -> Scheduler:
    blocks = BlockManager(num_blocks, BLOCK_SIZE, is_caching)
    return Scheduler(blocks, max_num_seqs, max_num_batched_tokens, rope=rope, drafter=drafter)


def sequence(
    sequence_id: int, num_prompt: int, num_output: int = 8, priority: int = 0, client: str = ""
) -> Sequence:
    """A prompt like no other's."""
    prompt = [1000 + sequence_id] * num_prompt
    request = GenerationRequest(prompt, SamplingParams(), priority=priority, client=client)
    return Sequence(sequence_id, request, num_prompt + num_output)


class PlainCache:
    """What a step writes and what its tokens see, checked."""

    def __init__(self, decider: Scheduler) -> None:
        self.decider = decider
        self.rope = decider.admission._rope_lengths.rope
        self.slots: dict[tuple[int, int], object] = {}

    def value(self, seq: Sequence, tokens: list[int], position: int) -> object:
        frequencies = [self.frequencies(seq, at) for at in range(position + 1)] if self.rope else []
        return seq.request.cache_salt, tuple(tokens[: position + 1]), tuple(frequencies)

    def frequencies(self, seq: Sequence, position: int) -> int:
        """Which ones turn a key: as spec.py says it, and what the kernels are told must lead there."""
        assert self.rope is not None
        border, told = self.rope.short_length, seq.rope_length
        if self.rope.scaling == "longrope":
            assert (told > 0) == (seq.num_tokens > border)
            return int(seq.num_tokens > border)
        longest = max(position + 1, seq.num_prompt_tokens, border)
        assert longest == max(position + 1, told, border)
        return longest

    def compute(self, batch: Batch, is_failing: bool = False) -> None:
        for source, destination in batch.block_copies:
            for offset in range(BLOCK_SIZE):
                self.slots[destination, offset] = self.slots.get((source, offset))
        for item in batch.scheduled:
            for first, tokens, table in runs_of(item):
                for position in range(first, len(tokens)):
                    slot = table[position // BLOCK_SIZE], position % BLOCK_SIZE
                    value = self.value(item.sequence, tokens, position)
                    # A token whose K and V are there already gets the same bits again, in each layer that is
                    # reached.
                    if not is_failing or self.slots.get(slot) != value:
                        self.slots[slot] = "half computed" if is_failing else value
        for item in batch.scheduled if not is_failing else ():
            for _, tokens, table in runs_of(item):
                for position in range(len(tokens)):
                    slot = table[position // BLOCK_SIZE], position % BLOCK_SIZE
                    own = self.value(item.sequence, tokens, position)
                    assert self.slots[slot] == own, "these are not its own tokens"


def runs_of(item: ScheduledSequence) -> list[tuple[int, list[int], list[int]]]:
    """What a step writes: the first position that is written, all tokens up to the last one, and their
    blocks."""
    seq, drafts = item.sequence, item.drafts
    first_run = drafts.runs[0] if drafts else ()
    text = seq.token_ids[: seq.num_computed_tokens + item.num_new_tokens]
    runs = [(seq.num_computed_tokens, text + [drafts.token_ids[node] for node in first_run], seq.block_table)]
    for branch in item.branches:
        path = [drafts.token_ids[node] for node in drafts.path(branch.nodes[-1])]
        runs.append((branch.first_copied, text + path, branch.block_table))
    return runs


def end_of(item: ScheduledSequence) -> int:
    """Tokens that are computed when the step is over, those of the longest path of drafts included."""
    depth = max(item.drafts.depths, default=0)
    return item.sequence.num_computed_tokens + item.num_new_tokens + depth


def check(decider: Scheduler, batch: Batch) -> None:
    """The limits, and the books of the blocks."""
    pool = decider.block_manager.pool
    assert batch.num_tokens <= decider.limit.max_num_batched_tokens
    assert len(decider.admission.running) <= decider.admission.max_num_seqs
    assert len({item.sequence for item in batch.scheduled}) == len(batch.scheduled)
    owners = Counter(block for seq in decider for block in seq.block_table)
    branches = [branch for item in batch.scheduled for branch in item.branches]
    owners.update({block for branch in branches for block in branch.block_table} - set(owners))
    assert all(len(seq.block_table) == len(set(seq.block_table)) for seq in decider)
    assert owners == {block: n for block, n in enumerate(pool.num_owners) if n}
    assert set(owners) & set(pool._free) == set() and len(owners) + pool.num_free == pool.num_blocks
    assert not any(seq.block_table or seq.num_computed_tokens for seq in decider.admission.waiting)
    assert {key: block for block, (key, _) in pool._keys.items()} == pool._found
    for item in batch.scheduled:
        assert 0 < item.num_new_tokens <= item.sequence.num_pending_tokens
        for _, tokens, table in runs_of(item):
            assert len(table) * BLOCK_SIZE >= len(tokens) and len(set(table)) == len(table)
        assert item.is_sampled or not item.drafts
        assert not item.drafts or end_of(item) < item.sequence.max_total_tokens


def next_token(seq: Sequence, ahead: int = 0) -> int:
    """Equal prompts of equal parity go on alike."""
    return (seq.num_tokens + ahead) % 3 + seq.sequence_id % 2


class Guesses(Drafter):
    """A drafter that is right as long as it likes, in some branch of a tree, and often guesses more than
    there is room for."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice

    def propose(self, sequences: Iterable[Sequence], num_tokens: int, room: int) -> dict[Sequence, DraftTree]:
        return {each: self.tree(each) for each in sequences if self.dice.random() < 0.7}

    def tree(self, seq: Sequence) -> DraftTree:
        """A chain, and tokens that are wrong beside its nodes and beside each other."""
        chain = self.guess(seq)
        token_ids, parents = list(chain), list(range(-1, len(chain) - 1))
        for number in range(self.dice.choice((0, 0, 3, 8))):
            place = self.dice.randrange(len(token_ids) + 1)  # a wrong node comes before the chain's node
            parent = self.dice.randrange(-1, place)
            token_ids.insert(place, 10 + number)
            parents = [p + (p >= place) for p in parents]
            parents.insert(place, parent)
        return DraftTree(tuple(token_ids), tuple(parents))

    def guess(self, seq: Sequence) -> list[int]:
        right = [next_token(seq, ahead) for ahead in range(self.dice.choice((0, 1, 3, 20, 40)))]
        return right + [9] * self.dice.choice((0, 0, 1, 5, 20))


def choose(item: ScheduledSequence) -> Chosen:
    """As the sampler does it."""
    if not item.is_sampled:
        return NOTHING
    right = [next_token(item.sequence, ahead) for ahead in range(item.drafts.num_nodes + 1)]
    num_right = len(item.drafts.follow(right))
    tokens = [SampledToken(token_id, None) for token_id in right[: num_right + 1]]
    return Chosen(tuple(tokens), num_drafts=item.drafts.num_nodes, num_right=num_right)


def sampled(batch: Batch) -> list[Sequence]:
    """The sequences that get a token, in order."""
    return [item.sequence for item in batch.scheduled if item.is_sampled]


def run_step(
    decider: Scheduler,
    cache: PlainCache | None = None,
    num_forced: Callable[[], int] = lambda: 0,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Batch:
    """Decide and check a step, pretend to compute it, give each sampled sequence its tokens (and what a
    grammar might add) and end those that are long enough, or stopped by one of their tokens."""
    batch = decider.schedule()
    check(decider, batch)
    if cache is not None:
        cache.compute(batch)
    gained = decider.update(batch, [choose(item) for item in batch.scheduled])
    for item in batch.scheduled:
        if item.drafts:  # what was not accepted is given back
            assert item.sequence.num_pending_tokens <= 0, "one of the tokens that were chosen is pending"
            needed = item.sequence.num_computed_tokens // BLOCK_SIZE + 1
            assert len(item.sequence.block_table) <= needed
    for seq, choice in gained:
        for token in choice.tokens:
            seq.append(token.token_id)
            if is_stopped():
                decider.finish(seq, FinishReason.STOP)
                break
        if seq.finish_reason is None:
            room = seq.max_total_tokens - seq.num_tokens
            for token_id in [next_token(seq) for _ in range(min(room, num_forced()))]:
                seq.append(token_id)
            assert seq.num_pending_tokens > 0
            if seq.num_tokens >= seq.max_total_tokens:
                decider.finish(seq, FinishReason.LENGTH)
    return batch


def run(decider: Scheduler, cache: PlainCache | None = None) -> list[Batch]:
    """Until nothing is left."""
    batches = []
    while decider.has_work:
        batches.append(run_step(decider, cache))
        assert batches[-1], "work, but an empty step: it would spin for ever"
    return batches


def sizes(batch: Batch) -> dict[int, int]:
    return {item.sequence.sequence_id: item.num_new_tokens for item in batch.scheduled}


# ---------------------------------------------------------------- chunks


def test_a_long_prompt_advances_by_chunks_and_is_sampled_once() -> None:
    decider = scheduler(num_blocks=10)
    decider.add(long := sequence(0, 70))
    computed = 0
    for size in (32, 32, 6):
        batch = decider.schedule()
        computed += size
        assert batch.num_tokens == size and bool(sampled(batch)) == (computed == 70)
        decider.update(batch, [NOTHING] * len(batch.scheduled))
    assert long.num_computed_tokens == 70


def test_pending_prompts_and_single_tokens_share_a_step() -> None:
    decider = scheduler(num_blocks=10)
    decider.add(first := sequence(0, 3))
    run_step(decider)
    decider.add(second := sequence(1, 50))
    batch = decider.schedule()
    assert [(item.sequence, item.num_new_tokens) for item in batch.scheduled] == [(first, 1), (second, 31)]
    assert sampled(batch) == [first]


def test_a_short_prompt_does_not_wait_for_a_long_one_nor_stops_it() -> None:
    decider = scheduler(num_blocks=3000, max_num_batched_tokens=512)
    decider.add(sequence(0, 30_000))
    run_step(decider)
    decider.add(sequence(1, 200))
    assert sizes(run_step(decider)) == {1: 200, 0: 312}
    for index in range(2, 40):
        decider.add(sequence(index, 400))
        step = sizes(run_step(decider))
        assert step[0] >= (512 - sum(size for size in step.values() if size == 1)) // 2
        assert len(step) > 2


def test_prompts_of_one_length_end_one_after_the_other() -> None:
    """Sharing alike among four would let all of them wait for the last."""
    decider = scheduler(num_blocks=400, max_num_batched_tokens=500)
    for index in range(4):
        decider.add(sequence(index, 1000))
    first_tokens: list[int] = []
    for step in range(1, 20):
        first_tokens += [step for seq in sampled(run_step(decider)) if seq.num_output_tokens == 1]
    assert len(first_tokens) == 4 and first_tokens[0] <= 3 and first_tokens[-1] <= 9


def test_every_prompt_that_has_begun_advances_in_every_step() -> None:
    decider = scheduler(num_blocks=3000, max_num_batched_tokens=256)
    for index in range(12):
        decider.add(sequence(index, 700 + 100 * index))
    while decider.has_work:
        batch = run_step(decider)
        for seq in decider.admission.running:
            assert sizes(batch).get(seq.sequence_id, 0) >= 1


# ---------------------------------------------------------------- places


def test_the_youngest_gives_way_and_resumes_where_it_was() -> None:
    decider = scheduler(num_blocks=4)
    decider.add(old := sequence(0, 31, num_output=20))
    decider.add(young := sequence(1, 30, num_output=10))
    while not decider.admission.num_preemptions:
        run_step(decider)
    tokens = list(young.token_ids)
    assert young.num_computed_tokens == 0 and not young.block_table
    assert decider.admission.waiting.first is young and decider.admission.running == [old]
    while decider.has_work:
        run_step(decider)
        assert old.num_computed_tokens, "the older one gave way"
    assert young.token_ids[: len(tokens)] == tokens
    assert young.num_output_tokens == 10
    assert (old.num_preemptions, young.num_preemptions) == (0, decider.admission.num_preemptions)


def test_admission_is_in_order_and_only_of_what_fits() -> None:
    decider = scheduler(num_blocks=4)
    for index, size in enumerate((40, 60, 5)):
        decider.add(sequence(index, size))
    run_step(decider)
    # 60 tokens don't fit beside 40; the small one behind them must not overtake.
    assert [seq.sequence_id for seq in decider.admission.running] == [0]


def test_max_num_seqs_is_kept() -> None:
    decider = scheduler(num_blocks=100, max_num_seqs=3)
    for index in range(5):
        decider.add(sequence(index, 2))
    assert len(decider.schedule().scheduled) == 3


# ---------------------------------------------------------------- what is shared


def prompt_of(decider: Scheduler, *prompts: list[int], num_output: int = 8, salt: str = "") -> list[Sequence]:
    """Sequences in the queue; ids go on."""
    start = sum(1 for _ in decider)
    made = [
        Sequence(
            start + index,
            GenerationRequest(prompt, SamplingParams(), cache_salt=salt),
            len(prompt) + num_output,
        )
        for index, prompt in enumerate(prompts)
    ]
    for seq in made:
        decider.add(seq)
    return made


def test_a_prompt_that_begins_alike_is_computed_from_where_it_differs() -> None:
    decider = scheduler(num_blocks=40, max_num_batched_tokens=100)
    cache = PlainCache(decider)
    prompt_of(decider, list(range(40)))
    run(decider, cache)
    (again,) = prompt_of(decider, [*range(40), 7, 8])
    assert sizes(run_step(decider, cache)) == {0: 10} and again.num_cached_tokens == 32
    (other,) = prompt_of(decider, [99, *range(39)])
    assert 40 in sizes(run_step(decider, cache)).values() and not other.num_cached_tokens
    run(decider, cache)


@pytest.mark.parametrize("num_prompt", [1, 15, 16, 17, 32, 40, 1000])
@pytest.mark.parametrize("budget", [40, 100, 5000])
def test_equal_prompts_that_come_together_are_computed_once(num_prompt: int, budget: int) -> None:
    """But for each one's last token, which has the logits, and where a step ends within a block."""
    decider = scheduler(num_blocks=1000, max_num_batched_tokens=budget)
    cache = PlainCache(decider)
    choices = prompt_of(decider, *[list(range(num_prompt))] * 5)
    num_computed = num_steps = 0
    while not all(seq.num_output_tokens for seq in choices):
        batch, num_steps = run_step(decider, cache), num_steps + 1
        num_computed += sum(
            item.num_new_tokens
            for item in batch.scheduled
            if item.sequence.num_output_tokens == item.is_sampled
        )
    assert num_prompt + 4 <= num_computed <= num_prompt + 4 + BLOCK_SIZE * (num_steps - 1)
    assert sum(seq.num_cached_tokens for seq in choices) == 5 * num_prompt - num_computed
    run(decider, cache)
    assert decider.block_manager.pool.num_free == 1000


def test_a_shared_last_block_is_copied_by_all_but_one() -> None:
    decider = scheduler(num_blocks=20, max_num_batched_tokens=100)
    cache = PlainCache(decider)
    choices = prompt_of(decider, *[list(range(20))] * 4)
    assert not run_step(decider, cache).block_copies
    assert decider.block_manager.pool.num_free == 18
    copies = run_step(decider, cache).block_copies
    assert len(copies) == 3 and len({source for source, _ in copies}) == 1
    assert decider.block_manager.pool.num_free == 15
    assert len({seq.block_table[0] for seq in choices}) == 1
    assert len({seq.block_table[1] for seq in choices}) == 4
    run(decider, cache)


def test_a_block_that_fills_up_while_another_takes_it_over() -> None:
    """The one goes on in it with tokens that a grammar forced, the other needs its beginning alone."""
    decider = scheduler(num_blocks=20, max_num_batched_tokens=100)
    cache = PlainCache(decider)
    (one,) = prompt_of(decider, list(range(20)), num_output=30)
    run_step(decider, cache, lambda: 19)
    (other,) = prompt_of(decider, list(range(20)), num_output=30)
    run_step(decider, cache)
    assert other.num_cached_tokens == 19 and one.num_computed_tokens == 40
    run(decider, cache)


def test_what_was_used_least_recently_is_forgotten_first_and_a_prompt_from_its_end() -> None:
    decider = scheduler(num_blocks=8, max_num_batched_tokens=200)
    one, two, three = ([start + i for i in range(63)] for start in (0, 100, 200))
    for prompt in (one, two, one):
        prompt_of(decider, prompt, num_output=1)
        run(decider)
    prompt_of(decider, three[:40], num_output=1)  # takes three blocks of the second
    run(decider)
    found = []
    for prompt in (one, two):
        (seq,) = prompt_of(decider, prompt, num_output=1)
        run_step(decider)
        found.append(seq.num_cached_tokens)
    assert found == [62, 16]


def test_salts_keep_clients_apart() -> None:
    decider = scheduler(num_blocks=40, max_num_batched_tokens=100)
    prompt = list(range(50))
    found = []
    for salt in ("", "a", "a", "b\ud800", ""):
        (seq,) = prompt_of(decider, prompt, num_output=1, salt=salt)
        run(decider)
        found.append(seq.num_cached_tokens)
    assert found == [0, 0, 49, 0, 49]


def test_without_it_nothing_is_shared() -> None:
    decider = scheduler(num_blocks=40, max_num_batched_tokens=100, is_caching=False)
    made = prompt_of(decider, *[list(range(20))] * 3)
    assert run_step(decider).num_tokens == 60 and not any(seq.num_cached_tokens for seq in made)
    other = scheduler(num_blocks=40, max_num_batched_tokens=100)
    (reading,) = prompt_of(other, list(range(20)))
    other.add(Sequence(1, GenerationRequest(range(20), SamplingParams()), 28, first_scored=5))
    assert run_step(other).num_tokens == 40 and not reading.num_cached_tokens


def test_a_preempted_sequence_finds_its_own_again() -> None:
    decider = scheduler(num_blocks=5, max_num_batched_tokens=100)
    cache = PlainCache(decider)
    (old,), (young,) = (prompt_of(decider, [start] * 32, num_output=20) for start in (1, 2))
    while not decider.admission.num_preemptions:
        run_step(decider, cache)
    decider.finish(old, FinishReason.ABORT)
    batch = run_step(decider, cache)
    assert batch.scheduled[0].sequence is young and batch.num_tokens < 16
    assert young.num_cached_tokens == 0
    run(decider, cache)


def test_a_step_that_was_not_computed_leaves_nothing_to_be_found() -> None:
    decider = scheduler(num_blocks=40, max_num_batched_tokens=30)
    cache = PlainCache(decider)
    made = prompt_of(decider, *[list(range(50))] * 3)
    run_step(decider, cache)
    batch = decider.schedule()
    cache.compute(batch, is_failing=True)
    decider.rollback(batch)
    assert decider.block_manager.pool.num_free == 40 and not decider.admission.running
    assert [seq.num_computed_tokens for seq in made] == [0, 0, 0]
    # What the first step computed is still there.
    assert sum(sizes(run_step(decider, cache)).values()) <= 52 - 16
    run(decider, cache)


# ---------------------------------------------------------------- lengths that change keys

LONGROPE, DYNAMIC = (RopeSpec(scaling=scaling, short_length=30) for scaling in ("longrope", "dynamic"))


def test_a_sequence_that_outgrows_its_frequencies_is_computed_again_in_its_place() -> None:
    decider = scheduler(num_blocks=40, max_num_batched_tokens=100, rope=LONGROPE)
    cache = PlainCache(decider)
    (one,) = prompt_of(decider, list(range(28)), num_output=10)
    steps = [sizes(run_step(decider, cache))[0] for _ in range(6)]
    assert steps == [28, 1, 1, 31, 1, 1]
    assert (
        decider.admission.running == [one] and decider.admission.num_preemptions == one.num_preemptions == 0
    )
    run(decider, cache)
    assert decider.block_manager.pool.num_free == 40


def test_dynamic_ntk_computes_nothing_again() -> None:
    decider = scheduler(num_blocks=40, max_num_batched_tokens=100, rope=DYNAMIC)
    cache = PlainCache(decider)
    prompt_of(decider, list(range(28)), num_output=10)
    assert [sizes(run_step(decider, cache))[0] for _ in range(10)] == [28] + 9 * [1]


def test_who_crosses_may_take_blocks_from_the_youngest() -> None:
    """Its old blocks are shared, so that they become nobody's when it leaves them."""
    decider = scheduler(num_blocks=5, max_num_batched_tokens=100, rope=LONGROPE)
    cache = PlainCache(decider)
    prompt_of(decider, *[list(range(28))] * 3, num_output=10)
    run(decider, cache)
    assert decider.admission.num_preemptions and decider.block_manager.pool.num_free == 5


@pytest.mark.parametrize(
    ("rope", "num_second", "num_found"),
    [
        (None, 32, 16), (None, 29, 16),
        (LONGROPE, 29, 16),  # both are short
        (LONGROPE, 31, 0),  # 31 tokens have other frequencies than 30
        (DYNAMIC, 29, 16), (DYNAMIC, 31, 0),
    ],
)  # fmt: skip
def test_keys_of_other_frequencies_are_not_found(
    rope: RopeSpec | None, num_second: int, num_found: int
) -> None:
    decider = scheduler(num_blocks=40, max_num_batched_tokens=100, rope=rope)
    cache = PlainCache(decider)
    prompt_of(decider, list(range(30)), num_output=1)
    run(decider, cache)
    (second,) = prompt_of(decider, [*range(20), *range(100, 80 + num_second)], num_output=1)
    run(decider, cache)
    assert second.num_cached_tokens == num_found


@pytest.mark.parametrize(("rope", "num_found"), [(LONGROPE, 32), (DYNAMIC, 0)])
def test_long_prompts_share_where_their_frequencies_are_the_same(rope: RopeSpec, num_found: int) -> None:
    """LongRoPE has one set for all of them, dynamic NTK one for each length."""
    decider = scheduler(num_blocks=40, max_num_batched_tokens=100, rope=rope)
    cache = PlainCache(decider)
    for num_prompt, found in ((40, 0), (41, num_found), (41, 40)):
        (seq,) = prompt_of(decider, list(range(num_prompt)), num_output=1)
        run(decider, cache)
        assert seq.num_cached_tokens == found


# ---------------------------------------------------------------- drafts


def test_drafts_take_what_is_left_and_what_is_accepted_is_found() -> None:
    class Right(Guesses):
        def tree(self, seq: Sequence) -> DraftTree:
            return DraftTree.chain([next_token(seq, ahead) for ahead in range(40)])

    decider = scheduler(num_blocks=40, max_num_batched_tokens=50, drafter=Right(random.Random(0)))
    decider._drafter.dice.random = lambda: 0.0  # type: ignore[attr-defined]
    cache = PlainCache(decider)
    (one,) = prompt_of(decider, list(range(20)), num_output=60)
    batch = run_step(decider, cache)
    assert (batch.num_tokens, batch.scheduled[0].drafts.num_nodes) == (50, 30)
    assert (one.num_tokens, one.num_computed_tokens, len(one.block_table)) == (51, 50, 4)
    prompt_of(decider, [99] * 40, num_output=2)
    batch = run_step(decider, cache)
    assert sizes(batch) == {0: 1, 1: 40} and [item.drafts.num_nodes for item in batch.scheduled] == [9, 0]
    answered = list(one.token_ids)
    run(decider, cache)
    (again,) = prompt_of(decider, answered, num_output=1)
    run_step(decider, cache)
    assert again.num_cached_tokens >= len(answered) // BLOCK_SIZE * BLOCK_SIZE == 48


def test_nobody_gives_way_to_a_draft() -> None:
    """Two sequences that have all blocks but one, which both would like for their guesses."""

    class Wrong(Guesses):
        def propose(
            self, sequences: Iterable[Sequence], num_tokens: int, room: int
        ) -> dict[Sequence, DraftTree]:
            return {seq: DraftTree.chain([9] * 30) for seq in sequences}

    decider = scheduler(num_blocks=5, max_num_batched_tokens=100, drafter=Wrong(random.Random(0)))
    cache = PlainCache(decider)
    for start in (1, 2):
        prompt_of(decider, [start] * 20, num_output=12)
    batch = run_step(decider, cache)
    assert [item.drafts.num_nodes for item in batch.scheduled] == [
        11,
        11,
    ]  # one token is left for the answer's end
    assert decider.block_manager.pool.num_free == 1
    run(decider, cache)
    assert decider.admission.num_preemptions == 0 and decider.block_manager.pool.num_free == 5


# ---------------------------------------------------------------- all together

PROMPTS = st.tuples(
    st.integers(0, 3),  # which of four texts
    st.integers(1, 60),  # how much of it
    st.integers(1, 40),  # tokens of the answer
    st.integers(0, 30),  # the step in which it comes
    st.integers(-1, 1),  # priority
    st.sampled_from(["", "", "", "a"]),  # salt
)


def text(number: int, length: int) -> list[int]:
    """Texts 0 and 1 begin alike, 2 and 3 at once differ."""
    dice = random.Random(number // 2)
    tokens = [dice.randrange(50) for _ in range(60)]
    return tokens[:length] if number % 2 == 0 else [*tokens[:25], *range(100, 135)][:length]


@pytest.mark.inner
@settings(max_examples=150, deadline=None)
@given(
    asked=st.lists(PROMPTS, max_size=12),
    num_blocks=st.integers(7, 30),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 64),
    aborts=st.sets(st.integers(0, 11)),
    failures=st.sets(st.integers(0, 40), max_size=3),
    seed=st.integers(0, 100),
    is_caching=st.booleans(),
    rope=st.sampled_from([None, None, LONGROPE, DYNAMIC]),
    is_drafting=st.booleans(),
)
def test_random_work_ends_whole(
    asked: list[tuple[int, int, int, int, int, str]],
    num_blocks: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    aborts: set[int],
    failures: set[int],
    seed: int,
    is_caching: bool,
    rope: RopeSpec | None,
    is_drafting: bool,
) -> None:
    """7 blocks of 16 hold the largest sequence (100 tokens), so everything can run."""
    dice = random.Random(seed)
    drafter = Guesses(dice) if is_drafting else NO_DRAFTS
    decider = scheduler(num_blocks, max_num_seqs, max_num_batched_tokens, is_caching, rope, drafter)
    cache = PlainCache(decider)
    sequences, arrivals = [], {}
    for i, (number, length, output, step, priority, salt) in enumerate(asked):
        prompt = text(number, length)
        request = GenerationRequest(
            prompt, SamplingParams(), priority=priority, client=f"{i % 3}", cache_salt=salt
        )
        seq = Sequence(i, request, length + output)
        sequences.append(seq)
        arrivals[i] = step
    limit = sum(seq.max_total_tokens for seq in sequences) * (len(sequences) + 1) + 60
    for step in range(limit):
        for seq in sequences:
            if arrivals[seq.sequence_id] == step:
                decider.add(seq)
        for index in aborts:
            if index < len(sequences) and step == arrivals[index] + 3 and not sequences[index].finish_reason:
                decider.finish(sequences[index], FinishReason.ABORT)
        if step in failures:
            batch = decider.schedule()
            check(decider, batch)
            cache.compute(batch, is_failing=True)
            decider.rollback(batch)
            check(decider, Batch(()))
            continue
        had_work = decider.has_work
        batch = run_step(
            decider, cache, lambda: dice.choice((0, 0, 0, 1, 5, 20)), lambda: dice.random() < 0.01
        )
        assert batch or not had_work, "work, but an empty step: it would spin for ever"
        if step > 40 and not decider.has_work:
            break
    assert all(seq.finish_reason for seq in sequences)
    assert decider.block_manager.pool.num_free == num_blocks
    for seq in sequences:
        if seq.finish_reason is FinishReason.LENGTH:
            assert seq.num_tokens == seq.max_total_tokens
        assert seq.num_cached_tokens < max(1, seq.num_prompt_tokens)
        assert is_caching or not seq.num_cached_tokens


# ---------------------------------------------------------------- step time


def with_target(
    target_s: float, floor_s: float, token_s: float, max_num_batched_tokens: int = 512
) -> Scheduler:
    """A machine on which a step takes max(floor_s, tokens * token_s)."""
    manager = BlockManager(4000, BLOCK_SIZE)
    return Scheduler(
        manager,
        64,
        max_num_batched_tokens,
        target_s,
        lambda num_tokens: max(floor_s, num_tokens * token_s),
    )


@pytest.mark.parametrize(
    ("target_s", "floor_s", "num_tokens"),
    [
        (0.0, 0.5, 512),  # none: throughput
        (1.0, 0.5, 100),  # 100 tokens of 10 ms
        (1.0, 0.0, 100),
        (1.0, 2.0, 200),  # the link takes longer: what fits below its time is free
        (0.1, 0.0, 37),  # five riders and a chunk, whatever it takes
        (60.0, 0.5, 512),
    ],
)
def test_a_step_has_as_many_tokens_as_its_time_allows(
    target_s: float, floor_s: float, num_tokens: int
) -> None:
    decider = with_target(target_s, floor_s, 0.01)
    for index in range(5):
        decider.add(sequence(index, 2, num_output=50))
    run_step(decider)
    decider.add(sequence(9, 30_000))
    batch = run_step(decider)
    assert batch.num_tokens == num_tokens and len(batch.scheduled) == 6


def test_single_tokens_are_computed_whatever_they_take() -> None:
    decider = with_target(0.001, 0.0, 0.01, max_num_batched_tokens=100)
    for index in range(60):
        decider.add(sequence(index, 1, num_output=50))
    while len(decider.admission.running) < 60:
        run_step(decider)
    assert len(sampled(run_step(decider))) == 60


# ---------------------------------------------------------------- who comes first


def test_a_higher_priority_comes_in_first_and_takes_the_place_of_a_lower_one() -> None:
    decider = scheduler(num_blocks=100, max_num_seqs=2, max_num_batched_tokens=100)
    cache = PlainCache(decider)
    for index, priority in enumerate((1, 1, 1, 0)):
        decider.add(sequence(index, 20, num_output=5, priority=priority))
    assert list(sizes(run_step(decider, cache))) == [3, 0]
    decider.add(sequence(4, 20, priority=-1))
    assert sizes(run_step(decider, cache)) == {3: 1, 4: 20}
    order: list[int] = []
    while decider.has_work:
        run_step(decider, cache)
        order += [seq.sequence_id for seq in decider.admission.running if seq.sequence_id not in order]
    assert order == [4, 3, 0, 1, 2] and decider.admission.num_preemptions == 1


def test_blocks_are_taken_from_the_lowest_priority_then_the_youngest() -> None:
    decider = scheduler(num_blocks=6, max_num_batched_tokens=100)
    for index, priority in enumerate((0, 2, 1)):
        decider.add(sequence(index, 30, num_output=60 if index == 0 else 40, priority=priority))
    gone = []
    while len(gone) < 2:
        run_step(decider)
        gone += [seq.sequence_id for seq in decider.admission.waiting if seq.sequence_id not in gone]
    assert gone == [1, 2]


def test_a_place_that_can_not_be_given_costs_nobody_his() -> None:
    """Even without the lower ones there would be too few blocks."""
    decider = scheduler(num_blocks=10, max_num_batched_tokens=100)
    decider.add(sequence(0, 100, num_output=8, priority=0))
    decider.add(sequence(1, 10, num_output=5, priority=5))
    run_step(decider)
    decider.add(sequence(2, 70, priority=1))
    run_step(decider)
    assert decider.admission.num_preemptions == 0 and [
        seq.sequence_id for seq in decider.admission.running
    ] == [0, 1]


def test_one_request_does_not_wait_for_a_hundred_of_another() -> None:
    decider = scheduler(num_blocks=400, max_num_seqs=4, max_num_batched_tokens=64)
    for index in range(100):
        decider.add(sequence(index, 30, num_output=20, client="busy"))
    for _ in range(10):
        run_step(decider)
    decider.add(other := sequence(1000, 30, num_output=20, client="other"))
    finished = 0
    while not other.finish_reason:
        before = len(decider.admission.running) + len(decider.admission.waiting)
        run_step(decider)
        finished += before - len(decider.admission.running) - len(decider.admission.waiting)
    assert finished <= 9, "it came in when the first place was free"


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=2, max_size=4),
    num_seqs=st.integers(1, 6),
    pause=st.integers(0, 60),
)
def test_clients_that_always_have_work_get_as_much(
    lengths: list[tuple[int, int]], num_seqs: int, pause: int
) -> None:
    """What each was given, over any time in which all of them wait, differs by no more than what can be given
    before it is known: the longest prompt once, and the answers of all places (the paper's theorem 4.1). One
    comes later than the others, and does not get what it did not ask for."""
    decider = scheduler(num_blocks=200, max_num_seqs=num_seqs, max_num_batched_tokens=64, is_caching=False)
    served: Counter[str] = Counter()
    ids = iter(range(10**6))
    longest = max(prompt for prompt, _ in lengths)
    bound = 2 * (longest + 2 * num_seqs * max(output for _, output in lengths))
    clients = [f"client {index}" for index in range(len(lengths))]
    started: dict[str, int] = {}

    def num_waiting(client: str) -> int:
        return sum(seq.request.client == client for seq in decider.admission.waiting)

    for step in range(400):
        present = clients if step >= pause else clients[1:]
        for client, (prompt, output) in zip(clients, lengths, strict=True):
            while client in present and num_waiting(client) <= num_seqs:
                decider.add(sequence(next(ids), prompt, output, client=client))
        before = {seq: seq.has_started for seq in decider}
        batch = run_step(decider)
        for seq, had_started in before.items():
            served[seq.request.client] += seq.num_prompt_tokens * (seq.has_started and not had_started)
        for seq in sampled(batch):
            served[seq.request.client] += 2
        if step == pause:
            started = dict(served)
        if step > pause:
            gained = [served[client] - started.get(client, 0) for client in clients]
            assert max(gained) - min(gained) <= bound


def test_the_same_work_is_decided_alike() -> None:
    def decisions() -> list[dict[int, int]]:
        decider = scheduler(num_blocks=12, max_num_seqs=5, max_num_batched_tokens=48)
        dice = random.Random(1)
        for index in range(30):
            client, priority = dice.choice("abc"), dice.choice((0, 1))
            decider.add(sequence(index, dice.randrange(1, 90), 20, priority, client))
        return [sizes(batch) for batch in run(decider)]

    assert decisions() == decisions()
