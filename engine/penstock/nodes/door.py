"""Door: where a leader waits for its workers."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from penstock.errors import ConfigError
from penstock.nodes.identity import own_program
from penstock.nodes.wire import handshake
from penstock.nodes.wire.channel import Channel
from penstock.nodes.wire.frames import WireError
from penstock.nodes.wire.handshake import Refused
from penstock.nodes_config import NodesConfig

logger = logging.getLogger(__name__)

#: Handshakes at a time; a connection that comes meanwhile is closed.
MAX_HANDSHAKES = 32


class Door:
    """Listens, and lets in who proves to know the secret."""

    def __init__(self, nodes: NodesConfig, admit: Callable[[Channel, dict[str, Any]], None]) -> None:
        """admit(channel, hello) is called on a thread of its own for each worker; it welcomes the worker, or
        raises Refused. Raises ConfigError."""
        self._nodes, self._admit = nodes, admit
        self._tls = nodes.tls()
        self._program = own_program()
        self._free = threading.Semaphore(MAX_HANDSHAKES)
        try:
            family = socket.AF_INET6 if ":" in nodes.host else socket.AF_INET
            self._listener = socket.create_server((nodes.host, nodes.port), family=family, backlog=64)
        except OSError as error:
            raise ConfigError(
                f"can't wait for workers at {nodes.host or '*'}:{nodes.port}: {error}. Choose another port "
                "with --nodes-listen"
            ) from None
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, name="penstock-nodes", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            if not self._free.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(self._nodes.timeout_s)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            channel = Channel(connection, self._nodes.timeout_s)
            channel.ends_at = time.monotonic() + self._nodes.timeout_s  # a byte now and then is no handshake
            try:
                hello = handshake.admit(channel, self._nodes.secret, self._program)
                channel.ends_at = math.inf
                self._admit(channel, hello)
            except Refused as error:
                logger.warning("a worker at %s is refused: %s", channel.address, error)
                handshake.refuse(channel, error)
                channel.close()
            except WireError as error:
                logger.warning("somebody at %s is no worker: %s", channel.address, error)
                channel.close()
        except (OSError, ValueError) as error:
            logger.debug("a handshake failed: %s", error)
            connection.close()
        finally:
            self._free.release()
