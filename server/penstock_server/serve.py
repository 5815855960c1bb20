"""`penstock serve`: one process with one event loop for HTTP and one thread for the engine.

The port is bound before anything is loaded (listener.py), so that a port in use is told at once and
/health can tell the progress. A signal ends the process, while the model loads at once. A model that can't be
loaded ends it too; an engine that dies later does not: the server goes on answering errors, and /health/live
says that a restart is due.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import signal
import socket
from types import FrameType
from typing import Any

import uvicorn

from penstock.async_engine import AsyncEngine
from penstock.engine import Engine
from penstock.errors import EngineDead
from penstock_server.app import create_app
from penstock_server.loading import load_engine
from penstock_server.plan_report import plan_table
from penstock_server.settings import Settings

logger = logging.getLogger(__name__)

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

#: Seconds for clients to take what is left of their answers after the engine has stopped.
_CLOSE_TIMEOUT_S = 5


def serve(settings: Settings, listener: socket.socket) -> int:
    """Runs until a signal comes, and closes the listener. Raises what kept the model from being loaded."""
    logging.basicConfig(format=_LOG_FORMAT, level=settings.log_level.upper())
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    # uvicorn raises the signal that ended it once more when it is done: that is our way out.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    with listener:
        asyncio.run(_serve(settings, listener))
    return 0


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


class _Server(uvicorn.Server):
    """uvicorn's server, and the engine's beginning and end around it."""

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, settings: Settings, url: str) -> None:
        super().__init__(config)
        self._engine = engine
        self._settings = settings
        self._url = url
        self._is_leaving = False
        self._watch: asyncio.Task[None] | None = None
        #: Why the model could not be loaded.
        self.failure: EngineDead | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._watch = asyncio.create_task(self._announce())

    async def _announce(self) -> None:
        """Says that the model is ready, or ends the process if it can't be loaded."""
        try:
            await self._engine.wait_until_ready()
        except EngineDead as error:
            self.failure = error
            self.should_exit = True
        else:
            plan = self._engine.engine.plan
            for line in plan_table(plan) if plan else ():
                logger.info("%s", line)
            print(greeting(self._settings, self._engine.engine, self._url), flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._is_leaving:
            os._exit(128 + sig)  # whoever sends a second signal does not want to wait
        self._is_leaving = True
        if self._engine.status.state == "loading":
            # Nobody has an answer to lose and all that is written can be gone on with, while a download
            # can't be told to stop.
            logger.info("ending before the model was loaded")
            os._exit(0)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # First of all the engine: that ends the answers which clients still wait for.
        await self._engine.stop()
        await super().shutdown(sockets)
        if self._watch is not None:
            await self._watch


async def _serve(settings: Settings, listener: socket.socket) -> None:
    engine = AsyncEngine(lambda report: load_engine(settings, report))
    config = uvicorn.Config(
        create_app(engine, settings),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )
    url = address(settings.host, listener.getsockname()[1])
    logger.info("listening at %s; %s is loading", url, settings.model_names[0])
    server = _Server(config, engine, settings, url)
    await server.serve(sockets=[listener])
    if server.failure is not None:
        raise server.failure


def address(host: str, port: int) -> str:
    """As a client on this machine would write it."""
    host = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def greeting(settings: Settings, engine: Engine, url: str) -> str:
    """What is served where, and a command to try it."""
    if engine.tokenizer.has_chat_template:
        path = "chat/completions"
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}]}
    else:
        path, body = "completions", {"prompt": "Once upon a time", "max_tokens": 64}
    command = ["curl", f"{url}/v1/{path}", "-H", "Content-Type: application/json"]
    if settings.api_key:
        command += ["-H", "Authorization: Bearer YOUR_KEY"]
    command += ["-d", json.dumps(body)]
    return f"{settings.model_names[0]} is ready at {url}/v1\nTry it:\n  {shlex.join(command)}"
