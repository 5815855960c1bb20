"""The socket that a server listens on, bound before the engine is even imported."""

from __future__ import annotations

import socket

from penstock.errors import ConfigError

#: Connections that are not established yet; a burst of clients should not be turned away.
_BACKLOG = 2048

#: Seconds after which a client is gone that takes nothing of what is sent, though its machine may answer.
#: What it would be sent meanwhile waits in memory.
SEND_TIMEOUT_S = 120
#: Seconds of silence after which a client's machine is asked whether it is still there, and between two
#: questions.
_PROBE_S = 30


def bind(host: str, port: int, send_timeout_s: int = SEND_TIMEOUT_S) -> socket.socket:
    """A listening socket. Raises ConfigError if the address can't be had.

    Connections that it accepts end when the client's machine does not answer any more, or when the client
    takes nothing for `send_timeout_s`: the system sees to that, where it can.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's algorithm off only for sockets that name it
    # (socket.create_server's don't): with it, each answer waits 40 ms for the client's ACK.
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
