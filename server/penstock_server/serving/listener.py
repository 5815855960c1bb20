"""The socket that a server listens on. It is bound before the engine is imported."""

from __future__ import annotations

import socket

from penstock.errors import ConfigError

#: The most connections that wait to be accepted: a burst of clients should not be turned away.
_BACKLOG = 2048

#: Seconds after which a client that takes nothing of its answer counts as gone, though its machine may
#: respond. The answer waits in memory for so long.
SEND_TIMEOUT_S = 120
#: Seconds of silence before the first keep-alive probe of TCP, and between two probes.
_PROBE_S = 30


def bind(host: str, port: int, send_timeout_s: int = SEND_TIMEOUT_S) -> socket.socket:
    """A listening socket. Raises ConfigError if the address can't be bound.

    The system closes a connection when the client's machine does not respond any more, or when the client
    takes nothing for `send_timeout_s`, as far as the system has these options."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's algorithm off only for sockets that name their
    # protocol (those of socket.create_server don't). With Nagle's algorithm each answer waits 40 ms for the
    # client's ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", _PROBE_S),
            ("TCP_KEEPINTVL", _PROBE_S),
            ("TCP_USER_TIMEOUT", 1000 * send_timeout_s),
        ):
            if hasattr(socket, name):
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {reason}; choose another --host or --port"
        ) from None
    return listener
