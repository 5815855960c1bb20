"""Two hosts on one machine: network namespaces with a link between them, which can be slow and can fail.
Needs root rights and `ip`; rejected connections and lost packets need `nft` as well, and a rate `tc`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_PLACE = Path("/var/run/netns")
_ADDRESSES, _DEVICES = ("10.213.7.1", "10.213.7.2"), ("pst0", "pst1")
#: What ends each packet of the link that comes in: a chain in front of all others.
_CHAIN = "table inet penstock { chain in { type filter hook input priority -200; iif != lo %s\n}\n}"


def can_make_namespaces() -> bool:
    return os.geteuid() == 0 and shutil.which("ip") is not None


def enter(space: str) -> None:
    """The calling thread goes on in a namespace, and so do its children."""
    descriptor = os.open(_PLACE / space, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {space}")
    finally:
        os.close(descriptor)


def processor_seconds(process: int) -> float:
    """What a process has taken of all processors."""
    numbers = Path("/proc", str(process), "stat").read_text().rsplit(")", 1)[1].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


class Link:
    """Between two namespaces. Each failure lasts as long as its `with`."""

    addresses = _ADDRESSES
    can_filter = shutil.which("nft") is not None

    def __init__(self, delay_s: float = 0.0, bits_per_s: float = 0.0) -> None:
        """delay_s: there and back. bits_per_s: each way; 0 has no limit."""
        self._delay_s, self._bits_per_s = delay_s, bits_per_s
        #: The process's id is the last part of the names, so that two runs don't disturb each other.
        self.spaces = (f"penstock-a-{os.getpid()}", f"penstock-b-{os.getpid()}")
        #: slow_network.py, where the kernel has no netem.
        self._carrier: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Link:
        for left in _left_behind():
            subprocess.run(["ip", "netns", "del", left], check=False, capture_output=True)
        for space in self.spaces:
            _ip("netns", "add", space)
        self._add_devices()
        for space, address, device in zip(self.spaces, _ADDRESSES, _DEVICES, strict=True):
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", device)
            for each in (device, "lo"):
                _ip("-n", space, "link", "set", each, "up")
        return self

    def __exit__(self, *_: object) -> None:
        if self._carrier is not None:
            self._carrier.communicate()
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], check=False)

    def _add_devices(self) -> None:
        """A pair of veth, or what slow_network.py makes."""
        (first, second), (space, other) = _DEVICES, self.spaces
        if self._delay_s and not _has_netem(space):
            places = space, first, other, second
            rates = "--delay-s", str(self._delay_s / 2), "--bits-per-s", str(self._bits_per_s)
            self._carrier = subprocess.Popen(
                [sys.executable, "-m", "machines.slow_network", *places, *rates],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
            )
            assert self._carrier.stdout is not None
            if not self._carrier.stdout.readline():
                raise OSError("slow_network.py has ended")
            return
        _ip("link", "add", first, "netns", space, "type", "veth", "peer", second, "netns", other)
        words = list[str]()
        if self._delay_s:
            words = ["netem", "delay", f"{1e6 * self._delay_s / 2:.0f}us"]
            words += ["rate", f"{self._bits_per_s:.0f}bit"] if self._bits_per_s else []
        elif self._bits_per_s:
            words = ["tbf", "rate", f"{self._bits_per_s:.0f}bit", "burst", "256kb", "latency", "100ms"]
        for space, device in zip(self.spaces, _DEVICES, strict=True) if words else ():
            subprocess.run(["tc", "-n", space, "qdisc", "add", "dev", device, "root", *words], check=True)

    @property
    def carrying_s(self) -> float:
        """Seconds of a processor that slow_network.py has taken; 0 where there is none."""
        return 0.0 if self._carrier is None else processor_seconds(self._carrier.pid)

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Nothing comes through."""
        _ip("-n", self.spaces[1], "link", "set", _DEVICES[1], "down")
        try:
            yield
        finally:
            _ip("-n", self.spaces[1], "link", "set", _DEVICES[1], "up")

    def lossy(self, percent: int) -> contextlib.AbstractContextManager[None]:
        """Each packet is lost with this probability, in both directions."""
        return self._filtered(f"numgen random mod 100 < {percent} drop")

    def rejecting(self) -> contextlib.AbstractContextManager[None]:
        """Each packet ends its connection."""
        return self._filtered("tcp flags & rst != rst reject with tcp reset")

    @contextlib.contextmanager
    def _filtered(self, rule: str) -> Iterator[None]:
        for space in self.spaces:
            _ip("netns", "exec", space, "nft", _CHAIN % rule)
        try:
            yield
        finally:
            for space in self.spaces:
                _ip("netns", "exec", space, "nft", "delete", "table", "inet", "penstock")


def _left_behind() -> list[str]:
    """Namespaces of processes that are gone."""
    found = [path.name for path in _PLACE.glob("penstock-[ab]-*")]
    return [name for name in found if not Path("/proc", name.rsplit("-", 1)[1]).exists()]


def _has_netem(space: str) -> bool:
    asked = ["tc", "-n", space, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1us"]
    if has := not subprocess.run(asked, check=False, capture_output=True).returncode:
        subprocess.run(["tc", "-n", space, "qdisc", "del", "dev", "lo", "root"], check=True)
    return has


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
