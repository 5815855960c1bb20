"""`penstock serve`: one process, with one event loop for HTTP and one thread for the engine.

The port is bound before the model is loaded (listener.py), so that a port in use is an error at once, and
/health can tell the progress. While the model loads, a signal ends the process at once. Later, a signal ends
the process when the running requests are answered or --shutdown-timeout is over, and a second signal ends it
at once. A model that can't be loaded ends the process with an error. An engine that dies does so too, after
its requests got an error. The process ends although a read of the engine hangs, as where a network file
system has lost its server."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import os
import resource
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn

from penstock import can_chat
from penstock.errors import ConfigError, EngineDead, EngineStopped
from penstock_server.api.app import create_app
from penstock_server.facade.loading import spare_the_collector
from penstock_server.facade.model import ServedModel
from penstock_server.facade.plan_table import guess_lines, served_plan_lines
from penstock_server.middleware.draining import Drain
from penstock_server.models.model_pool import served_models
from penstock_server.models.pooled_model import engine_of
from penstock_server.models.served_models import ServedModels
from penstock_server.protocol.errors import ApiError, api_error
from penstock_server.serving import systemd
from penstock_server.serving.accepting import accept
from penstock_server.serving.http_protocol import http_protocol
from penstock_server.settings.settings import Settings
from penstock_server.telemetry import logs

logger = logging.getLogger(__name__)

#: Seconds that clients have, after the engine has stopped, to take the rest of their answers.
_CLOSE_TIMEOUT_S = 5


def serve(settings: Settings, listener: socket.socket) -> int:
    """Serves until a signal comes, closes the listener, and returns the exit code. The log has the error that
    kept the model from loading or ended the engine."""
    logs.configure(settings.log_level, settings.log_format)
    _allow_many_connections()
    # These handlers hold before uvicorn sets its own, and after uvicorn has ended.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    with listener:
        try:
            asyncio.run(_serve(settings, listener))
        except EngineDead:
            return 1
    return 0


def _allow_many_connections() -> None:
    """Raises the soft limit of open files to the hard one: the usual 1024 are fewer than the requests that
    may wait by default."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a system may refuse even its own hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


class _Server(uvicorn.Server):
    """uvicorn's server, which also watches the engine and ends with it."""

    def __init__(
        self, config: uvicorn.Config, models: ServedModels, settings: Settings, drain: Drain, url: str
    ) -> None:
        super().__init__(config)
        self._models = models
        self._settings = settings
        self._drain = drain
        self._url = url
        self._loop = asyncio.get_running_loop()
        self._is_leaving = False
        self._watch: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._accepting: list[asyncio.Task[None]] = []
        #: The error that kept the engine from loading or ended it.
        self.failure: EngineDead | None = None
        #: Whether the engines have ended; otherwise their threads hang.
        self.has_ended = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])  # uvicorn would have asyncio take connections
        self._accepting = [
            asyncio.create_task(accept(each, self._protocol, self.config.ssl)) for each in sockets or ()
        ]
        self._watch = asyncio.create_task(self._watch_engine())

    def _protocol(self) -> asyncio.Protocol:
        """The protocol of a new connection, as uvicorn makes it."""
        kind: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = kind(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    async def _watch_engine(self) -> None:
        """Announces that the model is ready. Ends the process if the model can't be loaded, if the engine
        dies, or if the announcement or the watch itself fails."""
        try:
            await self._models.wait_until_ready()
            if not self._models.swaps:  # an engine that goes shall leave nothing behind
                spare_the_collector()
            self._announce()
            await self._models.wait_until_ended()
        except EngineDead as error:
            await self._fail(error)
        except Exception as error:
            logger.exception("the server ends after an error of its own")
            await self._fail(EngineDead(f"the server ends after an error of its own: {error!r}"))

    async def _fail(self, error: EngineDead) -> None:
        if not self.should_exit:
            self.failure = error
            await self._leave(api_error(error), _CLOSE_TIMEOUT_S)

    def _announce(self) -> None:
        first, *others = self._models.models
        loaded = engine_of(first).loaded
        for line in served_plan_lines(loaded.plan()):
            logger.info("%s", line)
        for line in guess_lines(loaded.plan()):
            logger.debug("%s", line)
        ready = [first.name, *(model.name for model in others if model.is_ready)]
        later = [model.name for model in others if not model.is_ready]
        _tell(greeting(self._settings, loaded.model, self._url, ready, later))
        systemd.notify(systemd.READY)

    async def _leave(self, refusal: ApiError, timeout_s: float) -> None:
        """Ends the process when all requests are answered, or after `timeout_s`; new ones get `refusal`."""
        self._drain.begin(refusal)
        systemd.notify(systemd.STOPPING)
        if self._drain.num_open:
            logger.info("shutting down when all requests are answered; open: %d", self._drain.num_open)
        if not await self._drain.wait_until_empty(timeout_s):
            logger.warning("requests that were not answered in %g s: %d", timeout_s, self._drain.num_open)
        self.should_exit = True

    def _begin_to_leave(self) -> None:
        refusal = api_error(EngineStopped())
        self._leaving = asyncio.create_task(self._leave(refusal, self._settings.shutdown_timeout))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._is_leaving:
            os._exit(128 + sig)  # a second signal means: don't wait
        self._is_leaving = True
        if self._models.status.state == "loading":
            # No request is lost, and a later start goes on with half-written files. A download could not be
            # told to stop.
            contextvars.Context().run(logger.info, "ending before the model was loaded")
            os._exit(0)
        # This handler runs between any two instructions, maybe of a request. The empty context keeps that
        # request's id out of the log; the loop calls _begin_to_leave when its state is consistent.
        self._loop.call_soon_threadsafe(self._begin_to_leave, context=contextvars.Context())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # The engine stops first: that ends the answers for which clients still wait.
        self.has_ended = await self._models.stop()
        for accepting in self._accepting:
            accepting.cancel()
        await super().shutdown(sockets)
        for task in (self._watch, self._leaving):
            if task is not None:
                await task
        logger.info("stopped")
        if not self.has_ended:
            # Python would wait at its exit for threads that hang. Nothing is lost: what is kept is written
            # before its record is.
            logging.shutdown()
            os._exit(1)


def _tell(text: str) -> None:
    """Prints on stdout. The server goes on if stdout is a pipe that nobody reads any more."""
    try:
        print(text, flush=True)
    except OSError as error:
        logger.warning("the greeting can't be printed: %s", error)
        # Python would try once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


async def _serve(settings: Settings, listener: socket.socket) -> None:
    """Serves until the server ends. Raises EngineDead if the engine's death ended the server."""
    models = served_models(settings)
    drain = Drain()
    config = uvicorn.Config(
        create_app(models, settings, drain),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
        http=http_protocol(settings.request_body_timeout),
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"cannot serve https with {settings.ssl_certfile}: {error}") from None
    url = address(settings.host, listener.getsockname()[1], is_https=config.is_ssl)
    logger.info("listening at %s; %s is loading", url, models.models[0].name)
    server = _Server(config, models, settings, drain, url)
    await server.serve(sockets=[listener])
    if server.failure is not None:
        raise server.failure


def address(host: str, port: int, is_https: bool = False) -> str:
    """The server's address as a client on this machine writes it."""
    host = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, host)
    scheme = "https" if is_https else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def greeting(
    settings: Settings, model: ServedModel, url: str, ready: Sequence[str] = (), later: Sequence[str] = ()
) -> str:
    """The text on stdout when the model is ready: the addresses, and a command to try. ready: names of the
    models that are loaded; empty: the settings'. later: names of those that requests load."""
    body: dict[str, Any]
    if model.pooling is not None and model.pooling.is_score:
        path, body = (
            "rerank",
            {"query": "What is a penstock?", "documents": ["A pipe to a turbine.", "A dog."]},
        )
    elif model.pooling is not None:
        path, body = "embeddings", {"input": "A penstock is a pipe to a turbine."}
    elif can_chat(model.tokenizer):
        path = "chat/completions"
        body = {"messages": [{"role": "user", "content": "Hello!"}]}
    elif model.forms.has_encoder and model.forms.max_blanks:
        path, body = "fill", {"prompt": "Penstock is a ____ for language models.", "max_tokens": 64}
    else:
        path, body = "completions", {"prompt": "Once upon a time", "max_tokens": 64}
    command = ["curl", f"{url}/v1/{path}", "-H", "Content-Type: application/json"]
    if settings.api_key or settings.api_key_file:
        command += ["-H", "Authorization: Bearer YOUR_KEY"]
    command += ["-d", json.dumps(body)]
    page = f"In a browser: {url}/\n" if settings.ui else ""
    names = ready or settings.model_names[:1]
    verb = "are" if len(names) > 1 else "is"
    more = f"Loaded when asked for: {', '.join(later)}\n" if later else ""
    return f"{' and '.join(names)} {verb} ready at {url}/v1\n{more}{page}Try it:\n  {shlex.join(command)}"
