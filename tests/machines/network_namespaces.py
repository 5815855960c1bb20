"""Two hosts on one machine: network namespaces with a link between them, which can fail. Needs root rights
and `ip`; rejected connections and lost packets need `nft` as well."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_NAMES, _ADDRESSES = ("penstock-a", "penstock-b"), ("10.213.7.1", "10.213.7.2")
_DEVICES = ("pst0", "pst1")
#: What ends each packet of the link that comes in: a chain in front of all others.
_CHAIN = "table inet penstock { chain in { type filter hook input priority -200; iif != lo %s\n}\n}"


def can_make_namespaces() -> bool:
    return os.geteuid() == 0 and shutil.which("ip") is not None


def enter(space: str) -> None:
    """The calling thread goes on in a namespace, and so do its children."""
    descriptor = os.open(Path("/var/run/netns", space), os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {space}")
    finally:
        os.close(descriptor)


class Link:
    """Between two namespaces. Each failure lasts as long as its `with`."""

    spaces, addresses = _NAMES, _ADDRESSES
    can_filter = shutil.which("nft") is not None

    def __enter__(self) -> Link:
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)  # of a killed run
            _ip("netns", "add", space)
        first, second = _DEVICES
        _ip("link", "add", first, "netns", _NAMES[0], "type", "veth", "peer", second, "netns", _NAMES[1])
        for space, address, device in zip(_NAMES, _ADDRESSES, _DEVICES, strict=True):
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", device)
            for each in (device, "lo"):
                _ip("-n", space, "link", "set", each, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], check=False)

    def shape(self, *words: str) -> None:
        """A queueing discipline of tc's for both directions, such as "netem", "delay", "1ms". Raises
        CalledProcessError if the system has none such."""
        for space, device in zip(_NAMES, _DEVICES, strict=True):
            subprocess.run(["tc", "-n", space, "qdisc", "add", "dev", device, "root", *words], check=True)

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Nothing comes through."""
        _ip("-n", _NAMES[1], "link", "set", _DEVICES[1], "down")
        try:
            yield
        finally:
            _ip("-n", _NAMES[1], "link", "set", _DEVICES[1], "up")

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


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
