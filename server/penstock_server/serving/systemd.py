"""Messages to systemd about the service's state, by its Type=notify protocol (man sd_notify)."""

from __future__ import annotations

import logging
import os
import socket

logger = logging.getLogger(__name__)

READY = "READY=1"
STOPPING = "STOPPING=1"


def notify(state: str) -> None:
    """Sends `state` to the socket that NOTIFY_SOCKET names. Does nothing without that variable."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # Linux's abstract names begin with a zero byte
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.connect(address)
            channel.sendall(state.encode())
    except OSError as error:
        logger.warning("cannot tell systemd %r: %s", state, error)
