"""ModelScheduler: which models are loaded, and which requests wait for which.

A request is given its model at once if the model is loaded. Otherwise it waits, and the one that waits
longest decides which model is loaded next, and which ones make room for it (turns.py). Those take no further
requests, and leave when the requests that they have are answered. So no model is starved by requests for
another, and all requests that have gathered for a model share its turn.

Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from penstock import SpareMemory
from penstock.errors import EngineDead, PenstockError, QueueFull, QueueTimeout
from penstock_server.facade.engine import ServedEngine
from penstock_server.models.pooled_model import ModelInUse, PooledModel
from penstock_server.models.turns import allotment, leavers
from penstock_server.protocol.errors import RETRY_AFTER_S, unavailable

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Ticket:
    """A request that waits for its model."""

    model: PooledModel
    keep_alive_s: float
    asked_at: float
    given: asyncio.Future[ModelInUse]


class ModelScheduler:
    def __init__(
        self,
        models: Sequence[PooledModel],
        keep_alive_s: float,
        max_waiting: int,
        die: Callable[[EngineDead], None],
        spare: SpareMemory | None = None,
    ) -> None:
        """max_waiting: the most requests that wait for models. die() is called with the error of an engine
        that ended by itself. spare: where models that leave leave their memory for those that come."""
        self._models = models
        self._keep_alive_s = keep_alive_s
        self._max_waiting = max_waiting
        self._die = die
        self._spare = spare or SpareMemory()
        #: Host memory of all models together; known once their files were looked at.
        self.budget_bytes = 0
        self._tickets: list[_Ticket] = []
        #: Models that take no further requests, since another one waits for their memory.
        self._leaving: tuple[PooledModel, ...] = ()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_moving = self._is_closed = False
        #: Engines of models that are being unloaded.
        self._ending: list[ServedEngine] = []

    def num_waiting(self, model: PooledModel) -> int:
        return sum(ticket.model is model for ticket in self._tickets)

    async def use(self, model: PooledModel, keep_alive_s: float | None, limit_s: float | None) -> ModelInUse:
        """See ServedModels.use()."""
        asked_at, keep_s = time.monotonic(), self._keep_alive_s if keep_alive_s is None else keep_alive_s
        if model.is_ready and model not in self._leaving:
            return self._give(model, keep_s, asked_at)
        if len(self._tickets) >= self._max_waiting:
            count = len(self._tickets)
            raise QueueFull(f"{count} requests wait for a model already, which is the limit", _later(model))
        ticket = _Ticket(model, keep_s, asked_at, asyncio.get_running_loop().create_future())
        self._tickets.append(ticket)
        self.advance()
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.shield(ticket.given)
        except TimeoutError:
            self._give_up(ticket)
            error = QueueTimeout(f"{model.name} could not be loaded in time")
            error.retry_after_s = _later(model)
            raise error from None
        except BaseException:
            self._give_up(ticket)
            raise

    def _give_up(self, ticket: _Ticket) -> None:
        """The request goes without its model."""
        if ticket in self._tickets:
            self._tickets.remove(ticket)
            ticket.given.cancel()
            self.advance()  # it may have been the one for which others leave
        elif not ticket.given.exception():
            ticket.given.result().close()

    def _give(self, model: PooledModel, keep_s: float, asked_at: float) -> ModelInUse:
        assert model.engine is not None
        given = ModelInUse(model, model.engine, asked_at, lambda: self._release(model))
        model.num_users += 1
        model.last_used, model.keep_alive_s, model.expires = time.monotonic(), keep_s, math.inf
        return given

    def _release(self, model: PooledModel) -> None:
        model.num_users -= 1
        if not model.num_users and model.keep_alive_s < math.inf:
            model.expires = time.monotonic() + model.keep_alive_s
            asyncio.get_running_loop().call_later(model.keep_alive_s, self.advance)
        self.advance()

    def retire(self, model: PooledModel) -> None:
        """The model goes when its requests are answered."""
        model.keep_alive_s = 0.0
        if not model.num_users:
            model.expires = 0.0
        self.advance()

    def advance(self) -> None:
        """Gives loaded models to those who wait for them, and begins the next move if there is one."""
        if self._is_closed:
            return
        wanted = None
        if not self._is_moving:  # what leaves in a move that is under way stays away from requests to its end
            wanted = self._wanted()
            self._leaving = () if wanted is None else self._leavers(wanted)
        for model in {each.model for each in self._tickets if each.model.is_ready}.difference(self._leaving):
            self._settle(model)
        if self._is_moving:
            return
        if wanted is None:
            self._leaving = self._expired()
        if (wanted or self._leaving) and not any(model.num_users for model in self._leaving):
            self._is_moving = True
            self._begin(self._move(self._leaving, wanted))

    def _settle(self, model: PooledModel) -> None:
        """Gives a loaded model to all who wait for it."""
        for ticket in [each for each in self._tickets if each.model is model]:
            self._tickets.remove(ticket)
            try:
                ticket.given.set_result(self._give(model, ticket.keep_alive_s, ticket.asked_at))
            except PenstockError as error:  # the engine ended this moment
                ticket.given.set_exception(error)

    def _wanted(self) -> PooledModel | None:
        """The model for which a request waits longest, of those that are not loaded."""
        return next((each.model for each in self._tickets if not each.model.is_ready), None)

    def _leavers(self, wanted: PooledModel) -> tuple[PooledModel, ...]:
        held = [model.held for model in self._models if model.is_ready]
        names = leavers(wanted.resident_bytes, self.budget_bytes, held)
        return tuple(model for model in self._models if model.name in names)

    def _expired(self) -> tuple[PooledModel, ...]:
        now = time.monotonic()
        return tuple(
            model
            for model in self._models
            if model.is_ready and not model.num_users and not model.is_pinned and model.expires <= now
        )

    async def _move(self, leaving: Sequence[PooledModel], wanted: PooledModel | None) -> None:
        """Unloads models at rest, and loads another."""
        try:
            for model in leaving:
                await self._unload(model)
            if wanted is not None:
                await self.load(wanted)
                self._settle(wanted)  # its turn goes to requests that wait for another model by now
        except PenstockError as error:
            assert wanted is not None
            logger.error("%s could not be loaded: %s", wanted.name, error)
            self._refuse(wanted, error)
        finally:
            left = self._num_free if wanted is not None else 0
            asyncio.get_running_loop().run_in_executor(None, self._spare.keep, left)
            self._is_moving = False
            self.advance()

    async def _unload(self, model: PooledModel) -> None:
        engine, model.engine = model.engine, None
        model.used_bytes = 0
        if engine is not None:
            self._ending.append(engine)
            await engine.stop()  # another model gets its memory: there is no limit
            self._ending.remove(engine)
            logger.info("%s is unloaded", model.name)

    async def load(self, model: PooledModel, is_patient: bool = False) -> None:
        """Loads a model into the memory that is free now. Raises EngineDead with the reason if that fails."""
        begun = time.monotonic()
        model.engine = engine = model.make(self._allotment(model), is_patient)
        engine.start()
        try:
            await engine.wait_until_ready()
            model.used_bytes = engine.loaded.plan().host_used_bytes
        except BaseException:
            model.engine = None
            raise
        model.load_s, model.num_loads = time.monotonic() - begun, model.num_loads + 1
        model.last_used = time.monotonic()
        if self._keep_alive_s < math.inf and not is_patient:  # what is loaded at the start waits for requests
            # Whoever asked for the model may be gone by now.
            model.expires = time.monotonic() + self._keep_alive_s
            asyncio.get_running_loop().call_later(self._keep_alive_s, self.advance)
        logger.info("%s takes requests after %.1f s", model.name, model.load_s)
        self._begin(self._watch(model, engine))

    @property
    def _num_free(self) -> int:
        """Bytes of the budget that no model has."""
        return self.budget_bytes - sum(model.used_bytes for model in self._models)

    def _allotment(self, model: PooledModel) -> int:
        away = [other for other in self._models if other.engine is None and other is not model]
        return allotment(model.resident_bytes, self._num_free, [other.resident_bytes for other in away])

    async def _watch(self, model: PooledModel, engine: ServedEngine) -> None:
        try:
            await engine.wait_until_ended()
        except EngineDead as error:
            if model.engine is engine:
                self._die(error)

    def _refuse(self, model: PooledModel, error: PenstockError) -> None:
        """Those who wait for the model get a 503."""
        for ticket in [each for each in self._tickets if each.model is model]:
            self._tickets.remove(ticket)
            message = f"{model.name} can't be loaded now: {error}. Try again later, or ask for another model."
            ticket.given.set_exception(unavailable(message, "model_unavailable", _later(model)))

    def _begin(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, error: EngineDead, timeout_s: float) -> bool:
        """Ends all requests, those that wait with `error`, and all engines. False: one of them has not ended
        in so many seconds."""
        self._is_closed = True
        for ticket in self._tickets:
            ticket.given.set_exception(error)
        self._tickets.clear()
        for task in self._tasks:
            task.cancel()
        engines = [*self._ending, *(model.engine for model in self._models if model.engine is not None)]
        ends = await asyncio.gather(*(engine.stop(timeout_s) for engine in engines))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return all(ends)


def _later(model: PooledModel) -> int:
    """Seconds after which it is worth asking again: those of a load, as far as one is known."""
    return max(RETRY_AFTER_S, math.ceil(model.load_s or 0))
