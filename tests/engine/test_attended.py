"""Attention of the processor to keys in RAM beside a card: a split's partial results have the bits of the
card's kernel, and answers are those of a card that has room for all keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_cuda import COMPILER, EmulatedLauncher
from kernel_cases import paged_batch
from pretended_card import engines
from test_kv_spill_beside_a_card import (
    PARAMS,
    PLAIN,
    answers,
    check_nothing_is_left,
    load,
    on_a_card,
    prompts,
    spilled,
)
from tiny_models import build
from torch import Tensor

from penstock.generation import layer_caches
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.kernels.cpu_builds import compiled_builds, load_library
from penstock.kernels.cuda.attention import MAX_PARTIAL_BYTES, SPLIT_KEYS
from penstock.kernels.cuda.kernels import CudaKernels
from penstock.kernels.cuda.launcher import HEIGHTS
from penstock.kernels.operands import AttentionSpec, BatchLayout, RamSplits
from penstock.kernels.shared import attended
from penstock.kernels.shared.attended import HandedAttention
from penstock.kernels.shared.crossing import FLOAT_BYTES, HEAD_BYTES, ROUND_FLOATS
from penstock.memory.cuda_handover import CROSSING_BYTES
from penstock.memory.cuda_inlet import CudaInlet
from penstock.memory.planning import splits_in_ram, two_lanes
from penstock.memory.planning.splits_in_ram import AttendsInRam, SpilledKeys, ram_share

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler to run the CUDA sources with")


class Partials(EmulatedLauncher):
    """Keeps what merge_splits is given."""

    partials: Tensor

    def launch(self, name: str, grid: Any, num_threads: int, *values: Any) -> None:
        if name == "merge_splits":
            self.partials = values[0].clone()
        super().launch(name, grid, num_threads, *values)


def whole_splits(layout: BatchLayout, block_size: int) -> RamSplits:
    """All splits that have 256 keys, of all tokens that see all of them."""
    items, blocks = [], []
    for seq, table in enumerate(layout.block_tables):
        first, end = layout.query_start[seq : seq + 2].tolist()
        past = int(layout.context_lens[seq]) - (end - first)
        for token in range(first, end):
            for split in range(past // SPLIT_KEYS):
                items.append((token, past + token - first, split, len(items)))
                count = SPLIT_KEYS // block_size
                blocks.append(table[split * count : (split + 1) * count])
    return RamSplits(torch.tensor(items, dtype=torch.int32), torch.stack(blocks).int(), len(items))


@needs_compiler
@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "block_size", "more"),
    [
        ((6, 2), 64, torch.float16, 16, {}),
        ((5, 1), 80, torch.float32, 32, {}),
        ((4, 4), 96, torch.float16, 64, {"window": 300}),
        ((8, 1), 128, torch.float16, 16, {"softcap": 5.0}),
        ((7, 1), 128, torch.int8, 16, {}),
        ((4, 2), 256, torch.float32, 16, {"chunk": 310}),
        ((2, 1), 72, torch.int8, 32, {"window": 520}),
        ((3, 3), 70, torch.float16, 16, {}),
    ],
)
def test_partial_results_are_the_cards(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype, block_size: int, more: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    sequences = [(2 * SPLIT_KEYS + 38, 2), (7, 1), (SPLIT_KEYS + 1, 1)]
    q, kv, layout = paged_batch(generator, sequences, heads, head_dim, dtype, block_size)
    spec = dataclasses.replace(AttentionSpec(heads[0], head_dim**-0.5), **more)
    launcher = Partials(num_multiprocessors=10000, finds_races=False)
    CudaKernels(launcher).paged_attention(3 * q, kv, layout, spec)
    splits = whole_splits(layout, block_size)
    theirs = launcher.partials.view(len(q), heads[0], -1, head_dim + 2)
    for made in compiled_builds():
        _, library = load_library(made)
        mine = HandedAttention(library, kv, splits, spec).compute((3 * q).flatten(1).contiguous())
        found = mine.view(-1, heads[0], head_dim + 2)
        num_seen = 0
        for token, position, split, place in splits.items.tolist():
            if split < spec.first_seen(position) // SPLIT_KEYS:
                assert bool((found[place, :, 0] == -torch.inf).all())
                continue  # the card leaves out what no row of its block sees
            num_seen += 1
            assert torch.equal(found[place].view(torch.int32), theirs[token, :, split].view(torch.int32)), (
                made
            )
        assert num_seen >= 3


@needs_compiler
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_scores_that_are_no_numbers_are_told(softcap: float) -> None:
    """As by the card: in the sum of a partial result, which no merge leaves out."""
    generator = torch.Generator().manual_seed(5)
    q, kv, layout = paged_batch(generator, [(2 * SPLIT_KEYS + 38, 2)], (4, 2), 64, torch.float32)
    q[0, 1, 3], q[1, 3, 3] = torch.nan, 5.0
    blocks = layout.block_tables[0].tolist()
    kv.parts[0][blocks[3], 1, 3, 7] = torch.inf
    kv.parts[0][blocks[16:32], 1, 5, :] = torch.nan  # a whole split
    q[:, 0, 9] = -5.0
    kv.parts[0][blocks[:2], 0, 9, :] = torch.inf  # the first tile: scores of minus infinity
    spec = AttentionSpec(4, 64**-0.5, softcap=softcap)
    launcher = Partials(num_multiprocessors=10000, finds_races=False)
    CudaKernels(launcher).paged_attention(q, kv, layout, spec)
    splits = whole_splits(layout, 16)
    theirs = launcher.partials.view(2, 4, -1, 66)[splits.items[:, 0].long(), :, splits.items[:, 2].long()]
    for made in compiled_builds():
        _, library = load_library(made)
        found = HandedAttention(library, kv, splits, spec).compute(q.flatten(1).contiguous()).view(-1, 4, 66)
        assert torch.equal(found.isnan(), theirs.isnan()), made
        assert bool(found[2, 0, 1:].isnan().any()) is False and bool(found[1, 2:, 1:].isnan().all())
        assert torch.equal(found.nan_to_num(7.0), theirs.nan_to_num(7.0)), made


LONG = replace(PLAIN, max_model_len=640, max_num_batched_tokens=160, num_kv_tokens=1600, max_num_seqs=3)


@on_a_card
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("Llama", {}),
        pytest.param("Gemma 2", {"kv_dtype": "float32"}, marks=pytest.mark.slow),
        pytest.param("Llama", {"kv_dtype": "int8"}, marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_of_a_card_with_room_for_all(
    name: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the processor's share, by flags and by the driver's functions, and without."""
    build(name, tmp_path, max_position_embeddings=640)
    asked, plain = prompts(530, 270, 20), replace(LONG, **more)
    params = replace(PARAMS, max_tokens=4)
    monkeypatch.setattr(layer_caches, "GAP_BYTES", 0)
    with engines.card_with_kernels() as card:
        expected = answers(tmp_path, plain, "cuda", asked, params)
        config = spilled(tmp_path, plain, num_in_ram=70)
        read_bytes = []
        ways = (
            ((True, 1.0), (True, 0.0), (True, 0.5), (False, 1.0)) if not more else ((True, 1.0), (True, 0.0))
        )
        for has_flags, share in ways:
            card.driver.fake_stream_values(has_flags)
            monkeypatch.setattr(splits_in_ram, "ram_share", lambda *_, share=share: share)
            monkeypatch.setattr(two_lanes, "least_splits", lambda *_: 1)
            with load(tmp_path, config, "cuda") as engine:
                assert engine.generate(asked, params) == expected
                beside = engine.model.executor.family.kernels._attention._beside
                assert (beside is not None and beside.num_handed > 0) == (share > 0)
                stats = engine.metrics.kv_spill
                assert stats is not None
                read_bytes.append(stats.read_bytes)
            del engine, beside
        assert read_bytes[0] < read_bytes[1]
        assert more or read_bytes[0] == read_bytes[3] < read_bytes[2] < read_bytes[1]
        check_nothing_is_left(card)


@pytest.mark.slow
@on_a_card
def test_what_the_next_step_moves_and_attends_to_is_known_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, while two sequences decode; the time of the step is predicted with these bytes."""
    build("Llama", tmp_path, max_position_embeddings=640)
    monkeypatch.setattr(layer_caches, "GAP_BYTES", 0)
    monkeypatch.setattr(splits_in_ram, "ram_share", lambda *_: 0.5)
    monkeypatch.setattr(two_lanes, "least_splits", lambda *_: 1)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with engines.card_with_kernels() as card:
        config = spilled(tmp_path, replace(LONG, speculation="off"), num_in_ram=70)
        with load(tmp_path, config, "cuda") as engine:
            stats, running = engine.metrics.kv_spill, engine.scheduler.admission.running
            assert stats is not None and engine.plan.attended_share == 0.5
            for number, prompt in enumerate(prompts(570, 300)):
                engine.add(GenerationRequest(prompt, params, str(number)))
            while len(running) < 2 or any(each.num_pending_tokens > 1 for each in running):
                engine.step()
            num_steps = num_attended = 0
            brought, bring = list[torch.dtype](), CudaInlet.bring

            def bring_noted(self: CudaInlet, tensors: Sequence[Tensor]) -> list[Tensor]:
                brought.extend(each.dtype for each in tensors)
                return bring(self, tensors)

            monkeypatch.setattr(CudaInlet, "bring", bring_noted)
            while len(running) == 2:
                pasts = [(list(each.block_table), each.num_computed_tokens) for each in running]
                expected = engine.model.executor.caches.expected(pasts)
                before = stats.num_moved_bytes, stats.attended_bytes
                asked = list[tuple[int, ...]]()
                predict = engine.meter.predict
                engine.meter.predict = lambda load, to=asked, by=predict: to.append(load[4:6]) or by(load)
                engine.step()
                engine.meter.predict = predict
                found = stats.num_moved_bytes - before[0], stats.attended_bytes - before[1]
                if all(len(table) * 16 > num_past for table, num_past in pasts):
                    assert found == expected.parts(2) and found in asked
                    num_steps, num_attended = num_steps + 1, num_attended + found[1]
                assert expected.parts(20000) == (expected.num_bytes, 0), "a prompt's chunk goes over the link"
            assert num_steps > 5 and num_attended > 0
            assert torch.bool in brought, "tables, too, come by the inlet"
        del engine, running
        check_nothing_is_left(card)


def test_which_part_of_a_step_the_processor_gets() -> None:
    """Its share, as far as results have room: those of 3 tokens of a sequence are three times as many."""
    attends = AttendsInRam.of((32, 128), 16, 0.6)
    assert attends == AttendsInRam(0.6, 32, 128)
    token_bytes, split_bytes = 1000, 256 * 1000
    one = SpilledKeys.of_one(30000, 32000, token_bytes, attends)
    assert one.splits == ((117, split_bytes),) and one.most_splits == 125
    for num_tokens, num_attended in ((1, 70), (2, 70), (3, 70), (4, 59), (8, 29), (9, 0), (512, 0)):
        moved, attended = one.parts(num_tokens)
        assert moved + attended == 30000 * token_bytes
        assert attended == num_attended * split_bytes, num_tokens
        assert num_tokens * num_attended <= attends.room(num_tokens, 125)
    eight = SpilledKeys(8 * one.num_bytes, attends, ((8 * 117, split_bytes),), 8, 125)
    assert eight.parts(8)[1] == attends.room(8, 125) * split_bytes == 8 * 29 * split_bytes
    assert SpilledKeys.of_one(30000, 32000, token_bytes, None).parts(1) == (30_000_000, 0)
    assert SpilledKeys().parts(512) == (0, 0)
    others = [((32, 264), 16, 0.6), (None, 16, 0.6), ((32, 128), 48, 0.6), ((32, 128), 16, 0.0)]
    assert all(AttendsInRam.of(*each) is None for each in others)


def test_processor_and_link_end_together() -> None:
    share = ram_share(memory_gbps=30, link_gbps=12)
    assert (1 - share) / 12 == pytest.approx(share / (30 - 12))
    assert ram_share(10, 12) == ram_share(0, 12) == ram_share(30, 0) == 0


def test_splits_are_those_of_the_card() -> None:
    assert splits_in_ram.SPLIT_KEYS == SPLIT_KEYS
    assert splits_in_ram.MOST_PARTIAL_BYTES == MAX_PARTIAL_BYTES
    assert max(HEIGHTS) == splits_in_ram.MOST_DIM
    header = Path(attended.__file__).parent.parent / "cpu" / "attended.h"
    assert f"ATTENDED_DIM = {splits_in_ram.MOST_DIM} " in header.read_text()
    crossing = HEAD_BYTES + FLOAT_BYTES * (splits_in_ram.MOST_FLOATS + ROUND_FLOATS)
    assert crossing <= CROSSING_BYTES
