"""Against a socket like systemd's own."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from penstock_server.serving import systemd


@pytest.mark.parametrize("is_abstract", [False, True])
def test_notify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_abstract: bool) -> None:
    name = f"@{tmp_path}" if is_abstract else str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemds:
        systemds.bind(name.replace("@", "\0"))
        systemd.notify(systemd.READY)
        assert systemds.recv(100) == b"READY=1"


def test_without_systemd_nothing_happens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    systemd.notify(systemd.READY)
    assert not caplog.records


def test_a_socket_that_is_not_there_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    systemd.notify(systemd.STOPPING)
    assert "STOPPING=1" in caplog.text
