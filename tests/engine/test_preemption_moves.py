"""Preempted sequences whose keys and values are moved and come back, in place of being computed again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_encoder_decoder
from engine_features import disk_of, stores_of
from test_convert import Ids
from tiny_models import VOCAB_SIZE, build

from penstock.cache.disk import kv_store
from penstock.cache.disk.kv_store import KVStore
from penstock.config import EngineConfig
from penstock.engine import Completion, Engine
from penstock.generation.beam_search import BeamParams
from penstock.generation.blocks.block_manager import BlockManager
from penstock.generation.blocks.departures import spared_s
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.scheduling.admission import Admission
from penstock.generation.scheduling.rope_lengths import RopeLengths
from penstock.generation.sequence import FinishReason, Sequence

BLOCK_SIZE = 16
WIDE = EngineConfig(max_model_len=128, max_num_batched_tokens=40, max_num_seqs=8)
#: Blocks for a sequence and a half.
NARROW = replace(WIDE, num_kv_tokens=192)


def slow(num_tokens: int, max_tokens: int) -> float:
    """StepMeter.prompt_s() where computing takes longer than any disk."""
    return 10.0 * num_tokens


def fast(num_tokens: int, max_tokens: int) -> float:
    return 1e-12 * num_tokens


def requests(seed: int) -> list[tuple[int, GenerationRequest]]:
    """(step before which it arrives, request) pairs; some prompts begin alike."""
    dice = random.Random(seed)
    words = [dice.randrange(8, VOCAB_SIZE) for _ in range(60)]
    found = []
    for number in range(6):
        prompt = words[: dice.choice((0, 20, 37))]
        prompt = prompt + [dice.randrange(8, VOCAB_SIZE) for _ in range(dice.randrange(10, 50))]
        params = SamplingParams(
            temperature=0.8, seed=number, max_tokens=dice.randrange(5, 40), ignore_eos=True, logprobs=2
        )
        request = GenerationRequest(prompt, params, str(number), priority=dice.randrange(2))
        found.append((dice.randrange(12), request))
    return found


def answer(engine: Engine, asked: list[tuple[int, GenerationRequest]]) -> dict[str, Completion]:
    waiting, found, num_steps = list(asked), dict[str, Completion](), 0
    while waiting or engine.has_work:
        for each in [each for each in waiting if each[0] <= num_steps]:
            waiting.remove(each)
            engine.add(each[1])
        for output in engine.step():
            assert output.error is None
            found.setdefault(output.request_id, Completion()).extend(output)
        num_steps += 1
    assert engine.metrics.kv_blocks_used == 0, "all blocks are free"
    assert engine.scheduler.block_manager.departures.num_blocks == 0
    return found


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    build("Llama", folder)
    return folder


def load(model: Path, settings: EngineConfig, prompt_s: Callable[[int, int], float] = slow) -> Engine:
    engine = Engine.load(model, settings, tokenizer=Ids())
    engine.meter.prompt_s = prompt_s  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize("seed", range(4))
def test_moved_computed_again_and_never_preempted_are_the_same(
    seed: int, llama: Path, tmp_path: Path
) -> None:
    """A moved sequence computes nothing twice, not even the block that was not full."""
    asked = requests(seed)
    with load(llama, WIDE) as engine:
        expected = answer(engine, asked)
        assert engine.metrics.num_preemptions == 0
    disk = replace(NARROW, kv_disk=str(tmp_path / "kv"))
    with load(llama, disk, fast) as engine:
        assert answer(engine, asked) == expected
        counts = engine.metrics.preemptions
        assert counts.num_recomputed == engine.metrics.num_preemptions > 0
        assert counts.num_moved == counts.moved_tokens == 0
    with load(llama, replace(disk, kv_disk=str(tmp_path / "other"))) as engine:
        assert answer(engine, asked) == expected
        counts = engine.metrics.preemptions
        assert counts.num_moved == engine.metrics.num_preemptions > 0 and counts.num_recomputed == 0


def test_what_was_moved_is_not_computed_again(llama: Path, tmp_path: Path) -> None:
    """The writing thread is slow: nothing would be on disk if nobody waited for it."""
    dice = random.Random("moved")
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=30, ignore_eos=True)
    asked = [
        (
            step,
            GenerationRequest([dice.randrange(8, VOCAB_SIZE) for _ in range(85)], params, name, priority=p),
        )
        for step, name, p in ((0, "first", 1), (12, "second", 0))
    ]
    numbers = list[int]()
    for settings in (WIDE, replace(WIDE, num_kv_tokens=128, kv_disk=str(tmp_path / "kv"))):
        with load(llama, settings) as engine:
            if (store := stores_of(engine).get("disk")) is not None:
                store._rate = 1.0  # bytes a second
            answer(engine, asked)
            numbers.append(engine.metrics.step_tokens)
            counts = engine.metrics.preemptions
    assert counts.num_moved == 1 and counts.moved_tokens % BLOCK_SIZE > 0 and counts.saved_s > 0
    assert numbers[0] == numbers[1], "no token was computed twice"


@pytest.mark.parametrize("name", ["BART", "DeepSeek V2", "Llama, rope dynamic"])
def test_models_of_other_kinds(name: str, tmp_path: Path) -> None:
    maker: Callable[[str, Path], object] = test_encoder_decoder.build if name == "BART" else build
    maker(name, tmp_path / "model")
    asked = requests(7)
    with load(tmp_path / "model", WIDE) as engine:
        expected = answer(engine, asked)
    with load(tmp_path / "model", replace(NARROW, kv_disk=str(tmp_path / "kv"))) as engine:
        assert answer(engine, asked) == expected
        assert engine.metrics.preemptions.num_moved == engine.metrics.num_preemptions > 0


def test_beams_move_together(llama: Path, tmp_path: Path) -> None:
    dice = random.Random("beams")
    prompts = [[dice.randrange(8, VOCAB_SIZE) for _ in range(length)] for length in (60, 85, 86)]
    search = SamplingParams(max_tokens=24, beams=BeamParams(3), ignore_eos=True)
    plain = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    asked = [
        (0, GenerationRequest(prompts[0], search, "search", priority=1)),
        (12, GenerationRequest(prompts[1], plain, "second")),
        (12, GenerationRequest(prompts[2], plain, "third")),
    ]
    with load(llama, WIDE) as engine:
        expected = answer(engine, asked)
    with load(llama, replace(WIDE, num_kv_tokens=288, kv_disk=str(tmp_path / "kv"))) as engine:
        assert answer(engine, asked) == expected
        assert engine.metrics.preemptions.num_moved == engine.metrics.num_preemptions > 0


def hang(monkeypatch: pytest.MonkeyPatch, store: KVStore) -> None:
    """No offer is ever taken."""
    monkeypatch.setattr(store, "_write", lambda *_: time.sleep(0.001))
    monkeypatch.setattr(kv_store, "CLOSE_S", 0.0)


def test_a_disk_that_hangs_holds_no_block_for_long(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(1)
    with load(llama, WIDE) as engine:
        expected = answer(engine, asked)
    with load(llama, replace(NARROW, kv_disk=str(tmp_path / "kv"))) as engine:
        store = disk_of(engine)
        assert store is not None
        engine.meter.prompt_s = lambda num_tokens, _: 0.0005 * num_tokens  # type: ignore[method-assign]
        hang(monkeypatch, store)
        assert answer(engine, asked) == expected
        assert engine.metrics.preemptions.num_moved and not engine.metrics.preemptions.moved_tokens


def test_an_aborted_sequence_holds_nothing(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was preempted, and its blocks are being written."""
    with load(llama, replace(WIDE, num_kv_tokens=128, kv_disk=str(tmp_path / "kv"))) as engine:
        hang(monkeypatch, disk_of(engine))
        long = SamplingParams(max_tokens=30, ignore_eos=True)
        engine.add(GenerationRequest(list(range(8, 90)), long, "low", priority=1))
        for _ in range(4):
            engine.step()
        engine.add(GenerationRequest(list(range(9, 99)), long, "high"))
        assert engine.step() == [] and engine.metrics.num_preemptions <= 1
        assert engine.scheduler.block_manager.departures.num_blocks
        engine.abort("low")
        assert not engine.scheduler.block_manager.departures.num_blocks
        while engine.has_work:
            engine.step()
        assert engine.metrics.kv_blocks_used == 0


def sweep_s(num_tokens: int) -> float:
    """Steps of at most 64 tokens, each of which reads all weights."""
    return 5.0 * -(-num_tokens // 64)


def test_tokens_that_a_step_computes_in_passing_spare_nothing() -> None:
    assert spared_s(sweep_s, 60, 15) == 0.0
    assert spared_s(sweep_s, 70, 15) == 5.0
    assert spared_s(sweep_s, 641, 640) == 50.0
    assert spared_s(lambda num_tokens: 0.0, 641, 640) == 0.0


class FakeStore:
    """A store that takes `block_s` seconds for each block, in either direction."""

    def __init__(self, block_s: float, can_write: bool = True) -> None:
        self.keys = set[bytes]()
        self.can_write, self._block_s = can_write, block_s
        self.is_done, self.elapsed_s = False, 0.25
        self.limit_s = 0.0

    def __contains__(self, key: object) -> bool:
        return key in self.keys

    def offer(self, *args: Any) -> None: ...

    def expected_read_s(self, keys: list[bytes]) -> float:
        return len(keys) * self._block_s

    def expected_write_s(self, num_blocks: int) -> float:
        return num_blocks * self._block_s

    def read(self, *args: Any) -> Any:
        raise AssertionError("nobody waits")

    def write(self, offers: list[tuple[int, bytes, bytes, Callable[[], bool]]], limit_s: float) -> FakeStore:
        self.keys |= {key for _, key, _, _ in offers}
        self.limit_s = limit_s
        return self


def preempted(
    store: FakeStore | None, num_computed: int, compute_s: Callable[[int], float], num_written: int = 0
) -> BlockManager:
    """After the preemption of a sequence with so many computed tokens of 40."""
    manager = BlockManager(8, 4, store=store, compute_s=compute_s)
    admission = Admission(manager, 2, RopeLengths(None), 64)
    sequence = Sequence(0, GenerationRequest(list(range(20)), SamplingParams(), "one"), 40)
    admission.add(sequence)
    assert admission.admit(sequence)
    manager.prefix_cache.register(sequence, num_computed)
    sequence.advance(num_computed)
    manager.prefix_cache.confirm()
    if store is not None:
        store.keys |= {manager.pool.key_of(block) for block in sequence.block_table[:num_written]}
    admission._preempt(sequence)
    if store is not None and manager.departures.num_blocks:
        assert sequence.finish_reason is None and manager.pool.num_free == 8 - manager.departures.num_blocks
    return manager


@pytest.mark.parametrize(
    ("block_s", "can_write", "num_written", "num_leaving"),
    [
        (0.9, True, 0, 5),  # 2 * 5 * 0.9 s for 18 tokens of 1 s
        (1.9, True, 0, 0),
        (1.9, True, 4, 0),  # of the last block, 2 tokens; the others need not be written
        (0.9, True, 4, 1),
        (0.9, False, 0, 0),
        (0.9, False, 4, 0),
    ],
)
def test_the_decision(block_s: float, can_write: bool, num_written: int, num_leaving: int) -> None:
    store = FakeStore(block_s, can_write)
    manager = preempted(store, 18, float, num_written)
    assert manager.departures.num_blocks == num_leaving
    counts = manager.departures.counts
    assert (counts.num_moved, counts.num_recomputed) == ((1, 0) if num_written or num_leaving else (0, 1))
    if num_leaving:
        assert store.limit_s == (18 if num_leaving == 5 else 2)
        manager.departures.land()
        assert manager.departures.num_blocks == num_leaving, "they are not written yet"
        store.is_done = True
        manager.departures.land()
        assert counts.write_s == 0.25
    assert manager.pool.num_free == 8


def test_without_a_store_or_rates_all_is_computed_again() -> None:
    for store, compute_s in ((None, float), (FakeStore(0.1), lambda num_tokens: 0.0)):
        manager = preempted(store, 18, compute_s)
        assert manager.pool.num_free == 8 and manager.departures.counts.num_recomputed == 1


def test_a_sequence_that_lost_its_blocks_finds_the_part_of_one() -> None:
    """And whoever goes on with the same tokens, but nobody else."""
    manager = preempted(None, 18, float)
    same = Sequence(1, GenerationRequest(list(range(18)), SamplingParams(), "same"), 40)
    assert manager.adopt(same) == 17
    other = Sequence(2, GenerationRequest([*range(17), 3], SamplingParams(), "other"), 40)
    assert manager.adopt(other) == 16
    manager.release(same)
    same.finish_reason = FinishReason.ABORT
