"""What machines send each other: frames that are read back as they were, and all that is refused."""

from __future__ import annotations

import binascii
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from node_cluster import SECRET, cluster, free_port

from penstock.errors import ConfigError
from penstock.nodes.door import Door
from penstock.nodes.identity import own_program
from penstock.nodes.member import Member, MemberLost
from penstock.nodes.orders import Order, Planned
from penstock.nodes.step_frames import read_step
from penstock.nodes.wire import handshake
from penstock.nodes.wire.channel import Channel
from penstock.nodes.wire.frames import Frame, Kind, WireError, read_frame
from penstock.nodes.wire.handshake import Refused
from penstock.nodes_config import NodesConfig

ARRAYS = {
    "positions": torch.arange(5), "tables": torch.arange(6, dtype=torch.int32).view(2, 3),
    "hidden": torch.randn(5, 7), "nothing": torch.empty(0, 3),
}  # fmt: skip


def reader(content: bytes) -> Callable[[memoryview], None]:
    left = memoryview(content)

    def read(view: memoryview) -> None:
        nonlocal left
        if len(view) > len(left):
            raise EOFError
        view[:] = left[: len(view)]
        left = left[len(view) :]

    return read


def read(content: bytes, limit: int = 1 << 20) -> Frame:
    return read_frame(reader(content), lambda: limit)


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    one, other = (Channel(each, timeout_s=10) for each in socket.socketpair())
    with closing(one), closing(other):
        yield one, other


def test_a_frame_comes_as_it_went(channels: tuple[Channel, Channel]) -> None:
    """Also one that is larger than what the system keeps on its way."""
    sender, receiver = channels
    large = {**ARRAYS, "hidden": torch.randn(2000, 1000)}
    for arrays in (ARRAYS, large, {}):
        thread = threading.Thread(target=sender.send, args=(Frame(Kind.STEP, {"number": 7}, arrays),))
        thread.start()
        frame = receiver.receive(lambda: 10 << 20)
        thread.join()
        assert (frame.kind, frame.fields) == (Kind.STEP, {"number": 7})
        assert frame.arrays.keys() == arrays.keys()
        assert all(torch.equal(frame.arrays[name], array) for name, array in arrays.items())


def frame_of(fields: object, body: bytes = b"", kind: int = Kind.STEP, magic: bytes = b"PSTL") -> bytes:
    """A frame by the form in frames.py, whatever is in it."""
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    head = struct.pack("<4sB3xIQI", magic, kind, len(text), len(body), binascii.crc32(text + body))
    return head + struct.pack("<I", binascii.crc32(head)) + text + body


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        frame_of([{}, []], magic=b"PSTX"),
        frame_of([{}, []], kind=99),
        frame_of([{}, []], bytes(2000)),
        frame_of(b"[{}, [" + b"[" * 100000),
        frame_of(b"\xff\xfe"),
        frame_of([[], []]),
        frame_of(5),
        frame_of({"fields": 1}),
        frame_of([{}, []], bytes(8)),
        frame_of([{}, [["a", "float32", [3]]]], bytes(8)),
        frame_of([{}, [["a", "float32", [-1, -2]]]], bytes(8)),
        frame_of([{}, [["a", "float32", [1 << 60]]]]),
        frame_of([{}, [["a", "object", [1]]]], bytes(8)),
        frame_of([{}, [["a", "float32", [1.0]]]], bytes(4)),
        frame_of([{}, [["a", "float32", [1, 1, 1]]]], bytes(4)),
        frame_of([{}, [["a", "float32", [0]]] * 99]),
    ],
    ids=lambda content: repr(content[20:50]),
)
def test_what_is_no_frame_is_refused(content: bytes) -> None:
    with pytest.raises((WireError, ValueError)):
        read(content, limit=1000)


@pytest.mark.parametrize(
    "frame",
    [Frame(Kind.BEAT), Frame(Kind.PROOF, {"proof": "5a"}), Frame(Kind.STEP, {"number": 1}, ARRAYS)],
    ids=lambda frame: frame.kind.name,
)
def test_each_flipped_bit_is_found(frame: Frame) -> None:
    """In the lengths of the header, too, with which a reader would wait for bytes that never come."""
    good = b"".join(bytes(part) for part in frame.parts())
    assert read(good).fields == frame.fields
    for bit in range(8 * len(good)):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError, match="damaged"):
            read(bytes(damaged))


def test_an_older_program_is_named() -> None:
    text = b"[{}, []]"
    with pytest.raises(WireError, match="older Penstock"):
        read(struct.pack("<4sB3xIQ", b"PSTK", Kind.HELLO, len(text), 0) + text)


def test_random_bytes_never_do_more_than_fail() -> None:
    dice, good = (
        random.Random(1),
        b"".join(bytes(part) for part in Frame(Kind.STEP, {"a": 1}, ARRAYS).parts()),
    )
    for _ in range(300):
        content = bytearray(good)
        for _ in range(dice.randrange(1, 4)):
            content[dice.randrange(len(content))] = dice.randrange(256)
        with suppress(WireError, ValueError, EOFError):
            read(bytes(content))


STEP: dict[str, Any] = {
    "positions": torch.tensor([3, 4]), "slot_mapping": torch.tensor([3, 4]),
    "block_tables": torch.zeros(1, 1, dtype=torch.int32),
    "query_start": torch.tensor([0, 2], dtype=torch.int32),
    "context_lens": torch.tensor([5], dtype=torch.int32), "hidden": torch.zeros(2, 4),
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"slot_mapping": torch.tensor([3, 16 * 4])},
        {"slot_mapping": torch.tensor([-1, 4])},
        {"block_tables": torch.full((1, 1), 4, dtype=torch.int32)},
        {"block_copies": torch.tensor([[0, 4]])},
        {"wanted_rows": torch.tensor([2])},
        {"hidden": torch.zeros(3, 4)},
        {"context_lens": torch.tensor([5000], dtype=torch.int32)},
        {"query_start": torch.tensor([0, 3], dtype=torch.int32)},
        {"query_start": torch.tensor([0, 1, 2], dtype=torch.int32)},
        {"query_start": torch.tensor([0, 1], dtype=torch.int32)},
        {"context_lens": torch.tensor([17], dtype=torch.int32)},
        {"context_lens": torch.tensor([5])},
        {"prefix_lens": torch.tensor([6], dtype=torch.int32)},
        {"copied_rows": torch.tensor([0])},
        {"slot_mapping": torch.tensor([3, 4], dtype=torch.int32)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_step_that_points_beyond_the_cache_is_refused(changes: dict[str, Any]) -> None:
    number, inputs, hidden, wanted = read_step(Frame(Kind.STEP, {"number": 3}, STEP), 4, 16)
    assert (number, inputs.layout.num_tokens, wanted) == (3, 2, None) and torch.equal(hidden, STEP["hidden"])
    with pytest.raises(WireError):
        read_step(Frame(Kind.STEP, {"number": 3}, STEP | changes), 4, 16)


def both(
    channels: tuple[Channel, Channel], leaders: str, workers: str, other: dict[str, Any] | None = None
) -> tuple[object, object]:
    """What leader and worker say of a handshake."""
    found: list[object] = [None, None]

    def lead() -> None:
        try:
            found[0] = handshake.admit(channels[0], leaders, own_program())
            handshake.welcome(channels[0])
        except Refused as error:
            found[0] = error
            handshake.refuse(channels[0], error)
        except OSError as error:
            found[0] = error

    thread = threading.Thread(target=lead)
    thread.start()
    try:
        found[1] = handshake.greet(channels[1], workers, (other or own_program()) | {"rank": 1})
    except (Refused, OSError) as error:
        found[1] = error
        channels[1].close()
    thread.join()
    return found[0], found[1]


def test_both_sides_prove_that_they_know_the_secret(channels: tuple[Channel, Channel]) -> None:
    hello, challenge = both(channels, SECRET, SECRET)
    assert isinstance(hello, dict) and hello["rank"] == 1
    assert isinstance(challenge, dict) and challenge["code"] == own_program()["code"]


def test_a_leader_without_the_secret_gets_no_proof(channels: tuple[Channel, Channel]) -> None:
    leader, worker = both(channels, "another secret of theirs", SECRET)
    assert isinstance(worker, Refused) and "does not know our secret" in str(worker)
    assert isinstance(leader, OSError), "the worker said more than its nonce"


def test_a_worker_without_the_secret_is_refused() -> None:
    """A worker that does not look at the leader's proof."""
    one, other = (Channel(each, timeout_s=10) for each in socket.socketpair())
    with closing(one), closing(other):
        other.send(Frame(Kind.HELLO, own_program() | {"rank": 1, "nonce": "0"}))
        other.send(Frame(Kind.PROOF, {"proof": "0" * 64}))
        with pytest.raises(Refused, match="secrets differ"):
            handshake.admit(one, SECRET, own_program())


@pytest.mark.parametrize("proof", ["\u00e9" * 64, "\ud800"])
def test_a_proof_that_is_no_ascii_is_a_wrong_one(proof: str) -> None:
    one, other = (Channel(each, timeout_s=10) for each in socket.socketpair())
    with closing(one), closing(other):
        other.send(Frame(Kind.HELLO, own_program() | {"rank": 1, "nonce": "0"}))
        other.send(Frame(Kind.PROOF, {"proof": proof}))
        with pytest.raises(Refused, match="secrets differ"):
            handshake.admit(one, SECRET, own_program())


def test_a_handshake_ends_in_time_though_bytes_come() -> None:
    one, other = (Channel(each, timeout_s=10) for each in socket.socketpair())
    with closing(one), closing(other):
        one.ends_at = time.monotonic() + 0.2
        other._socket.send(b"P")
        with pytest.raises(TimeoutError):
            handshake.admit(one, SECRET, own_program())


def test_a_worker_that_comes_back_at_once_is_there() -> None:
    """Whoever joins in the middle of a loss would get the loss's news in place of answers."""
    joined: list[bool] = []
    member = Member(1, lambda member, frame: None, lambda: joined.append(member.is_connected))
    one, other = (Channel(each, timeout_s=10) for each in socket.socketpair())
    with closing(one), closing(other):
        member.join(one, 10.0)
        assert member.peer is not None
        member.peer.close("the test")
        assert joined == [True, False] and member.state == "away"
        with pytest.raises(MemberLost):
            member.ask("plan", {})


def test_a_worker_that_is_lost_with_its_last_answer_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would get steps that never arrive."""
    member = Member(1, lambda member, frame: None, lambda: None)
    member.order = Order("m", "", {}, 1, 2)
    one, other = (Channel(each, timeout_s=10) for each in socket.socketpair())

    def ask(what: str, fields: dict[str, Any]) -> dict[str, Any]:
        assert member.peer is not None
        member.peer.close("lost behind its answer")
        return asdict(Planned(16, 1, 1, 1, []))

    monkeypatch.setattr(member, "ask", ask)
    with closing(one), closing(other):
        member.join(one, 10.0)
        member.load()
    assert member.ready is None and member.state == "away"


def test_a_proof_can_not_be_played_back() -> None:
    """Neither the leader's own proof nor that of an earlier worker."""
    one, other = (Channel(each, timeout_s=10) for each in socket.socketpair())
    hello = own_program() | {"rank": 1, "nonce": "0"}
    with closing(one), closing(other):
        other.send(Frame(Kind.HELLO, hello))
        found: list[object] = []
        thread = threading.Thread(
            target=lambda: found.append(pytest.raises(Refused, handshake.admit, one, SECRET, own_program()))
        )
        thread.start()
        proof = other.receive().fields["proof"]
        other.send(Frame(Kind.PROOF, {"proof": proof}))
        thread.join()
        assert found, "the leader took its own proof"


def test_other_versions_are_refused_by_name(channels: tuple[Channel, Channel]) -> None:
    _, worker = both(channels, SECRET, SECRET, own_program() | {"version": "0.0.1"})
    assert isinstance(worker, Refused) and "version of Penstock differs" in str(worker)


def test_nothing_large_is_taken_before_the_proof() -> None:
    one, other = (Channel(each, timeout_s=10) for each in socket.socketpair())
    with closing(one), closing(other):
        other.send(Frame(Kind.HELLO, {"rank": 1}, {"array": torch.zeros(100)}))
        with pytest.raises(WireError, match="more than is taken"):
            handshake.admit(one, SECRET, own_program())


def test_a_port_that_is_taken_and_secrets_that_are_short_are_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port}.*--nodes-listen"):
            Door(NodesConfig(SECRET, host="127.0.0.1", port=port), lambda channel, hello: None)
    with pytest.raises(ConfigError, match="at least 16 characters"):
        NodesConfig("short")
    with pytest.raises(ConfigError, match="--rank 2 of --nodes 2"):
        NodesConfig(SECRET, rank=2)


def test_a_worker_ends_where_it_is_refused() -> None:
    """With a wrong secret, for good; a rank that is taken may become free."""
    port = free_port()
    door = Door(NodesConfig(SECRET, host="127.0.0.1", port=port), lambda channel, hello: None)
    try:
        with cluster() as made:
            made.nodes = replace(made.nodes, port=port)
            made.begin(1, secret="another secret of theirs")
            made._threads[-1].join(20)
            assert "does not know our secret" in str(made.faults[0])
    finally:
        door.close()
