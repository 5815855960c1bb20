"""EventSockets: the ZeroMQ sockets of a publisher."""

from __future__ import annotations

from typing import Any

from penstock.config import KVEventsConfig
from penstock.errors import ConfigError


class EventSockets:
    """Subscribers listen to `publishing`. Clients ask `replaying`; None: the config has no endpoint for them.
    Close the sockets."""

    def __init__(self, zmq: Any, config: KVEventsConfig) -> None:
        """`zmq` is the module. Raises ConfigError for an endpoint that can't be used."""
        self._zmq, self._config = zmq, config
        self._all: list[Any] = []
        try:
            self.publishing = self._open_publishing()
            self.replaying = self._open_replaying()
        except BaseException:
            self.close(0.0)
            raise

    def close(self, linger_s: float) -> None:
        """What is not sent yet has so many seconds more."""
        for socket in self._all:
            socket.close(linger=int(1000 * linger_s))

    def _open_publishing(self) -> Any:
        endpoint = self._config.endpoint
        socket = self._socket(self._zmq.PUB)
        socket.set_hwm(self._config.hwm)
        if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
            self._attach(socket.bind, endpoint)
        else:
            self._attach(socket.connect, endpoint)
        return socket

    def _open_replaying(self) -> Any:
        if self._config.replay_endpoint is None:
            return None
        socket = self._socket(self._zmq.ROUTER)
        # Room for a whole replay and its end: beyond it, ZeroMQ drops what a slow client has not read.
        socket.sndhwm = self._config.buffer_steps + 1
        self._attach(socket.bind, self._config.replay_endpoint)
        return socket

    def _socket(self, kind: int) -> Any:
        self._all.append(self._zmq.Context.instance().socket(kind))
        return self._all[-1]

    def _attach(self, attach: Any, endpoint: str) -> None:
        try:
            attach(endpoint)
        except self._zmq.ZMQError as error:
            raise ConfigError(
                f"--kv-events-config: {endpoint} can't be used: {error}. Name another endpoint, such as "
                "tcp://*:5557"
            ) from None
