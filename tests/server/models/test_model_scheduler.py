"""Turns of models: nobody starves, nothing is cut off, and memory is never taken twice."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock import SpareMemory
from penstock.errors import EngineDead, QueueFull, QueueTimeout
from penstock_server.models.model_pool import ModelPool
from penstock_server.models.pooled_model import ModelInUse
from penstock_server.protocol.errors import ApiError

from .pools import SIZE, Fakes

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def running(pool: ModelPool) -> AsyncIterator[ModelPool]:
    pool.start()
    await pool.wait_until_ready()
    yield pool
    await pool.stop()


def ask(pool: ModelPool, name: str, **options: Any) -> asyncio.Task[ModelInUse]:
    model = pool.find(name)
    assert model is not None
    return asyncio.create_task(pool.use(model, **options))


async def settle() -> None:
    """Whatever can happen has happened."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_first_is_loaded_at_the_start_and_others_when_asked_for() -> None:
    fakes = Fakes()
    async with running(fakes.pool("a", "b", "c")) as pool:
        assert fakes.loaded == ["a"]
        (await ask(pool, "a")).close()
        (await ask(pool, "b")).close()
        assert fakes.loaded == ["a", "b"]
        assert fakes.engines["a"].is_stopped
        assert [model.state for model in pool.models] == ["unloaded", "loaded", "unloaded"]


async def test_models_that_fit_stay_beside_each_other() -> None:
    fakes = Fakes()
    async with running(fakes.pool("a", "b", "c", room=2)) as pool:
        uses = [await ask(pool, "a"), await ask(pool, "b")]
        assert fakes.loaded == ["a", "b"]
        assert fakes.host_bytes == [SIZE, SIZE], "what the first does not need is kept for another"
        for use in uses:
            use.close()
        (await ask(pool, "a")).close()
        (await ask(pool, "c")).close()
        assert [model.state for model in pool.models] == ["loaded", "unloaded", "loaded"]


async def test_no_model_is_starved_by_requests_for_another() -> None:
    """A's requests that run are finished, B has its turn, and A's later ones come behind it."""
    fakes = Fakes()
    async with running(fakes.pool("a", "b")) as pool:
        first = await ask(pool, "a")
        b = ask(pool, "b")
        await settle()
        later = [ask(pool, "a") for _ in range(3)]
        await settle()
        assert not b.done() and not any(each.done() for each in later)
        assert not fakes.engines["a"].is_stopped, "nothing is cut off"
        first.close()
        use = await b
        assert not any(each.done() for each in later)
        second_b = ask(pool, "b")
        await settle()
        assert not second_b.done(), "now A's requests wait longer"
        use.close()
        for given in await asyncio.gather(*later):
            given.close()
        (await second_b).close()
        assert fakes.loaded == ["a", "b", "a", "b"]


async def test_requests_that_gathered_share_a_turn() -> None:
    fakes = Fakes()
    async with running(fakes.pool("a", "b")) as pool:
        first = await ask(pool, "a")
        waiting = [ask(pool, "b"), ask(pool, "b"), ask(pool, "b")]
        await settle()
        first.close()
        uses = await asyncio.gather(*waiting)
        assert fakes.loaded == ["a", "b"] and pool.models[1].num_users == 3
        for use in uses:
            use.close()


async def test_who_gives_up_holds_up_nobody() -> None:
    fakes = Fakes()
    async with running(fakes.pool("a", "b")) as pool:
        first = await ask(pool, "a")
        b = ask(pool, "b")
        await settle()
        later = ask(pool, "a")
        await settle()
        b.cancel()
        (await later).close()
        first.close()
        assert fakes.loaded == ["a"]


async def test_pinned_models_stay() -> None:
    fakes = Fakes()
    async with running(fakes.pool("a", "b", "c", room=2, pinned=("b",))) as pool:
        assert fakes.loaded == ["b", "a"]
        for name in ("c", "a", "b"):
            (await ask(pool, name, keep_alive_s=0.0)).close()
            await settle()
        assert fakes.loaded == ["b", "a", "c", "a"]
        assert pool.models[1].is_ready and not pool.models[0].is_ready


async def test_keep_alive() -> None:
    fakes = Fakes()
    async with running(fakes.pool("a", "b", keep_alive_s=0.0)) as pool:
        one, other = await ask(pool, "a"), await ask(pool, "a")
        one.close()
        await settle()
        assert pool.models[0].is_ready, "a request has it"
        other.close()
        await settle()
        assert not pool.models[0].is_ready and fakes.engines["a"].is_stopped
        (await ask(pool, "a", keep_alive_s=math.inf)).close()
        await settle()
        assert pool.models[0].is_ready, "the request's own wish wins"
        pool.retire(pool.models[0])
        await settle()
        assert not pool.models[0].is_ready


async def test_memory_of_models_that_left_stays_for_others_and_goes_back_at_rest() -> None:
    fakes, spare = Fakes(), SpareMemory()
    spare.take("layers", 1 << 20)  # and is left at once
    async with running(fakes.pool("a", "b", room=3, keep_alive_s=0.0, spare=spare)) as pool:
        given = await ask(pool, "b")
        while spare.num_bytes > SIZE:  # another thread gives it back
            await asyncio.sleep(0.001)
        await settle()
        assert spare.num_bytes == SIZE, "as much as the budget has room for"
        given.close()
        while spare.num_bytes:
            await asyncio.sleep(0.001)


async def test_a_model_that_leaves_takes_no_request() -> None:
    """Two expire together, and one of them takes a while to stop."""
    fakes, begun, may_end = Fakes(), asyncio.Event(), asyncio.Event()
    async with running(fakes.pool("a", "b", room=2)) as pool:
        for name in ("a", "b"):
            (await ask(pool, name)).close()
        leaving, stop = fakes.engines["b"], fakes.engines["a"].stop

        async def stop_late(timeout_s: float | None = None) -> bool:
            begun.set()
            await may_end.wait()
            return await stop(timeout_s)

        fakes.engines["a"].stop = stop_late  # type: ignore[method-assign]
        for model in pool.models:
            model.expires = 0.0
        pool.model_scheduler.advance()
        await begun.wait()
        late = ask(pool, "b")
        await settle()
        assert not late.done()
        may_end.set()
        (await late).close()
        assert leaving.is_stopped and fakes.loaded == ["a", "b", "b"]


async def test_a_model_whose_request_is_gone_stays_for_a_while() -> None:
    fakes = Fakes()
    async with running(fakes.pool("a", "b", keep_alive_s=3600.0)) as pool:
        model = pool.models[1]
        model.expires = 0.0  # it was there before
        first = await ask(pool, "a")
        b = ask(pool, "b")
        await settle()
        b.cancel()
        first.close()
        await pool.model_scheduler.load(model)
        pool.model_scheduler.advance()
        await settle()
        assert model.is_ready


async def test_a_model_that_can_not_be_had() -> None:
    fakes = Fakes()
    fakes.errors["b"] = "its file is gone"
    async with running(fakes.pool("a", "b")) as pool:
        with pytest.raises(ApiError, match="b can't be loaded now: its file is gone") as found:
            await ask(pool, "b")
        assert found.value.status_code == 503 and int((found.value.headers or {})["Retry-After"]) >= 1
        (await ask(pool, "a")).close()
        fakes.errors.clear()
        (await ask(pool, "b")).close()


async def test_waiting_has_limits() -> None:
    fakes = Fakes()
    async with running(fakes.pool("a", "b", max_waiting=1)) as pool:
        first = await ask(pool, "a")
        with pytest.raises(QueueTimeout, match="b could not be loaded in time") as found:
            await ask(pool, "b", limit_s=0.0)
        assert found.value.retry_after_s
        waiting = ask(pool, "b")
        await settle()
        with pytest.raises(QueueFull, match="1 requests wait"):
            await ask(pool, "b")
        first.close()
        (await waiting).close()


async def test_an_engine_that_dies_ends_the_server() -> None:
    fakes = Fakes()
    async with running(fakes.pool("a", "b")) as pool:
        engine = fakes.engines["a"]
        engine.status = type(engine.status)("dead", 4, 4, "a step failed badly")
        engine.ended.set()
        with pytest.raises(EngineDead, match="a step failed badly"):
            await pool.wait_until_ended()
        assert pool.status.state == "dead"


async def test_a_first_model_that_can_not_be_loaded_ends_the_server() -> None:
    fakes = Fakes()
    fakes.errors["a"] = "no such file"
    pool = fakes.pool("a", "b")
    pool.start()
    with pytest.raises(EngineDead, match="no such file"):
        await pool.wait_until_ready()
    await pool.stop()
