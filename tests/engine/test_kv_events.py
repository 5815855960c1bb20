"""Events of the prefix cache: a router that knows nothing else knows what the engine holds. The router reads
with pyzmq and msgspec's typed decoder, by classes in the form in which vLLM declares its own."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import test_cpmant
import test_encoder_decoder
import zmq
from engine_features import disk_of, pipe_of, publisher_of
from node_cluster import CONFIG, Cluster, cluster
from test_convert import Ids
from tiny_models import VOCAB_SIZE, build

from penstock.async_engine import AsyncEngine
from penstock.config import EngineConfig, KVEventsConfig
from penstock.engine import Engine
from penstock.errors import ConfigError
from penstock.generation.blocks.block_log import AllCleared, BlockLog, BlocksRemoved, BlocksStored
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.kv_events.publisher import END, Publisher

SIZE = 16
PLAIN = EngineConfig(max_model_len=192, max_num_batched_tokens=64, num_kv_tokens=480)
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


class Event(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """What vLLM's events have in common."""


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class SaltedStored(BlockStored, tag="BlockStored"):
    """With the field that follows in later versions of vLLM."""

    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[SaltedStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class OldStored(Event, tag="BlockStored"):
    """The event as vLLM 0.9 had it: whoever decodes so reads on."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


def unsalted(batch: KVEventBatch) -> list[Any]:
    """The batch with the events of a version without `extra_keys`."""
    names = BlockStored.__struct_fields__
    events = [
        BlockStored(*(getattr(event, name) for name in names)) if isinstance(event, SaltedStored) else event
        for event in batch.events
    ]
    return [batch.ts, events, batch.data_parallel_rank]


class Router:
    """Asks for what it has missed, and follows what comes."""

    def __init__(self, config: KVEventsConfig) -> None:
        context = zmq.Context.instance()
        self.live, self.replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self.live.setsockopt_string(zmq.SUBSCRIBE, config.topic)
        self.live.connect(config.endpoint)
        if config.replay_endpoint is not None:
            self.replay.connect(config.replay_endpoint)
        self.topic = config.topic.encode()
        self.next_number = 0
        #: Hash -> (hash of the block before, tokens, adapter's name, whether it is of a salt).
        self.blocks: dict[int, tuple[int | None, tuple[int, ...], str | None, bool]] = {}

    def __enter__(self) -> Router:
        return self

    def __exit__(self, *exc: object) -> None:
        self.live.close(linger=0)
        self.replay.close(linger=0)

    def asked(self, first: int) -> Iterator[tuple[int, bytes]]:
        self.replay.send_multipart([b"", first.to_bytes(8, "big")])
        yield from self.replayed()

    def replayed(self) -> Iterator[tuple[int, bytes]]:
        while True:
            assert self.replay.poll(20000), "no answer"
            empty, number, payload = self.replay.recv_multipart()
            assert empty == b""
            if number == END:
                assert payload == b""
                return
            yield int.from_bytes(number, "big"), payload

    def follow(self, engine: Engine) -> set[int]:
        """The hashes of all blocks, when everything that was published has come."""
        publisher = publisher_of(engine)
        while publisher.stats.sent_batches < publisher._next_number:
            time.sleep(0.002)
        found = list[tuple[int, bytes]]()
        while self.live.poll(0):
            topic, number, payload = self.live.recv_multipart()
            assert topic == self.topic
            found.append((int.from_bytes(number, "big"), payload))
        if not found or found[0][0] > self.next_number or found[-1][0] + 1 < publisher._next_number:
            found = [*self.asked(self.next_number), *found]
        for number, payload in sorted(found):
            if number >= self.next_number:
                assert number == self.next_number, "a gap"
                self.next_number += 1
                self.read(payload)
        return set(self.blocks)

    def read(self, payload: bytes) -> None:
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        assert abs(batch.ts - time.time()) < 600 and batch.data_parallel_rank == 0 and batch.events
        if not any(isinstance(event, SaltedStored) and event.extra_keys for event in batch.events):
            assert msgspec.msgpack.encode(unsalted(batch)) == payload, "the bytes that vLLM would send"
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlockRemoved):
                assert event.medium == "GPU"
                for each in event.block_hashes:
                    del self.blocks[each]
            else:
                self.store(event)

    def store(self, event: SaltedStored) -> None:
        assert event.block_size == SIZE and event.medium == "GPU"
        assert len(event.token_ids) == SIZE * len(event.block_hashes)
        parent, salts = event.parent_block_hash, event.extra_keys or [None] * len(event.block_hashes)
        for index, each in enumerate(event.block_hashes):
            assert each not in self.blocks, "it was there already"
            tokens = tuple(event.token_ids[index * SIZE : index * SIZE + SIZE])
            self.blocks[each] = (parent, tokens, event.lora_name, salts[index] is not None)
            parent = each

    def num_found(self, prompt: list[int]) -> int:
        """Whole blocks of a prompt without salt that the engine holds, by what the router was told."""
        children = {entry: each for each, entry in self.blocks.items()}
        parent, count = None, 0
        while len(prompt) >= (count + 1) * SIZE:
            tokens = tuple(prompt[count * SIZE : (count + 1) * SIZE])
            parent = children.get((parent, tokens, None, False))
            if parent is None:
                break
            count += 1
        return count


def own_view(engine: Engine) -> set[int]:
    pool = engine.scheduler.block_manager.pool
    whole = [pool.key_of(block) for block in range(pool.num_blocks) if pool.num_keyed_tokens(block) == SIZE]
    return {int.from_bytes(key, "big") % 2**64 for key in whole}


@pytest.fixture
def config(tmp_path: Path) -> KVEventsConfig:
    return KVEventsConfig(f"ipc://{tmp_path}/e", replay_endpoint=f"ipc://{tmp_path}/r", topic="kv@me")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    build("Llama", folder)
    return folder


def test_a_router_forgets_what_was_computed_with_a_machine_that_is_gone(
    llama: Path, config: KVEventsConfig
) -> None:
    """Also while there is no request."""

    async def check(made: Cluster, router: Router) -> None:
        settings = replace(CONFIG, kv_events=config)
        engine = AsyncEngine(lambda report: made.engine(llama, settings))
        engine.start()
        await engine.wait_until_ready()
        async for _ in engine.generate(list(range(5, 90)), GREEDY):
            pass
        assert router.follow(engine.engine)
        member = pipe_of(engine.engine).leader.members[0]
        assert member.peer is not None
        member.peer.close("the test has cut the link")
        while router.follow(engine.engine):
            await asyncio.sleep(0.01)
        assert not own_view(engine.engine)
        await engine.stop()

    with cluster() as made, Router(config) as router:
        asyncio.run(asyncio.wait_for(check(made, router), 60))


def work(engine: Engine) -> int:
    """Until everything is answered. Returns the cached tokens of the last answer."""
    num_cached = 0
    while engine.has_work:
        for output in engine.step():
            num_cached = output.num_cached_tokens
    return num_cached


@pytest.mark.parametrize("name", ["Llama", "LFM2"])
def test_a_router_knows_what_the_engine_holds(
    name: str, tmp_path: Path, config: KVEventsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a load with evictions, preemptions, aborted requests, a salt and failing steps."""
    build(name, tmp_path / "model")
    dice = random.Random(name)
    heads = [[dice.randrange(3, VOCAB_SIZE) for _ in range(dice.randrange(20, 90))] for _ in range(4)]
    settings = replace(PLAIN, kv_events=config)
    with Engine.load(tmp_path / "model", settings, tokenizer=Ids()) as engine, Router(config) as router:
        forward = engine.model.executor.forward
        for number in range(40):
            tail = [dice.randrange(3, VOCAB_SIZE) for _ in range(dice.randrange(1, 50))]
            salt = dice.choice(("", "", "someone"))
            params = replace(GREEDY, max_tokens=dice.choice((3, 30)))
            request = GenerationRequest(dice.choice(heads) + tail, params, str(number), cache_salt=salt)
            engine.add(request)
            for _ in range(dice.randrange(6)):
                engine.step()
            if dice.random() < 0.2:
                engine.abort(str(number))
            if dice.random() < 0.1 and engine.has_work:
                monkeypatch.setattr(engine.model.executor, "forward", _fail)
                with pytest.raises(ZeroDivisionError):
                    engine.step()
                monkeypatch.setattr(engine.model.executor, "forward", forward)
            if dice.random() < 0.3:
                assert router.follow(engine) == own_view(engine)
        work(engine)
        assert router.follow(engine) == own_view(engine) and len(router.blocks) > 10
        assert engine.metrics.num_preemptions > 0
        assert {entry[3] for entry in router.blocks.values() if entry[0] is None} <= {True, False}
        stats = engine.metrics.kv_events
        assert stats is not None and not stats.dropped_batches and stats.sent_bytes
        if name == "LFM2":
            return  # blocks alone are not enough there: states are not told of
        for head in heads:
            expected = router.num_found([*head, 5])
            engine.add(GenerationRequest([*head, 5], GREEDY, "asked"))
            # A prompt's last block need not be whole to be found, and routers are not told of it.
            assert expected * SIZE <= work(engine) < (expected + 1) * SIZE
            router.follow(engine)


def _fail(*args: object) -> Any:
    raise ZeroDivisionError


def test_blocks_that_come_from_disk_are_told_of(llama: Path, tmp_path: Path, config: KVEventsConfig) -> None:
    prompt = [dice % VOCAB_SIZE for dice in range(3, 83)]
    settings = replace(PLAIN, kv_events=config, kv_disk=str(tmp_path / "kv"))
    for number in range(2):
        with Engine.load(llama, settings, tokenizer=Ids()) as engine, Router(config) as router:
            engine.generate([prompt], GREEDY)
            assert router.follow(engine) == own_view(engine) and router.num_found(prompt) == 5
            assert engine.metrics.kv_disk is not None
            disk_of(engine).flush()
            assert engine.metrics.kv_disk.reads.num_blocks == 5 * number
            engine.scheduler.reset()  # as after the loss of a machine
            engine.step()
            assert router.follow(engine) == own_view(engine) == set()


def test_a_live_subscriber_gets_topic_number_and_batch(llama: Path, config: KVEventsConfig) -> None:
    settings, other_topic = replace(PLAIN, kv_events=config), replace(config, topic="another")
    with (
        Engine.load(llama, settings, tokenizer=Ids()) as engine,
        Router(config) as router,
        Router(other_topic) as other,
    ):
        for number in range(90):  # a subscriber begins to hear some time after it has connected
            engine.generate([[number + 3] * 20], GREEDY)
            if router.live.poll(50):
                break
        topic, sequence, payload = router.live.recv_multipart()
        assert topic == b"kv@me" and len(sequence) == 8
        event = msgspec.msgpack.decode(payload, type=KVEventBatch).events[-1]
        assert isinstance(event, SaltedStored) and event.parent_block_hash is None
        assert event.token_ids == [int.from_bytes(sequence, "big") + 3] * 16
        old = msgspec.convert(msgspec.msgpack.decode(payload)[1][-1], OldStored)
        assert old.block_hashes == event.block_hashes and old.token_ids == event.token_ids
        assert not other.live.poll(0)


def test_what_waits_too_long_is_lost_counted_and_seen(
    config: KVEventsConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on, send = threading.Event(), Publisher._send

    def hang(self: Publisher, batch: Any) -> None:
        goes_on.wait()
        send(self, batch)

    monkeypatch.setattr(Publisher, "_send", hang)
    config = replace(config, max_queue_size=2, buffer_steps=2)
    publisher = Publisher(config, SIZE)
    publisher.publish([])  # nothing happened: no batch
    publisher.publish([AllCleared()])
    while not publisher._queue.empty():  # the thread has it in hand
        time.sleep(0.002)
    for key in (b"1", b"2", b"3", b"4"):
        publisher.publish([BlocksRemoved((key * 32,))])
    assert publisher.stats.dropped_batches == 2 and caplog.text.count("are lost") == 1
    goes_on.set()
    while not publisher._queue.empty():
        time.sleep(0.002)
    publisher.publish([BlocksStored((b"5" * 32,), b"", tuple(range(16)), ("poet", 7), "ab")])
    with Router(config) as router:
        while publisher.stats.sent_batches < 4:
            time.sleep(0.002)
        got = [
            (number, msgspec.msgpack.decode(payload, type=KVEventBatch))
            for number, payload in router.asked(0)
        ]
    publisher.close()
    assert [number for number, _ in got] == [2, 5], "0 and 1 are kept no longer, 3 and 4 are lost"
    (removed,), (stored,) = (batch.events for _, batch in got)
    assert removed == BlockRemoved([int.from_bytes(b"2" * 8, "big")], "GPU")
    hashes = [int.from_bytes(b"5" * 8, "big")]
    assert stored == SaltedStored(hashes, None, list(range(16)), 16, 7, "GPU", "poet", [("ab",)])


def test_an_error_costs_one_batch_and_is_told_once(
    config: KVEventsConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = Publisher(config, SIZE)
    pack, replay, replays = publisher._pack, Publisher._replay, list[object]()

    def fail_at_first(self: Publisher, frames: list[bytes]) -> None:
        replays.append(frames)
        (replay if len(replays) > 1 else _fail)(self, frames)

    monkeypatch.setattr(Publisher, "_replay", fail_at_first)
    monkeypatch.setattr(publisher, "_pack", _fail)
    publisher.publish([AllCleared()])
    publisher.publish([AllCleared()])
    while publisher.stats.dropped_batches < 2 and publisher._thread.is_alive():
        time.sleep(0.002)
    monkeypatch.setattr(publisher, "_pack", pack)
    publisher.publish([AllCleared()])
    with Router(config) as router:
        router.replay.send_multipart([b"", bytes(8)])  # to nobody
        while not replays and publisher._thread.is_alive():
            time.sleep(0.002)
        assert [number for number, _ in router.asked(0)] == [2]
    publisher.close()
    assert (publisher.stats.sent_batches, publisher.stats.dropped_batches) == (1, 2)
    assert caplog.text.count("could not be sent") == caplog.text.count("Traceback") == 1


def test_a_slow_client_gets_a_whole_replay(config: KVEventsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than ZeroMQ holds of itself for a client that does not read: 1000 messages on each side."""
    is_sent, replay = threading.Event(), Publisher._replay

    def listen(self: Publisher, frames: list[bytes]) -> None:
        replay(self, frames)
        is_sent.set()

    monkeypatch.setattr(Publisher, "_replay", listen)
    publisher, num_batches = Publisher(replace(config, buffer_steps=3000), SIZE), 3000
    for _ in range(num_batches):
        publisher.publish([BlocksStored((b"1" * 32,), b"", tuple(range(512)), None, "")])
    while publisher.stats.sent_batches < num_batches:
        time.sleep(0.002)
    with Router(config) as router:
        router.replay.send_multipart([b"", bytes(8)])
        is_sent.wait()
        assert [number for number, _ in router.replayed()] == [*range(num_batches)]
    publisher.close()


def test_a_publisher_with_a_full_queue_ends(config: KVEventsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its thread empties the queue in time, and nothing more comes."""
    goes_on, send = threading.Event(), Publisher._send

    def hang(self: Publisher, batch: Any) -> None:
        goes_on.wait()
        send(self, batch)

    monkeypatch.setattr(Publisher, "_send", hang)
    publisher = Publisher(replace(config, max_queue_size=1, replay_endpoint=None), SIZE)
    publisher.publish([AllCleared()])
    while not publisher._queue.empty():  # the thread has it in hand
        time.sleep(0.002)
    publisher.publish([AllCleared()])
    closing = threading.Thread(target=publisher.close, daemon=True)
    closing.start()
    while publisher._closes_at_s is None:
        time.sleep(0.002)
    goes_on.set()
    closing.join(60)
    assert not closing.is_alive(), "it waits for ever"


def test_many_blocks_become_few_events_in_their_order() -> None:
    log = BlockLog(2)
    sequence: Any = SimpleNamespace(
        block_keys=[bytes([index]) for index in range(5)],
        token_ids=list(range(10)),
        request=SimpleNamespace(prompt_embeds=None, adapter=None, cache_salt=""),
    )
    for index in (0, 1, 2, 4):
        log.arrive(index, sequence, bytes([index]))
    log.arrive(7, sequence, b"another")  # of an encoded input
    log.drop(0)
    log.drop(4)
    assert log.take() == (
        BlocksStored((b"\0", b"\1", b"\2"), b"", (0, 1, 2, 3, 4, 5), None, ""),
        BlocksStored((b"\4",), b"\3", (8, 9), None, ""),
        BlocksRemoved((b"\0", b"\4")),
    )
    assert log.take() == ()


def test_what_can_not_be_published_is_refused(
    llama: Path, tmp_path: Path, config: KVEventsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(PLAIN, kv_events=config)
    test_encoder_decoder.build("T5 v1.1", tmp_path / "t5")
    test_cpmant.build("CPM-Ant", tmp_path / "ant")
    for name, words in (("t5", "an encoder"), ("ant", "both ways")):
        with pytest.raises(ConfigError, match=words):
            Engine.load(tmp_path / name, settings, tokenizer=Ids())
    with Engine.load(
        llama, replace(PLAIN, kv_events=KVEventsConfig("tcp://127.0.0.1:*")), tokenizer=Ids()
    ) as engine:
        taken = (
            publisher_of(engine)._publishing.getsockopt_string(zmq.LAST_ENDPOINT).replace("127.0.0.1", "*")
        )
        with pytest.raises(ConfigError, match=r"can't be used: Address already in use"):
            Engine.load(llama, replace(PLAIN, kv_events=KVEventsConfig(taken)), tokenizer=Ids())
    with pytest.raises(ConfigError, match="prefix"):
        replace(settings, enable_prefix_caching=False)
    for values in ({"hwm": 0}, {"hwm": 2**31}, {"buffer_steps": "1"}, {"endpoint": ""}, {"topic": 3}):
        with pytest.raises(ConfigError, match=next(iter(values))):
            KVEventsConfig(**values)
    for name in ("zmq", "msgpack"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            with pytest.raises(ConfigError, match=r"penstock-llm\[events\]"):
                Engine.load(llama, settings, tokenizer=Ids())
