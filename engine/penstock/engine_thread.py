"""EngineThread: the one thread that loads an engine, steps it, and closes it."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from penstock.engine import Engine
from penstock.errors import EngineStopped, MachineAway, PenstockError, RequestFailed, StepFailed
from penstock.generation.requests.generation_request import ValidRequest
from penstock.request_stream import OpenStreams
from penstock.step_watch import StepWatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineStatus:
    """How the engine is, for /health."""

    state: Literal["loading", "ready", "dead", "stopped"]
    loaded_layers: int
    total_layers: int
    error: str | None = None


@dataclass(frozen=True)
class Abort:
    """The command to drop a request."""

    key: str


class Look:
    """The command to notice what has changed while there was no work."""


class Stop:
    """The command to end the thread."""


class EngineThread:
    """Carries out commands between steps. The thread never waits for the event loop: whatever happens is told
    there by call_soon_threadsafe, in order."""

    def __init__(
        self,
        load: Callable[[Callable[[int, int], None]], Engine],
        clock: Callable[[], float],
        streams: OpenStreams,
        settle: Callable[[EngineStatus], None],
        leave: Callable[[], None],
    ) -> None:
        """load(report_progress) makes the engine, on this thread. settle(status) is called on the event loop
        when the engine is ready, and when it takes no more requests; leave() when the thread is at its
        end."""
        self._load = load
        self._clock = clock
        self._streams = streams
        self._settle = settle
        self._leave = leave
        #: Whether steps go on.
        self.watch = StepWatch()
        #: None until the engine is loaded.
        self.engine: Engine | None = None
        self.progress = EngineStatus("loading", 0, 0)
        self._commands: queue.SimpleQueue[ValidRequest | Abort | Look | Stop] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def put(self, command: ValidRequest | Abort) -> None:
        """Queue a command. Never blocks."""
        self._commands.put(command)

    def ask_to_stop(self) -> None:
        """End the thread after the step that is being computed, or the layer that is being loaded. Never
        blocks."""
        self._is_stopping = True
        self._commands.put(Stop())

    def _run(self) -> None:
        end = EngineStatus("stopped", 0, 0)
        try:
            self.engine = engine = self._load(self._report_progress)
            engine.executor.call_on_change(lambda: self._commands.put(Look()))
            self._tell(self._settle, replace(self.progress, state="ready"))
            while self._obey(engine):
                self._step(engine)
        except EngineStopped:
            pass
        except PenstockError as error:
            end = self._dead(str(error))
        except OSError as error:
            if error.filename is None:
                logger.exception("the engine thread failed")
            end = self._dead(str(error) if error.filename is None else f"{error.filename}: {error.strerror}")
        except BaseException as error:  # the last line of defence, also for panics of Rust code: never vanish
            logger.exception("the engine thread failed")
            end = self._dead(f"internal error: {error!r}")
        self._tell(self._settle, end)
        try:
            if self.engine is not None:
                self.engine.close()
                self.engine = None  # the weights' memory goes back at once: no cycle of objects keeps it
        finally:
            self._tell(self._leave)

    def _dead(self, error: str) -> EngineStatus:
        what = "the model can't be loaded" if self.engine is None else "the engine is dead"
        logger.error("%s: %s", what, error)
        return replace(self.progress, state="dead", error=error)

    def _report_progress(self, loaded: int, total: int) -> None:
        if self._is_stopping:
            raise EngineStopped("the engine was stopped while it was loading")
        self.progress = EngineStatus("loading", loaded, total)

    def _step(self, engine: Engine) -> None:
        if expired := engine.expire(self._clock()):
            self._tell(self._streams.deliver, expired)
        self.watch.begin()
        try:
            outputs = engine.step(self._streams.aborted)
        except StepFailed as error:
            logger.error("a step failed: %s", error)
            if not isinstance(error, MachineAway):  # health knows of machines that are away
                self.watch.fail()
            for key in error.request_ids:
                self._tell(self._streams.fail, key, error)
        else:
            self.watch.end(bool(outputs))
            if outputs:
                self._tell(self._streams.deliver, outputs)

    def _obey(self, engine: Engine) -> bool:
        """Carry out all commands. Waits for a command if there is no work. False: the thread has to end."""
        while not (self._commands.empty() and engine.has_work):
            command = self._commands.get()
            if isinstance(command, Stop):
                return False
            if isinstance(command, Look):
                engine.look()
                continue
            if isinstance(command, Abort):
                engine.abort(command.key)
                self._tell(self._streams.aborted.discard, command.key)
            else:
                self._begin(engine, command)
        return True

    def _begin(self, engine: Engine, request: ValidRequest) -> None:
        try:
            engine.add(request)
        except PenstockError as error:
            logger.error("a request failed: %s", error, exc_info=error.__cause__)
            self._tell(self._streams.fail, request.request_id, error)
        except Exception:  # a request is queued last of all, so nothing of this one is left in the engine
            logger.exception("a request could not be taken")
            failure = RequestFailed("the engine could not take it; the log says why")
            self._tell(self._streams.fail, request.request_id, failure)

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function on the event loop, soon."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            logger.debug("an output came after the event loop had closed")
