"""A slow network between two network namespaces, for systems without netem: a TAP device in each, and a
process that carries each frame from one to the other when its time has come.

    PYTHONPATH=tests .venv/bin/python -m machines.slow_network first pst0 second pst1 \\
        --delay-s 0.00015 --bits-per-s 1e9

Frames come with the header of virtio's network, so that the kernel hands over up to 64 KiB of a connection as
one frame, as it does to a card that cuts them into packets. Prints a line when the devices are there, and
ends with its input.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import math
import os
import select
import struct
import sys
import time
from collections import deque

from .network_namespaces import enter

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP, _WITHOUT_INFORMATION, _WITH_HEADER = 0x2, 0x1000, 0x4000
#: What the reader of a device takes: open checksums, and TCP over IPv4 in one piece.
_TAKES = 0x1 | 0x2
#: virtio_net_hdr: flags, kind of pieces (0: the frame is one packet), bytes of headers, of a packet's data,
#: and where the checksum is.
_HEADER = struct.Struct("<BBHHHH")
#: Bytes that a packet takes on a wire beside its own: preamble, checksum and the gap between two packets.
_BETWEEN_PACKETS = 24
_MAX_FRAME_BYTES = 1 << 17
_PR_SET_TIMERSLACK = 29
#: Seconds before a frame is due from which on the carrier looks at the clock and does not sleep.
_AWAKE_S = 60e-6


def wire_bytes(frame: bytes) -> int:
    """Bytes that a frame takes on a wire, cut into packets."""
    _, kind, header_bytes, packet_bytes, *_ = _HEADER.unpack_from(frame)
    num_bytes = len(frame) - _HEADER.size
    if not kind:
        return num_bytes + _BETWEEN_PACKETS
    num_packets = max(1, math.ceil((num_bytes - header_bytes) / packet_bytes))
    return num_bytes + (num_packets - 1) * header_bytes + num_packets * _BETWEEN_PACKETS


class Way:
    """One direction of the network: a wire that takes one frame after the other, each of which arrives
    `delay_s` later. No frame is lost."""

    def __init__(self, source: int, target: int, delay_s: float, bits_per_s: float) -> None:
        """source, target: descriptors of devices that do not block. bits_per_s: 0 has no limit."""
        self.source, self._target = source, target
        self._delay_s, self._bits_per_s = delay_s, bits_per_s
        #: When the wire has taken what it was given.
        self._free_s = 0.0
        self._waiting: deque[tuple[float, bytes]] = deque()

    @property
    def due_s(self) -> float:
        """When the next frame arrives."""
        return self._waiting[0][0] if self._waiting else math.inf

    def take(self, frame: bytes, now_s: float) -> None:
        """A frame goes on its way."""
        self._free_s = max(now_s, self._free_s)
        if self._bits_per_s:
            self._free_s += 8 * wire_bytes(frame) / self._bits_per_s
        self._waiting.append((self._free_s + self._delay_s, frame))

    def take_all(self) -> None:
        """What the source has."""
        with contextlib.suppress(OSError):  # there is no more, or the device is down
            while True:
                self.take(os.read(self.source, _MAX_FRAME_BYTES), time.monotonic())

    def deliver(self, now_s: float) -> None:
        """What has arrived."""
        while self._waiting and self._waiting[0][0] <= now_s:
            _, frame = self._waiting.popleft()
            with contextlib.suppress(OSError):  # a device that is down takes nothing
                os.write(self._target, frame)


def carry(ways: list[Way]) -> None:
    """Until the standard input ends."""
    files = [sys.stdin.fileno(), *(way.source for way in ways)]
    while True:
        due_s = min(way.due_s for way in ways)
        wait_s = None if math.isinf(due_s) else max(0.0, due_s - time.monotonic() - _AWAKE_S)
        ready = select.select(files, [], [], wait_s)[0]
        if files[0] in ready:
            return
        for way in ways:
            if way.source in ready:
                way.take_all()
            way.deliver(time.monotonic())


def _tap(space: str, device: str) -> int:
    """A new TAP device in a namespace, which is there as long as its descriptor."""
    enter(space)
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _TAP | _WITHOUT_INFORMATION | _WITH_HEADER
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("<16sH22x", device.encode(), flags))
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _TAKES)
    return descriptor


def _be_prompt() -> None:
    """Wake up when it is time, though others compute."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("places", nargs=4, metavar="SPACE DEVICE")
    parser.add_argument("--delay-s", type=float, required=True, help="one way")
    parser.add_argument("--bits-per-s", type=float, default=0.0)
    options = parser.parse_args()
    first, second = (_tap(*options.places[start : start + 2]) for start in (0, 2))
    _be_prompt()
    print("ready", flush=True)
    rates = options.delay_s, options.bits_per_s
    carry([Way(first, second, *rates), Way(second, first, *rates)])


if __name__ == "__main__":
    main()
