"""Sequences that are longer than the KV cache: their answers are those of a cache that is large enough."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_encoder_decoder
import torch
from drafters import Forest, Oracle
from engine_features import disk_of
from test_convert import Ids
from tiny_models import VOCAB_SIZE, build
from torch import Tensor

from penstock.cache.spill import spill_file
from penstock.cache.spill.runs import runs
from penstock.cache.spill.spill_file import SpillFile
from penstock.cache.spill.spilled_cache import SpilledKVCache, finish
from penstock.config import EngineConfig
from penstock.engine import Completion, Engine
from penstock.errors import CapacityError, ConfigError, CorruptFile, StepFailed
from penstock.generation import layer_caches
from penstock.generation.beam_search import BeamParams
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.memory.direct_io import aligned_buffer
from penstock.memory.pages import PAGE
from penstock.memory.planning.cost import StepPrediction
from penstock.memory.planning.step_work import StepLoad
from penstock.weights.layer_weights import LayerWeights

#: A block of 32 tokens with two heads of 16 float32 numbers is a page.
PLAIN = EngineConfig(max_model_len=192, max_num_batched_tokens=48, kv_dtype="float32", block_size=32)
PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=24, ignore_eos=True, logprobs=2)
MODELS = ("Llama", "Gemma 2", "DeepSeek V2", "GLM-5", "Llama, rope dynamic", "GPT-2")


def prompts(name: str, *lengths: int) -> list[list[int]]:
    dice = random.Random(name)
    return [[dice.randrange(8, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def spilled(tmp_path: Path, num_kv_tokens: int = 64, **changes: Any) -> EngineConfig:
    """Two blocks in memory, and as many on disk as the longest sequence takes beside them."""
    return replace(PLAIN, num_kv_tokens=num_kv_tokens, kv_spill=str(tmp_path / "spill"), **changes)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    build("Llama", folder)
    return folder


def load(model: Path, config: EngineConfig) -> Engine:
    return Engine.load(model, config, tokenizer=Ids())


def answers(
    model: Path, config: EngineConfig, asked: list[list[int]], params: SamplingParams = PARAMS
) -> list[Completion]:
    """All prompts together."""
    with load(model, config) as engine:
        got = engine.generate(asked, params)
        pool = engine.scheduler.block_manager.pool
        assert not any(pool.num_owners) and pool.num_free == pool.num_blocks
        return got


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_a_larger_cache(name: str, tmp_path: Path) -> None:
    """Prompts in chunks, of several sequences that have to wait for each other's blocks."""
    build(name, tmp_path / "model")
    asked = prompts(name, 150, 100, 20, 90)
    expected = answers(tmp_path / "model", PLAIN, asked)
    config = spilled(tmp_path)
    with load(tmp_path / "model", config) as engine:
        assert (engine.plan.num_kv_blocks, engine.plan.num_spilled_blocks) == (6, 4)
        assert engine.generate(asked, PARAMS) == expected
        stats = engine.metrics.kv_spill
        assert stats is not None and stats.read_bytes > 0 and stats.written_bytes > 0
        assert engine.generate(asked[:1], PARAMS) == expected[:1]
    assert list((tmp_path / "spill").iterdir()) == []


@pytest.mark.parametrize("name", ["Llama", "Gemma 2"])
def test_what_a_step_moves_is_known_before(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, while two sequences that share a block decode without guesses, whose blocks nobody knows
    before; layers with a window read less. The time of the next step is predicted with these bytes."""
    monkeypatch.setattr(layer_caches, "GAP_BYTES", 0)
    build(name, tmp_path / "model")
    (first,) = prompts(name, 70)
    with load(tmp_path / "model", spilled(tmp_path, 32, speculation="off")) as engine:
        stats, asked = engine.metrics.kv_spill, list[tuple[int, ...]]()
        assert stats is not None

        def predict(load: StepLoad) -> StepPrediction:
            asked.append((load.num_tokens, load.spilled_bytes, load.attended_bytes))
            return StepPrediction(load.num_tokens, 1, {"disk": 1.0}, 1.0)

        for number, prompt in enumerate((first, [*first[:40], 9])):
            params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
            engine.add(GenerationRequest(prompt, params, str(number)))
        while engine.scheduler.admission.waiting or not engine.scheduler.admission.running:
            engine.step()
        while any(each.num_pending_tokens > 1 for each in engine.scheduler.admission.running):
            engine.step()
        monkeypatch.setattr(engine.meter, "predict", predict)
        num_steps = 0
        while len(running := engine.scheduler.admission.running) == 2:
            pasts = [(list(each.block_table), each.num_computed_tokens) for each in running]
            has_room = all(len(table) * 32 > num_past for table, num_past in pasts)
            expected, before = engine.model.executor.caches.expected(pasts).num_bytes, stats.num_moved_bytes
            engine.step()
            if has_room:  # the next block is not known before the step is decided
                assert stats.num_moved_bytes - before == expected > 0
                num_steps += 1
            engine.meter.predict_s(1)
            engine.meter.known_s(num_past := pasts[0][1])  # another number in each step: it is kept
            assert asked[-2:] == [(1, expected, 0), (num_past, expected, 0)]
        assert num_steps > 5


def test_keys_and_values_in_int8(tmp_path: Path) -> None:
    """Four heads of 30 numbers and a scale of 2 bytes: 32 tokens are a page."""
    build("Llama", tmp_path / "model", head_dim=30, num_key_value_heads=4)
    plain, asked = replace(PLAIN, kv_dtype="int8"), prompts("int8", 150, 90)
    config = spilled(tmp_path, kv_dtype="int8")
    assert answers(tmp_path / "model", config, asked) == answers(tmp_path / "model", plain, asked)


@pytest.mark.inner
def test_blocks_and_layers_are_streamed_together(llama: Path, tmp_path: Path) -> None:
    """Weights from disk, chunks that cut blocks, prompts' log-probabilities, beams that share blocks, and
    guesses in trees, whose branches are in blocks of their own."""
    asked = prompts("together", 150, 60)
    config = spilled(tmp_path, 32, num_resident_layers=1, max_num_batched_tokens=37)
    beams = SamplingParams(beams=BeamParams(3, 2), max_tokens=12, ignore_eos=True)
    short = prompts("beams", 50)
    for each, params in ((asked, PARAMS), (asked, replace(PARAMS, prompt_logprobs=1)), (short, beams)):
        assert answers(llama, config, each, params) == answers(llama, PLAIN, each, params)
    expected = answers(llama, PLAIN, asked)
    known = {(1, *prompt): answer.token_ids for prompt, answer in zip(asked, expected, strict=True)}
    drafter = Forest(Oracle(known, 6, vocab_size=VOCAB_SIZE))
    with Engine.load(llama, config, tokenizer=Ids(), drafter=drafter) as engine:
        assert engine.generate(asked, PARAMS) == expected
        assert engine.metrics.accepted_tokens > 5 and drafter.num_branches > 0


def test_a_sequence_that_was_preempted_or_cancelled_comes_back(llama: Path, tmp_path: Path) -> None:
    """Two sequences outgrow memory and disk. A step is given up between two layers, with changed blocks on
    their way to the disk."""
    asked, longer = prompts("preempted", 70, 60), replace(PARAMS, max_tokens=60)
    expected = [answers(llama, PLAIN, [each], longer)[0] for each in asked]
    with load(llama, spilled(tmp_path)) as engine:
        assert engine.generate(asked, longer) == expected and engine.metrics.num_preemptions > 0
        engine.add(GenerationRequest([*asked[0], *prompts("gone", 90)[0]], PARAMS, "gone"))
        engine.step()
        aborted = set[str]()
        sweep = engine.streamer.runs

        def leave(stack: str, most: int) -> Generator[list[LayerWeights], None, None]:
            for number, run in enumerate(sweep(stack, most)):
                if number == 2:
                    aborted.add("gone")
                yield run

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.streamer, "runs", leave)
            assert engine.step(aborted) == [] and aborted
        engine.abort("gone")
        assert engine.generate(asked, longer) == expected
        pool = engine.scheduler.block_manager.pool
        assert not any(pool.num_owners)


def test_what_was_spilled_is_found_again(llama: Path, tmp_path: Path) -> None:
    """By the prefix cache, and by a later engine with --kv-disk, which spills beside it."""
    asked = prompts("again", 150)
    expected = answers(llama, PLAIN, asked)
    config = replace(spilled(tmp_path), kv_spill=None, kv_disk=str(tmp_path / "kv"))
    with load(llama, config) as engine:
        assert engine.generate(asked, PARAMS) == expected == engine.generate(asked, PARAMS)
        assert engine.metrics.prefix_cache_hits >= 128
    with load(llama, config) as engine:
        assert engine.generate(asked, PARAMS) == expected
        stats = engine.metrics.kv_disk
        assert stats is not None and stats.reads.num_blocks == 4
    with load(llama, replace(config, num_kv_tokens=None)) as engine:
        assert engine.generate(asked, PARAMS) == expected and engine.metrics.kv_spill is None
        stats = engine.metrics.kv_disk
        assert stats is not None and stats.reads.num_blocks == 4, "one shelf for both kinds of cache"


def test_a_kept_block_that_the_spill_file_does_not_take_is_computed_again(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that the spill file does not give is not kept."""
    asked = prompts("not taken", 150)
    expected = answers(llama, PLAIN, asked)
    config = replace(spilled(tmp_path), kv_spill=None, kv_disk=str(tmp_path / "kv"))

    def refuse(self: SpilledKVCache, block: int, content: Tensor) -> None:
        raise CorruptFile("the disk of --kv-spill fails")

    with load(llama, config) as engine, monkeypatch.context() as patch:
        patch.setattr(SpilledKVCache, "read_block", refuse)
        assert engine.generate(asked, PARAMS) == expected
        disk_of(engine).flush()
        assert disk_of(engine).stats.missed_blocks > 0 and disk_of(engine).stats.num_blocks == 0
    with load(llama, config) as engine:
        assert engine.generate(asked, PARAMS) == expected
    with load(llama, config) as engine:
        monkeypatch.setattr(SpilledKVCache, "write_block", refuse)
        assert engine.generate(asked, PARAMS) == expected
        assert disk_of(engine).stats.reads.num_blocks == 0


def test_a_disk_that_fails_costs_the_step_alone(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts("fails", 150)
    expected = answers(llama, PLAIN, asked)
    pwrite = os.pwrite
    with load(llama, spilled(tmp_path)) as engine:
        cache = engine.model.executor.kv_cache
        assert isinstance(cache, SpilledKVCache)
        descriptor = cache._store._file.descriptor

        def broken(fd: int, data: memoryview, offset: int) -> int:
            if fd == descriptor:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return pwrite(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", broken)
        with pytest.raises(StepFailed, match=r"--kv-spill.*Input/output"):
            engine.generate(asked, PARAMS)
        monkeypatch.undo()
        assert engine.generate(asked, PARAMS) == expected


def test_what_can_not_be_spilled_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="--kv-spill"):
        load(llama, replace(PLAIN, num_kv_tokens=64))
    with pytest.raises(ConfigError, match="pass --block-size 32"):
        load(llama, spilled(tmp_path, block_size=16))
    with pytest.raises(ConfigError, match="method planes"):
        spilled(tmp_path, draft_with_planes=True)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't be used"):
        load(llama, replace(PLAIN, num_kv_tokens=64, kv_spill=str(tmp_path / "file")))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("Gemma 3n", "values of other layers"), ("Qwen3-Next", "recurrent"), ("BART", "encoder")],
)
def test_models_without_blocks_of_one_kind_are_refused(name: str, reason: str, tmp_path: Path) -> None:
    maker: Callable[[str, Path], object] = test_encoder_decoder.build if name == "BART" else build
    maker(name, tmp_path / "model")
    with pytest.raises(ConfigError, match=reason):
        load(tmp_path / "model", spilled(tmp_path, kv_dtype="float32"))


def test_without_a_queue_threads_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(depth: int) -> None:
        raise OSError(errno.EAGAIN, "no queue to spare")

    monkeypatch.setattr(spill_file, "QueuedBlocks", refuse)
    monkeypatch.setattr(spill_file, "is_queued", lambda descriptor: True)
    with closing(SpillFile(tmp_path, 4 * PAGE)) as file:
        first, second = (aligned_buffer(2 * PAGE) for _ in range(2))
        file.write([(PAGE, first.fill_(5))])
        finish(file.begin_read([(PAGE, second)]))
        assert torch.equal(first, second)


def test_runs() -> None:
    assert runs([]) == ()
    assert runs([3, 4, 5, 7, 20]) == (range(3, 6), range(7, 8), range(20, 21))
    assert runs([3, 4, 5, 7, 20], max_gap=1) == (range(3, 8), range(20, 21))
