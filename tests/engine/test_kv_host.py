"""Keys and values of a card that are kept in the host's memory: on a pretended card, and with the processor
in the place of a card, whose blocks are moved by the same code."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_features import stores_of
from pretended_card import engines, missing
from test_convert import Ids
from tiny_models import VOCAB_SIZE, build

from penstock import goes_with
from penstock.cache.disk.kv_store import NUM_BUFFERS, KVStore
from penstock.cache.disk.record import NO_KEY
from penstock.cache.host.host_shelf import HostShelf
from penstock.config import EngineConfig
from penstock.engine import Completion, Engine
from penstock.errors import CapacityError, ConfigError
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.goes_with import REFUSALS, Feature
from penstock.memory.hardware import DeviceProfile, HardwareProfile
from penstock.memory.planning.planner import plan_memory
from penstock.model.footprint import footprint
from penstock.model.known_shapes import find_shape
from penstock.model.registry import read_spec
from penstock.weights.store import planned_tensors

on_a_card = pytest.mark.skipif(missing() is not None, reason=str(missing()))
GIB, MIB, PAGE = 1 << 30, 1 << 20, 4096
PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=6, ignore_eos=True, logprobs=2)
#: Room for a sequence and a half.
NARROW = EngineConfig(
    max_model_len=112,
    max_num_batched_tokens=40,
    max_num_seqs=4,
    num_kv_tokens=160,
    num_threads=1,
    kv_host_bytes=4 * MIB,
)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=on_a_card)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device that computes. On the pretended card, everything is given back in the end, and no copy races
    with another."""
    if request.param == "cpu":
        rest = {pair: each for pair, each in REFUSALS.items() if pair != (Feature.KV_HOST, Feature.NO_GPU)}
        monkeypatch.setattr(goes_with, "REFUSALS", rest)
        yield "cpu"
        return
    with engines.card_with_kernels() as card:
        yield "cuda"
        assert not card.races.found
        assert card.driver.num_registered == 0 and card.memory.used_bytes == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build("Llama", folder / "made", num_hidden_layers=2)
    engines.convert_for_streaming(folder / "made", folder / "converted")
    return folder / "converted"


def prompts(*lengths: int) -> list[list[int]]:
    dice = random.Random("host")
    return [[dice.randrange(8, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def load(model: Path, settings: EngineConfig, device: str) -> Engine:
    engine = Engine.load(model, replace(settings, device=device), tokenizer=Ids())
    engine.meter.prompt_s = lambda num_tokens, _: 10.0 * num_tokens  # type: ignore[method-assign]
    return engine


def store_of(engine: Engine, tier: str) -> KVStore[Any]:
    store = stores_of(engine).get(tier)
    assert store is not None
    return store


def one_by_one(engine: Engine, asked: list[list[int]]) -> list[Completion]:
    found = []
    for prompt in asked:
        found += engine.generate([prompt], PARAMS)
        for store in stores_of(engine).values():
            store.flush()
    return found


def test_what_leaves_the_card_comes_back_from_the_host(model: Path, device: str) -> None:
    asked = prompts(70, 75, 80)
    with load(model, replace(NARROW, num_kv_tokens=1024, kv_host_bytes=None), device) as engine:
        expected = one_by_one(engine, asked)
    with load(model, NARROW, device) as engine:
        assert one_by_one(engine, asked) == expected
        assert one_by_one(engine, asked) == expected
        stats = engine.metrics.kv_host
        assert stats is not None and engine.metrics.kv_disk is None
        assert stats.reads.num_blocks >= 3 * 4 and stats.reads.num_tokens == 16 * stats.reads.num_blocks
        assert stats.read_bytes and stats.reads.saved_s > 0
        assert stats.limit_bytes <= engine.plan.kv_host_bytes <= 4 * MIB


@pytest.mark.parametrize("has_disk", [False, True])
def test_a_preempted_sequence_goes_to_the_host(
    model: Path, device: str, tmp_path: Path, has_disk: bool
) -> None:
    """And computes nothing twice."""
    first, second = prompts(85, 86)
    params = replace(PARAMS, max_tokens=20)
    results = []
    for settings in (replace(NARROW, num_kv_tokens=1024, kv_host_bytes=None), NARROW):
        if has_disk:
            settings = replace(settings, kv_disk=str(tmp_path / f"kv {len(results)}"))
        with load(model, settings, device) as engine:
            engine.add(GenerationRequest(first, params, "low", priority=1))
            for _ in range(5):
                engine.step()
            engine.add(GenerationRequest(second, params, "high"))
            found: dict[str, list[Any]] = {"low": [], "high": []}
            while engine.has_work:
                for output in engine.step():
                    found[output.request_id] += output.logprobs
            assert engine.metrics.kv_blocks_used == 0
            results.append((found["low"][-15:], found["high"], engine.metrics.step_tokens))
            counts = engine.metrics.preemptions
    assert results[0] == results[1]
    assert counts.num_moved == 1 and counts.moved_tokens > 30


def test_blocks_go_through_the_host_to_the_disk_and_back(model: Path, device: str, tmp_path: Path) -> None:
    """A new engine finds on disk what the card and the host have lost, and keeps it on the host."""
    asked = prompts(70, 75, 80)
    settings = replace(NARROW, kv_disk=str(tmp_path / "kv"))
    with load(model, settings, device) as engine:
        expected = one_by_one(engine, asked)
        disk, host = store_of(engine, "disk"), store_of(engine, "host")
        assert disk.stats.num_blocks == host.stats.num_blocks >= 12
    with load(model, settings, device) as engine:
        assert one_by_one(engine, asked) == expected
        disk, host = store_of(engine, "disk"), store_of(engine, "host")
        assert (num_read := disk.stats.reads.num_blocks) >= 12 and host.stats.reads.num_blocks == 0
        assert disk.stats.written_blocks == 0
        assert one_by_one(engine, asked) == expected
        assert disk.stats.reads.num_blocks == num_read and host.stats.reads.num_blocks >= 10
    with load(model, replace(settings, kv_host_bytes=None), device) as engine:  # the disk alone
        assert one_by_one(engine, asked) == expected
        assert store_of(engine, "disk").stats.reads.num_blocks >= 12


@on_a_card
def test_buffers_are_pinned_on_any_card(model: Path, tmp_path: Path) -> None:
    with engines.card_with_kernels(number=1, num_cards=2) as card:
        with load(model, replace(NARROW, kv_disk=str(tmp_path / "kv")), "cuda:1") as engine:
            for store in (store_of(engine, "host"), store_of(engine, "disk")):
                waiting = store._reads._buffers
                buffers = [store._buffer, *(waiting.get() for _ in range(waiting.qsize()))]
                assert len(buffers) == NUM_BUFFERS and all(map(card.is_pinned, buffers))
                for buffer in buffers[1:]:
                    waiting.put(buffer)
        assert not card.strayed and card.driver.num_registered == 0


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_recurrent_states_are_refused(device: str, tmp_path: Path) -> None:
    build("LFM2", tmp_path)
    with pytest.raises(ConfigError, match="--kv-host-memory .* recurrent states .* leave it out"):
        load(tmp_path, NARROW, device)


def test_slots_of_the_host() -> None:
    """What was used least recently gives way; a slot that is given to another block is not believed."""
    shelf, told = HostShelf(3 * PAGE + 100, PAGE), []
    shelf.tell = lambda slot, key, parent, is_unchanged: told.append((slot, key, is_unchanged))
    buffer = torch.zeros(PAGE, dtype=torch.uint8)

    def add(number: int, parent: bytes = NO_KEY) -> None:
        content = torch.full((PAGE,), number, dtype=torch.uint8)
        shelf.add(bytes([number]) * 32, parent, memoryview(content.numpy().data))

    def value(number: int) -> int | None:
        view = memoryview(buffer.numpy().data)
        return int(buffer[0]) if shelf.read(bytes([number]) * 32, view) else None

    for number in (1, 2, 3):
        add(number, bytes([1]) * 32 if number == 2 else NO_KEY)
    assert shelf.limit_bytes == shelf.num_bytes == 3 * PAGE and [value(n) for n in (1, 2, 3)] == [1, 2, 3]
    shelf.use([bytes([2]) * 32])
    add(4)
    assert 3 not in [value(n) for n in (1, 2, 4)] and value(3) is None and value(4) == 4
    assert shelf.parent_of(bytes([2]) * 32) == bytes([1]) * 32 and shelf.parent_of(bytes([3]) * 32) is None
    assert [is_unchanged() for _, _, is_unchanged in told] == [True, True, False, True]
    add(4)
    assert len(told) == 4, "it was there"
    add(5)  # the block behind the first one gives way before it
    assert value(2) is None and value(1) == 1
    shelf.read_block(told[0][0], buffer)
    assert int(buffer[0]) == 1


def test_many_threads_find_whole_blocks() -> None:
    shelf = HostShelf(4 * PAGE, PAGE)
    bad = list[int]()

    def write() -> None:
        for number in range(400):
            content = torch.full((PAGE,), number % 251, dtype=torch.uint8)
            shelf.add(number.to_bytes(32, "big"), NO_KEY, memoryview(content.numpy().data))

    def read() -> None:
        buffer = torch.zeros(PAGE, dtype=torch.uint8)
        for number in range(400):
            if shelf.read(number.to_bytes(32, "big"), memoryview(buffer.numpy().data)):
                bad.extend([number] if (buffer != number % 251).any() else [])

    threads = [threading.Thread(target=each) for each in (write, read, read, write)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not bad and len(shelf) == 4


CARD = DeviceProfile("card", (8, 6), 12 * GIB, 11 * GIB, 360.0, 12.0, 50000.0, 30 * GIB)
MACHINE = HardwareProfile(8, 32 * GIB, 28 * GIB, 20.0, 1000.0, device=CARD)


def test_the_plan_counts_it() -> None:
    shape = find_shape("solar-10.7b")
    family, spec = read_spec(shape)
    size = footprint(spec, planned_tensors(family.model_tensors(spec), shape, "int8", None))
    config = EngineConfig(host_memory_bytes=6 * GIB, device_memory_bytes=4 * GIB)
    plain, kept = (plan_memory(size, MACHINE, replace(config, kv_host_bytes=each)) for each in (None, GIB))
    assert kept.kv_host_bytes == 341 * 3 * MIB, "whole blocks of 3 MiB"
    assert kept.host_used_bytes <= 6 * GIB and kept.layer_bytes("host") < plain.layer_bytes("host")
    with pytest.raises(CapacityError, match="--kv-host-memory"):
        plan_memory(size, MACHINE, replace(config, kv_host_bytes=6 * GIB))
    with pytest.raises(ConfigError, match="one block"):
        plan_memory(size, MACHINE, replace(config, kv_host_bytes=MIB))
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        plan_memory(
            size, replace(MACHINE, device=None), EngineConfig(host_memory_bytes=20 * GIB, kv_host_bytes=GIB)
        )
    with pytest.raises(ConfigError, match="prefix"):
        EngineConfig(kv_host_bytes=GIB, enable_prefix_caching=False)
