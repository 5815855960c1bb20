"""The socket that a server listens on, bound before the engine is even imported."""

from __future__ import annotations

import socket

from penstock.errors import ConfigError

#: Connections that are not established yet; a burst of clients should not be turned away.
_BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError if the address can't be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's algorithm off only for sockets that name it
    # (socket.create_server's don't): with it, each answer waits 40 ms for the client's ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {reason}; choose another --host or --port"
        ) from None
    return listener
