"""Recurrences: compiled kernels against plain torch, the same bits in any chunks and any company, and which
states are kept."""

from __future__ import annotations

from typing import NamedTuple, cast

import pytest
import torch
from emulated_cuda import COMPILER, EmulatedLauncher
from kernel_cases import close
from torch import Tensor

from penstock.generation.blocks.state_pool import StatePool
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.sequence import Sequence
from penstock.kernels import BatchLayout, Kernels, StateSlots
from penstock.kernels.cpu import NativeKernels
from penstock.kernels.cpu_builds import compiled_builds
from penstock.kernels.cuda.kernels import CudaKernels
from penstock.kernels.reference import ReferenceKernels

NUM_STATES = 7
#: (num_heads, num_key_heads, key_dim, value_dim)
SHAPES = [(4, 2, 16, 32), (3, 3, 5, 7), (6, 1, 33, 40)]
#: (by the delta rule, with a decay for each row of a state)
RULES = [(True, False), (False, False), (True, True)]


class Chunk(NamedTuple):
    """The rows of a sequence in a step; the first is number `start` of the sequence."""

    slot: int
    start: int
    number: int
    #: (rows of the sequence, slot that gets the state behind them)
    saves: tuple[tuple[int, int], ...] = ()


def layout(chunks: list[Chunk]) -> BatchLayout:
    def integers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    starts = [sum(chunk.number for chunk in chunks[:index]) for index in range(len(chunks) + 1)]
    counts = [sum(len(chunk.saves) for chunk in chunks[:index]) for index in range(len(chunks) + 1)]
    saves = [
        (first + rows - chunk.start - 1, slot)
        for first, chunk in zip(starts, chunks, strict=False)
        for rows, slot in chunk.saves
    ]
    states = StateSlots(
        integers([chunk.slot for chunk in chunks]),
        integers(counts),
        integers([row for row, _ in saves]),
        integers([slot for _, slot in saves]),
    )
    lengths = integers([chunk.start + chunk.number for chunk in chunks])
    nothing = torch.zeros(0, dtype=torch.int64)
    return BatchLayout(nothing, nothing, torch.zeros(0), integers(starts), lengths, states=states)


KINDS = ["reference", *compiled_builds(), *(["card"] if COMPILER else [])]


def kernels(kind: str) -> Kernels:
    if kind == "card":
        return cast(Kernels, CudaKernels(EmulatedLauncher()))
    return ReferenceKernels() if kind == "reference" else NativeKernels(build=kind)


class Inputs:
    """The rows of three sequences, and what they leave in the states."""

    def __init__(self, shape: tuple[int, int, int, int], has_beta: bool, has_channels: bool = False) -> None:
        torch.manual_seed(0)
        heads, key_heads, key_dim, value_dim = shape
        self.q, self.k = (torch.randn(60, key_heads, key_dim) / key_dim**0.5 for _ in range(2))
        wide = torch.randn(60, heads * value_dim + 3)  # rows of a wider tensor
        self.v = wide[:, : heads * value_dim].view(60, heads, value_dim)
        self.decay, self.beta = torch.rand(60, heads), torch.rand(60, heads) if has_beta else None
        if has_channels:
            self.decay = torch.rand(60, heads, key_dim)
        self.x, self.weight, self.bias = wide, torch.randn(4, wide.shape[1]), torch.randn(wide.shape[1])
        self.heads = torch.full((NUM_STATES, heads, key_dim, value_dim), torch.nan)
        self.rows = torch.full((NUM_STATES, 3, wide.shape[1]), torch.nan)

    def compute(self, own: Kernels, rows: list[int], chunks: list[Chunk]) -> tuple[Tensor, Tensor]:
        """Of these rows of the inputs."""
        batch, beta = layout(chunks), None if self.beta is None else self.beta[rows]
        q, k, v, decay = (each[rows] for each in (self.q, self.k, self.v, self.decay))
        y = own.recurrence(q, k, v, decay, beta, self.heads, batch)
        return y, own.short_conv(self.x[rows], self.weight, self.bias, self.rows, batch)


#: Sequence 0 has the rows 0 to 29, sequence 1 those to 49, sequence 2 the others.
WHOLE = [Chunk(4, 0, 30, ((16, 1), (29, 2))), Chunk(0, 0, 20), Chunk(3, 0, 10)]
PARTS = [
    (list(range(1)), [Chunk(4, 0, 1)]),
    ([*range(1, 20), *range(30, 33)], [Chunk(4, 1, 19, ((16, 1),)), Chunk(0, 0, 3)]),
    ([*range(50, 60), 33, *range(20, 29)], [Chunk(3, 0, 10), Chunk(0, 3, 1), Chunk(4, 20, 9, ((29, 2),))]),
    ([*range(34, 50), 29], [Chunk(0, 4, 16), Chunk(4, 29, 1)]),
]


@pytest.mark.parametrize(("has_beta", "has_channels"), RULES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_company_change_no_bit(
    kind: str, shape: tuple[int, int, int, int], has_beta: bool, has_channels: bool
) -> None:
    whole, cut, plain = (Inputs(shape, has_beta, has_channels) for _ in range(3))
    own = kernels(kind)
    expected = whole.compute(own, list(range(60)), WHOLE)
    for rows, chunks in PARTS:
        for mine, all_rows in zip(cut.compute(own, rows, chunks), expected, strict=True):
            assert torch.equal(mine, all_rows[rows])
    for slot in (0, 1, 2, 3, 4):
        assert torch.equal(cut.heads[slot], whole.heads[slot]) and not cut.heads[slot].isnan().any()
        assert torch.equal(cut.rows[slot], whole.rows[slot])
    assert torch.equal(whole.rows[1], whole.x[13:16]) and whole.heads[5:].isnan().all()
    for mine, theirs in zip(expected, plain.compute(ReferenceKernels(), list(range(60)), WHOLE), strict=True):
        close(mine, theirs, 2e-5)


def test_each_row_of_a_state_has_a_decay_of_its_own() -> None:
    """Against the formula of Kimi Delta Attention (arXiv 2510.26692) in float64: S = (I - beta k k^T)
    diag(decay) S + beta k v^T."""
    inputs = Inputs((4, 2, 16, 32), has_beta=True, has_channels=True)
    y, _ = inputs.compute(ReferenceKernels(), list(range(60)), WHOLE)
    beta, state = inputs.beta, torch.zeros(4, 16, 32, dtype=torch.float64)
    assert beta is not None
    for row in range(30):
        k, q = (each[row].double().repeat_interleave(2, 0) for each in (inputs.k, inputs.q))
        b, v = beta[row].double()[:, None], inputs.v[row].double()
        turned = torch.eye(16) - (b * k)[:, :, None] * k[:, None]
        state = turned @ (inputs.decay[row].double()[..., None] * state) + (b * k)[:, :, None] * v[:, None]
        close(y[row], torch.einsum("hk,hkv->hv", q, state).float(), 2e-5)
    close(inputs.heads[4], state.float(), 2e-5)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler to run the CUDA sources with")
@pytest.mark.skipif(compiled_builds()[0] == "generic", reason="this build of the processor fuses nothing")
@pytest.mark.parametrize(("has_beta", "has_channels"), RULES)
@pytest.mark.parametrize(
    "shape",
    [*SHAPES, (1, 1, 64, 20), (2, 1, 128, 130), pytest.param((1, 1, 256, 16), marks=pytest.mark.slow)],
)
def test_a_card_gives_the_processors_bits(
    shape: tuple[int, int, int, int], has_beta: bool, has_channels: bool
) -> None:
    """Also keys of which a thread's registers hold the state, and more columns than a block has."""
    card, processor = (Inputs(shape, has_beta, has_channels) for _ in range(2))
    rows = [*range(5), *range(30, 33), 50]
    chunks = [Chunk(4, 0, 5, ((3, 1),)), Chunk(0, 0, 3), Chunk(3, 0, 1)]
    for mine, theirs in zip(
        card.compute(kernels("card"), rows, chunks),
        processor.compute(NativeKernels(), rows, chunks),
        strict=True,
    ):
        assert torch.equal(mine, theirs)
    assert torch.equal(card.heads[[0, 1, 3, 4]], processor.heads[[0, 1, 3, 4]])
    assert torch.equal(card.rows[[0, 1, 3, 4]], processor.rows[[0, 1, 3, 4]])


def test_states_that_many_saw_are_copied_before_the_next_write() -> None:
    """Two beams of one: the one that writes first gets another slot."""
    pool = StatePool(3, 3)
    parent, first, second = (Sequence(i, GenerationRequest([1], SamplingParams()), 9) for i in range(3))
    pool.place(parent)
    for child in (first, second):
        pool.share(parent, child)
    pool.release(parent)
    slot = first.state_slot
    assert slot == second.state_slot and parent.state_slot is None
    pool.place(first)
    pool.place(second)
    assert pool.take_copies() == ((slot, first.state_slot),)
    assert second.state_slot == slot != first.state_slot
    pool.release(first)
    pool.release(second)
    assert pool.take_copies() == ()


def test_a_copy_from_disk_has_a_slot_that_no_sequence_needs() -> None:
    pool = StatePool(4, 2)
    slots = [pool.begin_read(), pool.begin_read()]
    assert None not in slots and pool.begin_read() is None, "sequences need the others"
    assert pool.save(b"a") is None
    pool.end_read(slots[0] or 0, b"read")
    pool.end_read(slots[1] or 0, None)  # it did not arrive
    assert b"read" in pool and pool.save(b"a") is not None
    pool.end_step(is_computed=True)
    copy = pool.watch(b"read")
    assert copy is not None and copy[0] == slots[0] and copy[1]()
    pool.drop(b"read")
    assert not copy[1]() and pool.watch(b"read") is None


def test_a_copy_is_found_when_its_step_was_computed_and_gives_way_to_newer_ones() -> None:
    pool = StatePool(3, 1)
    slots = [pool.save(key) for key in (b"a", b"b", b"c")]
    assert None not in slots[:2] and slots[2] is None, "the sequence that runs needs a slot"
    assert b"a" not in pool
    pool.end_step(is_computed=True)
    assert b"a" in pool and b"b" in pool
    pool.save(b"lost")
    pool.end_step(is_computed=False)
    assert b"lost" not in pool
    sequence = Sequence(0, GenerationRequest([1], SamplingParams()), 9)
    pool.adopt(sequence, b"a")
    assert pool.take_copies() == ((slots[0], sequence.state_slot),)
    assert pool.save(b"d") is not None, "a newer copy takes the place of the one that was used first"
    pool.end_step(is_computed=True)
    assert b"d" in pool and b"a" in pool and b"b" not in pool
