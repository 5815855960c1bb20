"""A model on several machines: the bits of one machine, whatever comes together, and whoever is lost."""

from __future__ import annotations

import math
import random
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_encoder_decoder
from drafters import Forest, Oracle
from engine_features import pipe_of
from node_cluster import CONFIG, OWN, Cluster, cluster
from test_convert import Ids
from tiny_models import build
from torch import Tensor

from penstock.config import EngineConfig
from penstock.engine import Completion, Engine
from penstock.errors import (
    ConfigError,
    HandoverError,
    MachineAway,
    PenstockError,
    StepFailed,
    UnsupportedModel,
)
from penstock.generation.beam_search import BeamParams
from penstock.generation.model_inputs import ModelInputs
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.memory.hardware import capacities
from penstock.nodes.leader import Leader
from penstock.nodes.member import Member
from penstock.nodes.part import Part
from penstock.nodes.wire.channel import Channel
from penstock.nodes.wire.frames import Kind
from penstock.nodes.wire.peer import Peer

PROMPTS = [[5, 9, 3], [7] * 20, [11, 2], list(range(3, 90)), [7] * 20 + [4]]
SAMPLED = SamplingParams(temperature=1, max_tokens=8, ignore_eos=True, logprobs=3, seed=5, prompt_logprobs=1)
PLAIN = replace(SAMPLED, prompt_logprobs=None, max_tokens=24)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    build("Llama", folder)
    return folder


def alone(model: Path, config: EngineConfig = CONFIG, params: SamplingParams = SAMPLED) -> list[Completion]:
    with Engine.load(model, config, tokenizer=Ids()) as engine:
        return engine.generate(PROMPTS, params)


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[Completion]:
    return alone(llama, params=PLAIN)


@pytest.fixture
def pair() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


def assert_empty(engine: Engine) -> None:
    assert engine.metrics.kv_blocks_used == 0 and not engine.has_work
    assert engine.scheduler.block_manager.pool.num_free == engine.plan.num_kv_blocks


MODELS = ("Llama", "Gemma 2", "Mixtral", "DeepSeek V2", "Phi-3, rope longrope", "BLOOM")


@pytest.mark.parametrize("name", MODELS)
def test_two_machines_have_the_bits_of_one(name: str, tmp_path: Path, pair: Cluster) -> None:
    """Prompts in chunks and scored ones; windows, latents, experts; streamed layers and resident ones."""
    build(name, tmp_path)
    with pair.engine(tmp_path, replace(CONFIG, num_resident_layers=1)) as engine:
        assert engine.generate(PROMPTS, SAMPLED) == alone(tmp_path)
        assert engine.generate(PROMPTS, SAMPLED)  # with blocks of the first time
        assert_empty(engine)
        own, status = engine.nodes
        assert [each.rank for each in engine.nodes] == [0, 1] and own.layers[1] == status.layers[0]
        assert status.state == "ready" and status.num_losses == 0 and status.away_s is None
        assert own.num_steps == status.num_steps and own.busy_s > 0 < status.busy_s
        assert status.rounds_alike


def test_three_machines_and_several_groups(llama: Path) -> None:
    with cluster(3) as made, made.engine(llama) as engine:
        widest = 0
        for index, prompt in enumerate(PROMPTS):
            engine.add(GenerationRequest(prompt, PLAIN, str(index)))
        found = {str(index): Completion() for index in range(len(PROMPTS))}
        while engine.has_work:
            for output in engine.step():
                found[output.request_id].extend(output)
            widest = max(widest, pipe_of(engine).num_in_flight)
        assert list(found.values()) == alone(llama, params=PLAIN)
        assert widest > 1, "no two steps were on their way at once"
        assert [(each.layers) for each in pipe_of(engine).leader.status()] == [(1, 2), (2, 3)]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_tokens": 176},  # some are preempted
        {"max_num_seqs": 2},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 7},
        {"kv_dtype": "float32", "activations": "int8"},
        {"kv_dtype": "int8"},
    ],
    ids=str,
)
def test_small_caches_and_small_steps(llama: Path, pair: Cluster, changes: dict[str, Any]) -> None:
    config = replace(CONFIG, **changes)
    with pair.engine(llama, config) as engine:
        assert engine.generate(PROMPTS, PLAIN) == alone(llama, config, PLAIN)
        assert_empty(engine)


def test_guesses_fill_the_pipe_for_one_person(llama: Path, expected: list[Completion], pair: Cluster) -> None:
    oracle = Oracle({(PLAIN.seed, *PROMPTS[0]): expected[0].token_ids}, 6, 4, 160)
    with pair.engine(llama, drafter=Forest(oracle)) as engine:
        assert engine.generate(PROMPTS[:1], PLAIN) == expected[:1]
        assert engine.metrics.accepted_tokens > 10
        assert engine.generate(PROMPTS, PLAIN) == expected
        assert_empty(engine)


def test_a_draft_model_takes_its_memory_from_the_leaders_part(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker leaves out what its own settings say of guesses and of keys and values on disk."""
    told, machine = list[int](), replace(capacities(), memory_read_gbps=10.0)
    share = Leader.share

    def listen(leader: Leader, *arguments: Any) -> Any:
        told.append(arguments[-1].free_ram_bytes)
        return share(leader, *arguments)

    monkeypatch.setattr(Leader, "share", listen)
    own = replace(OWN, draft_model="elsewhere", draft_with_eagle3=True, kv_disk="kv", kv_spill="spill")
    config, asked = replace(CONFIG, draft_model=str(tiny_llama)), [[5, 9, 3], [7] * 30]
    with Engine.load(tiny_llama, CONFIG) as engine:
        expected = engine.generate(asked, PLAIN)
    with (
        cluster(own=own) as made,
        Engine.load(tiny_llama, config, hardware=machine, nodes=made.nodes) as engine,
    ):
        assert engine.draft_model is not None
        assert told == [machine.free_ram_bytes - engine.draft_model.num_bytes]
        assert engine.generate(asked, PLAIN) == expected


def test_beams(llama: Path, pair: Cluster) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, beams=BeamParams(3))
    with pair.engine(llama) as engine:
        assert engine.generate(PROMPTS, params) == alone(llama, params=params)
        assert_empty(engine)


def generate(engine: Engine, at: dict[int, Any]) -> list[Completion]:
    """All answers; after the step of a number, its function is called."""
    for index, prompt in enumerate(PROMPTS):
        engine.add(GenerationRequest(prompt, PLAIN, str(index)))
    found = {str(index): Completion() for index in range(len(PROMPTS))}
    number = 0
    while engine.has_work:
        outputs = engine.step()
        for output in outputs:
            found[output.request_id].extend(output)
        number += bool(outputs)
        at.pop(number, lambda: None)()
    return list(found.values())


def first_member(engine: Engine) -> Member:
    return pipe_of(engine).leader.members[0]


def test_a_link_that_breaks_comes_back(llama: Path, expected: list[Completion], pair: Cluster) -> None:
    """Also twice, and between two steps; nothing is computed from blocks of before."""
    with pair.engine(llama) as engine:

        def cut() -> None:
            peer = first_member(engine).peer
            assert peer is not None
            peer.close("the test has cut the link")

        assert generate(engine, {3: cut, 9: cut, 10: cut}) == expected
        assert first_member(engine).num_losses >= 2
        assert_empty(engine)


def test_a_step_to_a_worker_that_goes_and_comes_back(
    llama: Path, expected: list[Completion], pair: Cluster
) -> None:
    """The step went over a connection that has ended, and never arrives, though the worker is there."""
    with pair.engine(llama) as engine:
        send, times = pipe_of(engine)._pipe.send, iter(range(100))

        def cut_and_send(inputs: ModelInputs, hidden: Tensor, peers: Sequence[Peer]) -> int:
            if next(times) in (2, 7):
                peers[0].close("the test has cut the link")
                while first_member(engine).ready is None:
                    threading.Event().wait(0.001)
            return send(inputs, hidden, peers)

        pipe_of(engine)._pipe.send = cut_and_send  # type: ignore[method-assign]
        assert generate(engine, {}) == expected
        assert first_member(engine).num_losses == 2
        assert_empty(engine)


@pytest.mark.parametrize("side", ["leader", "worker"])
def test_an_error_of_a_machine_ends_the_step_alone(
    side: str, llama: Path, expected: list[Completion], pair: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests learn of it, and machines and other requests go on."""
    with pair.engine(llama) as engine:
        if side == "leader":
            monkeypatch.setattr(engine.streamer, "synchronize", failing(HandoverError("no room")))
        else:
            monkeypatch.setattr(Part, "compute", failing(RuntimeError("no room")))
        with pytest.raises(StepFailed, match="no room") as failed:
            generate(engine, {})
        monkeypatch.undo()
        for request_id in {*map(str, range(len(PROMPTS)))}.difference(failed.value.request_ids):
            engine.abort(request_id)
        assert_empty(engine)
        assert generate(engine, {}) == expected and not pair.faults
        assert first_member(engine).num_losses == 0


def failing(error: Exception) -> Callable[..., None]:
    def fail(*arguments: object) -> None:
        raise error

    return fail


def test_a_worker_that_is_lost_at_each_step_does_not_hold_requests_for_ever(llama: Path) -> None:
    """It is back before the limit, and lost before a step ends: the limit is that of all these times."""
    with cluster(return_s=0.3) as made, made.engine(llama) as engine:
        send = pipe_of(engine)._pipe.send

        def cut(inputs: ModelInputs, hidden: Tensor, peers: Sequence[Peer]) -> int:
            peers[0].close("the step has ended the worker")
            return send(inputs, hidden, peers)

        pipe_of(engine)._pipe.send = cut  # type: ignore[method-assign]
        with pytest.raises(MachineAway, match="rank 1"):
            generate(engine, {})
        assert_empty(engine)


def test_who_waits_later_does_not_wait_for_those_before(llama: Path) -> None:
    """All who waited for a machine gave up, and no step has ended since."""
    with cluster() as made, made.engine(llama) as engine:
        pipe_of(engine)._waits_since_s, pipe_of(engine)._first_waiters = -math.inf, {"gone"}
        made.stop()
        while first_member(engine).ready is not None:
            threading.Event().wait(0.01)
        engine.add(GenerationRequest(PROMPTS[0], PLAIN, "later"))
        assert engine.step() == []
        engine.abort("later")
        assert_empty(engine)


def test_another_worker_takes_the_place(llama: Path, expected: list[Completion], pair: Cluster) -> None:
    with pair.engine(llama) as engine:

        def replace_worker() -> None:
            pair.stop()
            pair.begin(1)

        assert generate(engine, {5: replace_worker}) == expected
        assert_empty(engine)


def wait_until_another_is_ready(engine: Engine, before: Peer | None) -> None:
    while first_member(engine).ready in (None, before):
        threading.Event().wait(0.01)


@pytest.mark.parametrize("is_replaced", [True, False], ids=["another worker", "another connection"])
def test_nothing_is_found_that_was_computed_with_a_worker_that_is_gone(
    is_replaced: bool, llama: Path, expected: list[Completion], pair: Cluster
) -> None:
    """It is lost while nothing is computed, and is back before the next request."""
    with pair.engine(llama) as engine:
        for _ in range(3):
            assert engine.generate(PROMPTS, PLAIN) == expected
            assert engine.metrics.prefix_cache_hits
            before = first_member(engine).ready
            assert before is not None
            if is_replaced:
                pair.stop()
                pair.begin(1)
            else:
                before.close("the test has cut the link")
            wait_until_another_is_ready(engine, before)
            num_hits = engine.metrics.prefix_cache_hits
            assert engine.generate(PROMPTS[3:4], PLAIN) == expected[3:4]
            assert engine.metrics.prefix_cache_hits == num_hits
            assert_empty(engine)


DAMAGED = (
    Kind.HELLO,
    Kind.CHALLENGE,
    Kind.PROOF,
    Kind.WELCOME,
    Kind.ASK,
    Kind.ANSWER,
    Kind.STEP,
    Kind.RESULT,
)


@pytest.mark.parametrize("kind", DAMAGED, ids=lambda kind: kind.name)
def test_a_flipped_bit_ends_the_connection_and_no_request(
    kind: Kind, llama: Path, expected: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the handshake, while the model is divided, and in steps: the machines meet again."""
    dice, send_all, num_left = random.Random(kind), Channel._send_all, 2

    def damage(channel: Channel, view: memoryview) -> None:
        nonlocal num_left
        if num_left and view[4] == kind:
            num_left -= 1
            damaged = bytearray(view)
            damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
            view = memoryview(damaged)
        send_all(channel, view)

    monkeypatch.setattr(Channel, "_send_all", damage)
    with cluster() as made, made.engine(llama) as engine:
        assert generate(engine, {}) == expected
        assert not num_left and not made.faults
        # Both damaged messages may have been on their way when the first one was found.
        assert first_member(engine).num_losses in ((0,) if kind < Kind.WELCOME else (1, 2))
        assert_empty(engine)


def test_requests_end_when_a_worker_stays_away(llama: Path) -> None:
    with cluster(return_s=0.2) as made, made.engine(llama) as engine:
        with pytest.raises(MachineAway, match="rank 1") as failed:
            generate(engine, {3: made.stop})
        assert sorted(failed.value.request_ids) == ["0", "1", "2", "3", "4"]
        assert_empty(engine)
        with pytest.raises(MachineAway):  # and so do later ones
            engine.generate(PROMPTS[:1], PLAIN)
        made.begin(1)
        while first_member(engine).ready is None:
            threading.Event().wait(0.01)
        assert len(engine.generate(PROMPTS[:1], PLAIN)[0].token_ids) == 24


def test_a_leader_that_starts_again_finds_its_workers(
    llama: Path, expected: list[Completion], pair: Cluster
) -> None:
    """Loaded: the machine is not asked again what it has, since the layers in its memory would count as
    taken, and nothing is read again, though the leader leaves the size of the cache to the plan."""
    loaded: list[object] = []
    for _ in range(2):
        with pair.engine(llama, replace(CONFIG, num_kv_tokens=None)) as engine:
            assert engine.generate(PROMPTS, PLAIN) == expected
            loaded.append(pair.workers[-1].part)
    assert not pair.faults and loaded[0] is loaded[1] is not None


def test_requests_that_leave_while_steps_are_on_their_way(llama: Path, pair: Cluster) -> None:
    with pair.engine(llama) as engine:
        for index, prompt in enumerate(PROMPTS):
            engine.add(GenerationRequest(prompt, PLAIN, str(index)))
        for _ in range(3):
            engine.step()
        for index in range(len(PROMPTS)):
            engine.abort(str(index))
        while engine.has_work:
            assert engine.step() == []
        assert_empty(engine)
        assert engine.generate(PROMPTS, PLAIN) == alone(llama, params=PLAIN)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes a certificate")
def test_tls(llama: Path, expected: list[Completion], tmp_path: Path) -> None:
    words = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=x -addext subjectAltName=IP:127.0.0.1"
    files = {"certificate": tmp_path / "cert.pem", "key": tmp_path / "key.pem"}
    command = [*words.split(), "-out", str(files["certificate"]), "-keyout", str(files["key"])]
    subprocess.run(command, check=True, capture_output=True)
    with cluster(**files, authority=files["certificate"]) as made, made.engine(llama) as engine:
        assert engine.generate(PROMPTS, PLAIN) == expected
        with pytest.raises(OSError), socket.create_connection(("127.0.0.1", made.port)) as plain:
            Channel(plain, 1).receive()


def test_a_worker_with_other_files_is_named(llama: Path, tmp_path: Path) -> None:
    build("Llama, rope llama3", tmp_path)
    made = Cluster(1 + 1)
    made.stop()
    made.join()
    made.begin(1, str(tmp_path))
    try:
        with pytest.raises(ConfigError, match="rank 1 has another model"):
            made.engine(llama)
    finally:
        made.stop()
        made.join()


def test_a_worker_without_memory_is_named(llama: Path) -> None:
    own = replace(OWN, host_memory_bytes=4096)
    with cluster(own=own) as made, pytest.raises(PenstockError, match=r"rank 1 .*needs at least"):
        made.engine(llama)


def test_what_several_machines_cannot_do_is_refused(tmp_path: Path, llama: Path, pair: Cluster) -> None:
    test_encoder_decoder.build("BART", tmp_path / "bart")
    build("Qwen3-Next", tmp_path / "recurrent")
    for name, what in (("bart", "encoder"), ("recurrent", "recurrent states")):
        with pytest.raises(UnsupportedModel, match=what):
            pair.engine(tmp_path / name)
    for changes in ({"kv_disk": str(tmp_path / "kv")}, {"mtp": "on"}, {"adapter_bytes": 1 << 20}):
        with pytest.raises(ConfigError):
            pair.engine(llama, replace(CONFIG, **changes))
