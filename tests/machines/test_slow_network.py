"""The slow network: when frames arrive, and a connection over it. Times are compared with the least possible
ones alone, which no slow computer undercuts."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from . import network_namespaces
from .network_namespaces import Link, can_make_namespaces, enter
from .slow_network import Way, wire_bytes

PORT = 5000


def frame(num_bytes: int, kind: int = 0, header_bytes: int = 0, packet_bytes: int = 0) -> bytes:
    """With the header of virtio's network in front."""
    return struct.pack("<BBHHHH", 0, kind, header_bytes, packet_bytes, 0, 0) + bytes(num_bytes)


def test_bytes_on_a_wire() -> None:
    assert wire_bytes(frame(60)) == 60 + 24
    assert wire_bytes(frame(66 + 1448, kind=1, header_bytes=66, packet_bytes=1448)) == 1514 + 24
    # 3 packets, the last one with a single byte of data.
    assert wire_bytes(frame(66 + 2 * 1448 + 1, 1, 66, 1448)) == 3 * (66 + 24) + 2 * 1448 + 1


@pytest.fixture
def pipes() -> Iterator[tuple[int, int]]:
    """Where a frame is written, and where it is read."""
    reader, writer = os.pipe()
    yield writer, reader
    os.close(reader)
    os.close(writer)


def test_frames_follow_each_other(pipes: tuple[int, int]) -> None:
    writer, reader = pipes
    way = Way(-1, writer, delay_s=10.0, bits_per_s=8.0)  # a byte a second
    first, second, third = (frame(size) for size in (76, 26, 1))
    way.take(first, now_s=1000.0)  # on the wire until 1100
    way.take(second, now_s=1001.0)  # until 1150
    assert way.due_s == 1110.0
    way.deliver(now_s=1109.0)
    way.deliver(now_s=1110.0)
    assert os.read(reader, 1000) == first
    assert way.due_s == 1160.0
    way.deliver(now_s=1200.0)
    assert os.read(reader, 1000) == second
    way.take(third, now_s=2000.0)  # the wire was free
    assert way.due_s == 2035.0


def test_without_a_rate_frames_take_the_delay_alone(pipes: tuple[int, int]) -> None:
    way = Way(-1, pipes[0], delay_s=10.0, bits_per_s=0.0)
    for _ in range(2):
        way.take(frame(100), now_s=1.0)
        assert way.due_s == 11.0


@pytest.mark.skipif(
    not can_make_namespaces() or not Path("/dev/net/tun").exists(), reason="needs root rights, ip and TAP"
)
def test_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte arrives, after the delay, and no faster than the rate."""
    monkeypatch.setattr(network_namespaces, "_has_netem", lambda space: False)
    delay_s, bits_per_s, sent = 0.02, 200e6, os.urandom(1 << 20)
    with (
        Link(delay_s, bits_per_s) as link,
        ThreadPoolExecutor(1, initializer=enter, initargs=(link.spaces[0],)) as here,
        ThreadPoolExecutor(1, initializer=enter, initargs=(link.spaces[1],)) as there,
    ):
        listener = there.submit(socket.create_server, (link.addresses[1], PORT)).result()
        got = there.submit(_receive, listener, len(sent))
        connection, connecting_s = here.submit(_connect, link.addresses[1]).result()
        began_s = time.monotonic()
        with connection, listener:
            here.submit(connection.sendall, sent).result()
            assert got.result() == sent
        assert connecting_s >= delay_s  # there and back
        assert time.monotonic() - began_s >= delay_s / 2 + 8 * len(sent) / bits_per_s
        with link.down(), pytest.raises(OSError, match="timed out"):
            here.submit(_connect, link.addresses[1], 0.2).result()
        assert link.carrying_s > 0


def _receive(listener: socket.socket, num_bytes: int) -> bytes:
    connection, _ = listener.accept()
    with connection:
        return connection.recv(num_bytes, socket.MSG_WAITALL)


def _connect(address: str, timeout_s: float | None = None) -> tuple[socket.socket, float]:
    began_s = time.monotonic()
    connection = socket.create_connection((address, PORT), timeout_s)
    return connection, time.monotonic() - began_s
