"""Keys and values on disk: what an engine finds again, and that no answer depends on it."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_encoder_decoder
from engine_features import disk_of
from test_convert import Ids
from tiny_models import VOCAB_SIZE, build

from penstock.cache.disk.shelf import BLOCKS, Shelf
from penstock.config import EngineConfig
from penstock.engine import Completion, Engine
from penstock.errors import ConfigError
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.kernels import ForwardingKernels
from penstock.kernels.int_mm import TorchKernels
from penstock.kv_disk.fingerprint import description

PLAIN = EngineConfig(max_model_len=192, max_num_batched_tokens=64, enable_prefix_caching=False)
PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=9, ignore_eos=True, logprobs=2)
BLOCK_SIZE = 16
MODELS = ("Llama", "DeepSeek V2", "Llama, rope dynamic", "BART")


def prompts(name: str, *lengths: int) -> list[list[int]]:
    dice = random.Random(name)
    return [[dice.randrange(8, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def kept(tmp_path: Path, **changes: Any) -> EngineConfig:
    return replace(PLAIN, enable_prefix_caching=True, kv_disk=str(tmp_path / "kv"), **changes)


def answers(
    model: Path, settings: EngineConfig, asked: list[list[int]], params: SamplingParams = PARAMS
) -> tuple[list[Completion], Engine]:
    """Each prompt by itself in one engine, which is closed then."""
    with Engine.load(model, settings, tokenizer=Ids()) as engine:
        return [engine.generate([prompt], params)[0] for prompt in asked], engine


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    build("Llama", folder)
    return folder


def test_kernels_that_serve_in_place_of_others_have_a_shelf_of_their_own(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card's own kernels may fail their check; a wrapper changes no bit."""
    with Engine.load(llama, PLAIN, tokenizer=Ids()) as engine:
        family, found = engine.model.executor.family, list[str]()
        for kernels in (family.kernels, ForwardingKernels(family.kernels), TorchKernels()):
            monkeypatch.setattr(family, "kernels", kernels)
            found.append(description(engine.model, engine.config, {})["fingerprint"])
    assert found[0] == found[1] != found[2]


def num_read(engine: Engine) -> int:
    """Blocks that came from disk."""
    return engine.metrics.kv_disk.reads.num_blocks if engine.metrics.kv_disk is not None else 0


@pytest.mark.parametrize("name", MODELS)
def test_a_new_engine_finds_what_the_last_one_computed(name: str, tmp_path: Path) -> None:
    """Prompts, and a conversation that goes on behind one of them."""
    maker: Callable[[str, Path], object] = test_encoder_decoder.build if name == "BART" else build
    maker(name, tmp_path / "model")
    asked = prompts(name, 70, 40)
    expected, _ = answers(tmp_path / "model", PLAIN, asked)
    longer = [*asked[0], *expected[0].token_ids, *prompts("more", 20)[0]]
    expected += answers(tmp_path / "model", PLAIN, [longer])[0]
    assert answers(tmp_path / "model", kept(tmp_path), asked)[0] == expected[:2]
    again, engine = answers(tmp_path / "model", kept(tmp_path), [*asked, longer])
    assert again == expected
    # Whole blocks of both prompts; inputs of an encoder are there as wholes, or not at all.
    least = (70 // BLOCK_SIZE) + (40 // BLOCK_SIZE) if name != "BART" else 70 // BLOCK_SIZE + 1
    assert num_read(engine) >= least
    assert engine.metrics.prefix_cache_hits >= least * BLOCK_SIZE - 10


def test_a_chat_computes_what_is_new_in_each_of_ten_turns(llama: Path, tmp_path: Path) -> None:
    """In a new engine for each turn. Whole blocks are kept: a turn computes at most a block more."""
    text, params = list[int](), replace(PARAMS, max_tokens=7)
    for number in range(10):
        num_before = len(text)
        text += prompts(f"turn {number}", 9)[0]
        (expected,) = answers(llama, PLAIN, [text], params)[0]
        with Engine.load(llama, kept(tmp_path), tokenizer=Ids()) as engine:
            assert engine.generate([text], params) == [expected]
            num_new = len(text) - num_before + len(expected.token_ids) - 1
            # The last answer's last token was never computed.
            assert num_new <= engine.metrics.step_tokens <= num_new + BLOCK_SIZE
        text += expected.token_ids


@pytest.mark.inner
def test_what_was_evicted_and_preempted_comes_from_disk(llama: Path, tmp_path: Path) -> None:
    """In a cache that holds one sequence and a half."""
    asked = prompts("evicted", 90, 88, 86)
    expected, _ = answers(llama, PLAIN, asked)
    settings = kept(tmp_path, max_model_len=128, num_kv_tokens=160)
    with Engine.load(llama, settings, tokenizer=Ids()) as engine:
        for _ in range(2):
            for prompt, answer in zip(asked, expected, strict=True):
                assert engine.generate([prompt], PARAMS) == [answer]
                disk_of(engine).flush()
        assert num_read(engine) >= 2 * 5
        before = num_read(engine)
        engine.add(GenerationRequest(asked[0], replace(PARAMS, max_tokens=30), "first", priority=1))
        got: dict[str, list[int]] = {"first": [], "second": []}
        while not got["first"]:
            for output in engine.step():
                got["first"] += output.token_ids
        disk_of(engine).flush()
        engine.add(GenerationRequest(asked[1], PARAMS, "second"))  # takes the place of the first
        while engine.has_work:
            for output in engine.step():
                got[output.request_id] += output.token_ids
        assert engine.metrics.num_preemptions == 1 and num_read(engine) > before + 5
        assert got["second"] == expected[1].token_ids and got["first"][:9] == expected[0].token_ids


def test_other_weights_another_salt_or_another_arithmetic_find_nothing(tmp_path: Path) -> None:
    asked = prompts("other", 40)
    build("Llama", tmp_path / "model")
    answers(tmp_path / "model", kept(tmp_path), asked)
    assert num_read(answers(tmp_path / "model", kept(tmp_path), asked)[1]) == 2
    for settings in (kept(tmp_path, activations="int8"), kept(tmp_path, kv_dtype="int8")):
        expected, engine = answers(tmp_path / "model", settings, asked)
        assert num_read(engine) == 0
    again, engine = answers(tmp_path / "model", settings, asked)  # INT8 finds what INT8 wrote
    assert num_read(engine) == 2 and again == expected
    with Engine.load(tmp_path / "model", kept(tmp_path), tokenizer=Ids()) as engine:
        engine.add(GenerationRequest(asked[0], PARAMS, cache_salt="someone"))
        while engine.has_work:
            engine.step()
        assert num_read(engine) == 0
    weights = tmp_path / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1  # a mantissa
    weights.write_bytes(content)
    expected, _ = answers(tmp_path / "model", PLAIN, asked)
    again, engine = answers(tmp_path / "model", kept(tmp_path), asked)
    assert num_read(engine) == 0 and again == expected


def test_a_flipped_byte_is_found_and_its_tokens_are_computed_again(llama: Path, tmp_path: Path) -> None:
    asked = prompts("flipped", 90)
    expected, _ = answers(llama, kept(tmp_path), asked)
    (blocks,) = (tmp_path / "kv").glob(f"*/{BLOCKS}")
    content = bytearray(blocks.read_bytes())
    content[2 * len(content) // 6 + 7] ^= 0x40  # of the third of six blocks
    blocks.write_bytes(content)
    again, engine = answers(llama, kept(tmp_path), asked)
    assert again == expected
    stats = engine.metrics.kv_disk
    assert stats is not None and stats.corrupt_blocks == 1 and num_read(engine) == 4
    again, engine = answers(llama, kept(tmp_path), asked)
    assert again == expected and num_read(engine) == 5, "the block was written again"


def test_a_second_engine_reads_only_what_the_first_one_keeps(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = prompts("second", 40, 60)
    expected, _ = answers(llama, PLAIN, asked)
    with Engine.load(llama, kept(tmp_path), tokenizer=Ids()) as first:
        assert first.generate(asked[:1], PARAMS) == expected[:1]
        disk_of(first).flush()
        again, second = answers(llama, kept(tmp_path), asked)
        assert again == expected and num_read(second) == 2
        assert "only reads" in caplog.text
        stats = second.metrics.kv_disk
        assert stats is not None and not stats.is_writer and stats.written_blocks == 0
        assert first.generate(asked, PARAMS) == expected


@pytest.mark.parametrize("error", ["No space left on device", "Input/output error"])
def test_a_disk_that_takes_nothing_costs_no_answer(
    llama: Path, tmp_path: Path, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, code = prompts("full", 40, 60), {os.strerror(n): n for n in errno.errorcode}[error]

    def refuse(shelf: Shelf, descriptor: int, data: memoryview, offset: int) -> None:
        raise OSError(code, error)

    monkeypatch.setattr(Shelf, "_write_all", refuse)
    again, engine = answers(llama, kept(tmp_path), asked)
    assert again == answers(llama, PLAIN, asked)[0]
    stats = engine.metrics.kv_disk
    assert stats is not None and stats.failed_writes and not stats.written_blocks


def test_a_disk_that_was_full_is_filled_again(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its limit is what it has while it is full, and what was asked for when its time is up."""
    asked, write_all = prompts("full for a while", 60, 70, 80, 90), Shelf._write_all

    def write_within(shelf: Shelf, descriptor: int, data: memoryview, offset: int) -> None:
        if offset >= os.fstat(descriptor).st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(shelf, descriptor, data, offset)

    with Engine.load(llama, kept(tmp_path), tokenizer=Ids()) as engine:
        store = disk_of(engine)
        assert store is not None
        limit = store.stats.limit_bytes

        def ask(number: int) -> tuple[int, int]:
            engine.generate(asked[number : number + 1], PARAMS)
            store.flush()
            return store.stats.num_blocks, store.stats.limit_bytes

        few, _ = ask(0)
        with monkeypatch.context() as patch:
            patch.setattr(Shelf, "_write_all", write_within)
            num_blocks, limit_now = ask(1)
            assert num_blocks == few and limit_now == store.stats.num_bytes < limit
            assert store.stats.failed_writes == 1, "other blocks take the places of these"
        assert ask(2)[0] == few
        store._full_until_s = 0.0
        more, limit_now = ask(3)
        assert more > few and limit_now == limit


def test_a_disk_that_hangs_costs_no_answer(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that waits for it can be aborted, and goes on by itself when reading takes too long."""
    asked = prompts("hanging", 60)
    expected, _ = answers(llama, kept(tmp_path), asked)
    goes_on, read = threading.Event(), Shelf.read

    def hang(shelf: Shelf, key: bytes, buffer: memoryview) -> bool | None:
        goes_on.wait()
        return read(shelf, key, buffer)

    monkeypatch.setattr(Shelf, "read", hang)
    with Engine.load(llama, kept(tmp_path), tokenizer=Ids()) as engine:
        engine.add(GenerationRequest(asked[0], PARAMS, "waits"))
        assert engine.step() == [] and engine.has_work
        engine.abort("waits")
        assert not engine.has_work and engine.metrics.kv_blocks_used == 0
        monkeypatch.setattr(engine.meter, "prompt_s", lambda *_: 0.0011)  # computing takes so long
        monkeypatch.setattr(disk_of(engine), "expected_read_s", lambda num_blocks: 0.001)
        assert engine.generate(asked, PARAMS) == expected and num_read(engine) == 0
        goes_on.set()
        monkeypatch.setattr(disk_of(engine), "expected_read_s", lambda num_blocks: 1.0)
        assert engine.generate(asked, PARAMS) == expected
        assert engine.metrics.prefix_cache_hits, "blocks in memory are used"


def test_what_can_not_be_kept_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prefix"):
        EngineConfig(kv_disk="kv", enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="name the folder"):
        EngineConfig(kv_disk_bytes=1)
    with pytest.raises(ConfigError, match="one block"):
        Engine.load(llama, kept(tmp_path, kv_disk_bytes=100), tokenizer=Ids())
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't be made"):
        Engine.load(llama, replace(kept(tmp_path), kv_disk=str(tmp_path / "file" / "kv")), tokenizer=Ids())
