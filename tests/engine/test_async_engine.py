"""The engine thread: delivery, cancellation, death, the end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Container
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import step_watch
from penstock.async_engine import AsyncEngine
from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.errors import (
    ComputationError,
    ContextOverflow,
    CorruptFile,
    DeadlineExceeded,
    EngineDead,
    EngineStopped,
    InvalidParameter,
    QueueFull,
    QueueTimeout,
    RequestFailed,
    StepFailed,
)
from penstock.generation.model_inputs import ModelInputs
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams, ValidRequest
from penstock.generation.requests.request import RequestOutput
from penstock.generation.sequence import FinishReason, Sequence
from penstock.request_stream import RequestStream, retry_after_s
from penstock.spec import UnitKey
from penstock.weights.streamer import LayerStreamer
from penstock.weights.tiers.readers import StoreReader

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def load_from(folder: Path) -> Callable[[Callable[[int, int], None]], Engine]:
    return lambda report_progress: Engine.load(folder, report_progress=report_progress)


async def ready(folder: Path) -> AsyncEngine:
    engine = AsyncEngine(load_from(folder))
    engine.start()
    await engine.wait_until_ready()
    return engine


def test_streams_deliver_what_the_engine_generates(tiny_llama: Path) -> None:
    prompts = [[5, 6, 7], [9] * 30, [100]]
    expected = [c.token_ids for c in Engine.load(tiny_llama).generate(prompts, PARAMS)]

    async def collect(engine: AsyncEngine, prompt: list[int]) -> list[int]:
        outputs = [output async for output in engine.generate(prompt, PARAMS)]
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        return [token for output in outputs for token in output.token_ids]

    async def scenario() -> None:
        engine = await ready(tiny_llama)
        assert (engine.status.state, engine.status.loaded_layers, engine.status.total_layers) == (
            "ready",
            3,
            3,
        )
        assert await asyncio.gather(*(collect(engine, prompt) for prompt in prompts)) == expected
        await engine.stop()
        assert engine.status.state == "stopped"

    asyncio.run(scenario())


def test_a_request_is_checked_once_for_all_its_choices(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on the engine thread, and not again where another choice has the same prompt and parameters."""
    threads: list[str] = []

    async def scenario() -> None:
        engine = await ready(tiny_llama)
        validate = engine.engine.validate

        def noted(request: GenerationRequest) -> ValidRequest:
            if not isinstance(request, ValidRequest):
                threads.append(threading.current_thread().name)
            return validate(request)

        monkeypatch.setattr(engine.engine, "validate", noted)
        request = engine.engine.validate(GenerationRequest([5, 6], PARAMS))
        streams = [engine.submit(each) for each in (request, request.choice(PARAMS), request.choice(PARAMS))]
        answers = [[token async for output in each for token in output.token_ids] for each in streams]
        assert answers[0] == answers[1] == answers[2] and len(answers[0]) == 8
        await engine.stop()

    asyncio.run(scenario())
    assert threads == [threading.current_thread().name]


def test_one_request_goes_through_unchanged_and_its_choices_with_it(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        engine = await ready(tiny_llama)
        first = engine.engine.validate(GenerationRequest([5, 6], PARAMS, "mine", client="a"))
        assert engine.engine.validate(first) is first
        other = first.choice(replace(PARAMS, seed=7, logprobs=1))
        assert other.request_id != "mine" and other.client == "a"
        with pytest.raises(AssertionError, match="max_tokens"):
            first.choice(replace(PARAMS, max_tokens=1000))
        seen: list[GenerationRequest] = []
        add = engine.engine.scheduler.add

        def noted(sequence: Sequence) -> None:
            seen.append(sequence.request)
            add(sequence)

        monkeypatch.setattr(engine.engine.scheduler, "add", noted)
        streams = [engine.submit(first), engine.submit(other)]
        outputs = [[output async for output in stream] for stream in streams]
        assert [each[0].request_id for each in outputs] == ["mine", other.request_id]
        assert seen[0] is first and seen[1] is other
        assert outputs[1][0].logprobs and not outputs[0][0].logprobs
        await engine.stop()

    asyncio.run(scenario())


def test_an_id_is_refused_until_its_request_has_left(tiny_llama: Path) -> None:
    """Outputs of the one that was given up must not reach the one that comes after it."""

    async def scenario() -> None:
        engine = await ready(tiny_llama)
        request = GenerationRequest([5, 6], replace(PARAMS, max_tokens=100), "mine")
        stream = engine.submit(request)
        await anext(stream)
        with pytest.raises(InvalidParameter, match="being computed"):
            engine.submit(request)
        stream.abort()
        with pytest.raises(InvalidParameter, match="being computed"):
            engine.submit(request)
        while engine._streams.aborted:
            await asyncio.sleep(0.001)
        again = [output async for output in engine.submit(request)]
        assert again[-1].num_output_tokens == sum(len(output.token_ids) for output in again) == 100
        await engine.stop()

    asyncio.run(scenario())


def test_before_it_is_ready_requests_are_refused(tiny_llama: Path) -> None:
    may_load = threading.Event()

    def load(report_progress: Callable[[int, int], None]) -> Engine:
        report_progress(1, 3)
        may_load.wait()
        return Engine.load(tiny_llama)

    async def scenario() -> None:
        engine = AsyncEngine(load)
        engine.start()
        while engine.status.loaded_layers == 0:
            await asyncio.sleep(0)
        assert (engine.status.state, engine.status.total_layers) == ("loading", 3)
        with pytest.raises(EngineDead, match="loading"):
            engine.generate([5], PARAMS)
        may_load.set()
        await engine.wait_until_ready()
        await engine.stop()

    asyncio.run(scenario())


def test_a_model_that_cannot_be_loaded_is_reported(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = AsyncEngine(load_from(tmp_path / "nowhere"))
        engine.start()
        with pytest.raises(EngineDead, match="not a folder"):
            await engine.wait_until_ready()
        assert engine.status.state == "dead" and "nowhere is not a folder" in (engine.status.error or "")
        with pytest.raises(EngineDead, match="not a folder"):
            engine.generate([5], PARAMS)
        await engine.stop()

    asyncio.run(scenario())


def test_a_file_that_may_not_be_read_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def load(_: Any) -> Engine:
        raise PermissionError(13, "Permission denied", "/models/m.gguf")

    async def scenario() -> None:
        engine = AsyncEngine(load)
        engine.start()
        with pytest.raises(EngineDead, match="^/models/m.gguf: Permission denied$"):
            await engine.wait_until_ready()
        await engine.stop()

    asyncio.run(scenario())
    assert "Traceback" not in caplog.text


def test_impossible_requests_fail_at_once_and_the_engine_goes_on(tiny_llama: Path) -> None:
    async def scenario() -> None:
        engine = await ready(tiny_llama)
        with pytest.raises(ContextOverflow):
            engine.generate([5] * 1000, PARAMS)
        assert [output async for output in engine.generate([5], PARAMS)]
        await engine.stop()

    asyncio.run(scenario())


def test_leaving_a_stream_frees_its_sequence(tiny_llama: Path) -> None:
    async def scenario() -> None:
        engine = await ready(tiny_llama)
        manager = engine.engine.scheduler.block_manager
        endless = SamplingParams(temperature=0, ignore_eos=True, max_tokens=200)
        async with engine.generate([5] * 40, endless) as stream:
            await anext(stream)
            assert manager.pool.num_free < manager.num_blocks
        stream.abort()  # once more: nothing happens
        # A later request is carried out after the abort before it.
        assert [output async for output in engine.generate([5], PARAMS)]
        assert manager.pool.num_free == manager.num_blocks
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await engine.stop()

    asyncio.run(scenario())


def test_a_full_queue_refuses_until_one_has_finished(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_step = threading.Semaphore(8)  # so many tokens has the first request

    async def scenario() -> None:
        engine = AsyncEngine(
            lambda _: Engine.load(tiny_llama, EngineConfig(max_num_seqs=1, max_queued_seqs=1))
        )
        engine.start()
        await engine.wait_until_ready()
        step = engine.engine.step
        monkeypatch.setattr(engine.engine, "step", lambda aborted: may_step.acquire() and step(aborted))
        running, waiting = engine.generate([5], PARAMS), engine.generate([6], PARAMS)
        with pytest.raises(QueueFull, match="2 requests") as first:
            engine.generate([7], PARAMS)
        assert first.value.retry_after_s is None
        assert [output async for output in running]
        again = engine.generate([7], PARAMS)
        with pytest.raises(QueueFull) as second:
            engine.generate([8], PARAMS)
        assert second.value.retry_after_s is not None
        waiting.abort()
        last = engine.generate([8], PARAMS)
        may_step.release(100)
        assert [output async for output in again] and [output async for output in last]
        await engine.stop()

    asyncio.run(scenario())


def test_limits_of_time_are_kept_between_steps(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_step, now = threading.Semaphore(3), 100.0

    async def scenario() -> None:
        nonlocal now
        config = EngineConfig(max_num_seqs=1)
        engine = AsyncEngine(lambda _: Engine.load(tiny_llama, config), clock=lambda: now)
        engine.start()
        await engine.wait_until_ready()
        step = engine.engine.step
        monkeypatch.setattr(engine.engine, "step", lambda aborted: may_step.acquire() and step(aborted))
        endless = SamplingParams(temperature=0, ignore_eos=True)
        running = engine.generate([5], endless, deadline_s=60.0)
        await anext(running)
        waiting = engine.generate([6], PARAMS, queue_timeout_s=5.0, deadline_s=60.0)
        patient = engine.generate([7], PARAMS, queue_timeout_s=100.0)
        now = 105.0
        may_step.release()
        with pytest.raises(QueueTimeout) as late:
            await anext(waiting)
        assert late.value.retry_after_s is None, "nobody has finished yet"
        now = 160.0
        may_step.release(100)
        with pytest.raises(DeadlineExceeded, match="tokens of the answer"):
            [output async for output in running]
        assert len([output async for output in patient]) == 8
        await engine.stop()

    asyncio.run(scenario())


def test_limits_of_time_are_kept_while_a_step_hangs(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And probes learn of it, and the engine can be stopped without it."""
    goes_on, has_begun = threading.Event(), threading.Event()
    acquire = LayerStreamer._acquire

    def hang(streamer: LayerStreamer, key: UnitKey) -> Tensor:
        has_begun.set()
        goes_on.wait()
        return acquire(streamer, key)

    async def scenario() -> None:
        engine = AsyncEngine(lambda _: Engine.load(tiny_llama, EngineConfig(max_num_seqs=1)))
        engine.start()
        await engine.wait_until_ready()
        monkeypatch.setattr(LayerStreamer, "_acquire", hang)
        running = engine.generate([5], PARAMS)
        await asyncio.to_thread(has_begun.wait)
        waiting = engine.generate([6], PARAMS, queue_timeout_s=0.01)
        with pytest.raises(QueueTimeout):
            await anext(waiting)
        late = engine.generate([6], PARAMS, deadline_s=0.01)
        with pytest.raises(DeadlineExceeded, match="after 0 tokens of the answer"):
            await anext(late)
        engine._streams.limit(running.request_id, 0.0, running.too_late)
        with pytest.raises(DeadlineExceeded):
            await anext(running)
        assert engine.trouble is None, "it may be slow"
        monkeypatch.setattr(step_watch, "UNKNOWN_S", 0.0)
        monkeypatch.setattr(step_watch, "LEAST_S", 0.0)
        monkeypatch.setattr(step_watch, "SLOWEST", 0.0)
        assert engine.trouble is not None and engine.trouble.kind == "stuck"
        patient = engine.generate([7], PARAMS)
        assert not await engine.stop(0.01) and not await engine.stop()
        with pytest.raises(EngineStopped):
            await anext(patient)
        assert engine.status.state == "stopped" and engine.trouble is None
        goes_on.set()
        assert engine._left is not None
        await engine._left.wait()

    asyncio.run(scenario())


def test_requests_that_a_hanging_step_holds_are_bounded(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers that leave and come back do not fill the memory."""
    may_step = threading.Semaphore(0)

    async def scenario() -> None:
        engine = AsyncEngine(
            lambda _: Engine.load(tiny_llama, EngineConfig(max_num_seqs=1, max_queued_seqs=2))
        )
        engine.start()
        await engine.wait_until_ready()
        step = engine.engine.step
        monkeypatch.setattr(engine.engine, "step", lambda aborted: may_step.acquire() and step(aborted))
        with pytest.raises(QueueFull):
            for _ in range(20):
                engine.generate([5], PARAMS).abort()
        may_step.release(100)
        while engine._streams.aborted:
            await asyncio.sleep(0.001)
        assert [output async for output in engine.generate([7], PARAMS)]
        assert not engine._streams._timers
        await engine.stop()

    asyncio.run(scenario())


def test_priority_client_and_salt_reach_the_scheduler(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_step = threading.Semaphore(1)

    async def scenario() -> None:
        engine = AsyncEngine(lambda _: Engine.load(tiny_llama, EngineConfig(max_num_seqs=1)))
        engine.start()
        await engine.wait_until_ready()
        step, clients = engine.engine.step, set[str]()

        def held(aborted: Container[str]) -> list[RequestOutput]:
            may_step.acquire()
            outputs = step(aborted)
            clients.update(sequence.request.client for sequence in engine.engine.scheduler)
            return outputs

        monkeypatch.setattr(engine.engine, "step", held)
        ended: list[str] = []
        cached: dict[str, int] = {}

        async def follow(stream: RequestStream) -> None:
            async for output in stream:
                cached[stream.request_id] = output.num_cached_tokens
            ended.append(stream.request_id)

        streams = [
            engine.generate([9] * 40, PARAMS, "first", client="a"),
            engine.generate([9] * 40, PARAMS, "last", priority=2, cache_salt="s"),
            engine.generate([9] * 40, PARAMS, "second", priority=1, client="b"),
        ]
        tasks = [asyncio.create_task(follow(stream)) for stream in streams]
        await asyncio.sleep(0)
        may_step.release(100)
        await asyncio.gather(*tasks)
        assert ended == ["first", "second", "last"] and clients == {"a", "b", ""}
        assert cached["first"] == cached["last"] == 0 and cached["second"] >= 32
        await engine.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("finished", "now", "num_parallel", "seconds"),
    [
        ([], 50.0, 4, None),
        ([10.0, 20.0, 30.0, 40.0], 50.0, 4, 40),
        ([10.0, 20.0, 30.0, 40.0], 50.0, 1, 10),
        ([10.0, 10.5], 10.7, 3, 2),  # 1.05 s
        ([10.0, 10.0], 10.0, 64, 1),
        ([10.0], 1000.0, 64, 120),
    ],
)
def test_when_to_come_back(finished: list[float], now: float, num_parallel: int, seconds: int | None) -> None:
    assert retry_after_s(finished, now, num_parallel) == seconds


def test_an_id_may_be_used_again_while_the_engine_still_knows_it(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output of the aborted request is on its way when the next one of that name begins."""
    first, second = Engine.load(tiny_llama).generate([[5] * 9, [100]], PARAMS)
    assert first.token_ids != second.token_ids
    has_computed, may_deliver = threading.Event(), threading.Event()

    async def tokens(stream: RequestStream) -> list[int]:
        outputs = [output async for output in stream]
        assert {output.request_id for output in outputs} == {"name"}
        return [token for output in outputs for token in output.token_ids]

    async def scenario() -> None:
        engine = await ready(tiny_llama)
        step = engine.engine.step

        def held(aborted: Container[str]) -> list[RequestOutput]:
            outputs = step(aborted)
            has_computed.set()
            may_deliver.wait()
            return outputs

        monkeypatch.setattr(engine.engine, "step", held)
        aborted = engine.generate([5] * 9, PARAMS, "name")
        await asyncio.to_thread(has_computed.wait)
        aborted.abort()
        streams = [engine.generate(prompt, PARAMS, "name") for prompt in ([100], [5] * 9)]
        may_deliver.set()
        assert [await tokens(stream) for stream in streams] == [second.token_ids, first.token_ids]
        await engine.stop()

    asyncio.run(scenario())


def test_a_request_that_fails_is_told_and_the_engine_goes_on(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token 277 can't be turned into text; the logits after 2 are no numbers."""

    async def scenario() -> None:
        engine = await ready(tiny_llama)
        expected = [output async for output in engine.generate([5], PARAMS)]
        decode = engine.engine.tokenizer.decode

        def fail(token_ids: list[int], skip_special_tokens: bool = True) -> str:
            if 277 in token_ids:
                raise IndexError("piece id is out of range")
            return decode(token_ids, skip_special_tokens)

        monkeypatch.setattr(engine.engine.tokenizer, "decode", fail)
        forward = engine.engine.model.executor.forward

        def poisoned(inputs: ModelInputs, *callbacks: Any) -> list[Tensor]:
            logits = torch.cat(list(forward(inputs, *callbacks)))
            logits[inputs.input_ids[inputs.wanted_rows] == 2] = torch.nan
            return [logits]

        monkeypatch.setattr(engine.engine.model.executor, "forward", poisoned)
        towards = SamplingParams(temperature=0, logit_bias={277: 100.0})
        failing = [
            engine.generate([6, 277], PARAMS), engine.generate([6], towards), engine.generate([2], PARAMS)
        ]  # fmt: skip
        good = engine.generate([5], PARAMS)
        for stream, error in zip(failing, (RequestFailed, RequestFailed, ComputationError), strict=True):
            with pytest.raises(error):
                [output async for output in stream]
        answer = [output.token_ids async for output in good]
        assert answer == [output.token_ids for output in expected]
        assert engine.status.state == "ready"
        await engine.stop()

    asyncio.run(scenario())


def test_a_request_that_cannot_be_taken_is_told_and_the_engine_goes_on(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong with it: the others are not lost."""

    async def scenario() -> None:
        engine = await ready(tiny_llama)
        add = engine.engine.add

        def explode(request: GenerationRequest) -> None:
            if request.prompt_token_ids == [6]:
                raise ZeroDivisionError("injected")
            add(request)

        monkeypatch.setattr(engine.engine, "add", explode)
        bad, good = engine.generate([6], PARAMS), engine.generate([5], PARAMS)
        with pytest.raises(RequestFailed, match="log"):
            await anext(bad)
        assert [output async for output in good][-1].finish_reason is FinishReason.LENGTH
        await engine.stop()

    asyncio.run(scenario())


class Panic(BaseException):
    """As Rust's panics come to Python."""


@pytest.mark.parametrize("kind", [ZeroDivisionError, Panic])
def test_a_dead_engine_fails_its_requests(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    async def scenario() -> None:
        engine = await ready(tiny_llama)

        def explode(*_: object) -> None:
            raise kind("injected")

        monkeypatch.setattr(engine.engine, "step", explode)
        streams = [engine.generate([5], PARAMS), engine.generate([6], PARAMS)]
        for stream in streams:
            with pytest.raises(EngineDead, match="injected"):
                await anext(stream)
        with pytest.raises(EngineDead, match="injected"):
            await engine.wait_until_ended()
        assert engine.status.state == "dead" and "injected" in (engine.status.error or "")
        with pytest.raises(EngineDead):
            engine.generate([5], PARAMS)
        await engine.stop()

    asyncio.run(scenario())


def test_stopping_ends_requests_in_flight(tiny_llama: Path) -> None:
    async def scenario() -> None:
        engine = await ready(tiny_llama)
        stream = engine.generate([5], SamplingParams(temperature=0, ignore_eos=True, max_tokens=250))
        await anext(stream)
        await engine.stop()
        await engine.wait_until_ended()  # as it was told: no error
        with pytest.raises(EngineStopped):
            async for _ in stream:
                pass

    asyncio.run(scenario())


def test_a_stream_that_is_left_late_ends_no_other_request(tiny_llama: Path) -> None:
    """The request has ended, its last output is unread, and another one has the same id."""

    async def scenario() -> None:
        engine = await ready(tiny_llama)
        request = GenerationRequest([5, 6, 7], PARAMS, "twice")
        first = engine.submit(request)
        while len(engine._streams):
            await asyncio.sleep(0.001)
        second = engine.submit(request)
        first.abort()
        outputs = [output async for output in second]
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        await engine.stop()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_stopping_waits_for_no_worker_of_the_event_loop(tiny_llama: Path) -> None:
    """All of the loop's own threads are busy."""

    async def scenario() -> None:
        engine = await ready(tiny_llama)
        loop, is_over = asyncio.get_running_loop(), threading.Event()
        with ThreadPoolExecutor(1) as busy:
            loop.set_default_executor(busy)
            waiting = loop.run_in_executor(None, is_over.wait)
            stopping = asyncio.ensure_future(engine.stop())
            await engine.wait_until_ended()
            is_over.set()
            await asyncio.gather(waiting, stopping)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_stopping_ends_the_loading(tiny_llama: Path) -> None:
    """It does not wait for the layers that are left."""
    seen: list[int] = []
    has_begun = threading.Event()

    def load(report: Callable[[int, int], None]) -> Engine:
        def slowly(loaded: int, total: int) -> None:
            seen.append(loaded)
            has_begun.set()
            while not engine._thread._is_stopping:
                time.sleep(0.001)
            report(loaded, total)

        return Engine.load(tiny_llama, report_progress=slowly)

    async def scenario() -> None:
        engine.start()
        await asyncio.to_thread(has_begun.wait)
        await engine.stop()
        with pytest.raises(EngineStopped):
            await engine.wait_until_ready()

    engine = AsyncEngine(load)
    asyncio.run(scenario())
    assert seen == [1] and engine.status.state == "stopped"


def test_a_layer_that_can_not_be_read_costs_its_requests_alone(tiny_llama: Path) -> None:
    class Failing(StoreReader):
        is_failing = False

        def submit(self, key: UnitKey, buffer: Tensor) -> Future[int]:
            read = super().submit(key, buffer)
            if not self.is_failing:
                return read
            read.result()
            failed: Future[int] = Future()
            failed.set_exception(CorruptFile("the disk is gone"))
            return failed

    async def scenario() -> None:
        engine = AsyncEngine(lambda _: Engine.load(tiny_llama, EngineConfig(num_resident_layers=1)))
        engine.start()
        await engine.wait_until_ready()
        expected = [token async for output in engine.generate([5, 6], PARAMS) for token in output.token_ids]
        streamer = engine.engine.streamer
        failing = Failing(engine.engine.model.store)
        streamer.tiers.nearest.arrivals.reader = failing
        failing.is_failing = True
        with pytest.raises(StepFailed, match="the disk is gone"):
            [output async for output in engine.generate([5, 6], PARAMS)]
        assert engine.trouble is not None and engine.trouble.kind == "failing"
        failing.is_failing = False
        again: list[int] = []
        while not again:  # at most once for each slot that holds a failed read
            with contextlib.suppress(StepFailed):
                again = [
                    token async for output in engine.generate([5, 6], PARAMS) for token in output.token_ids
                ]
        assert again == expected and engine.trouble is None
        assert engine.engine.metrics.kv_blocks_used == 0
        await engine.stop()

    asyncio.run(scenario())
