"""Clients that leave, floods, and steps that fail: every request that was let in ends in an answer or error,
every block is free at the end, and the counts add up. The application over the real engine, without sockets.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fakes import FakeAsyncEngine
from penstock.async_engine import AsyncEngine
from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.errors import CorruptFile
from penstock_server.api.app import create_app
from penstock_server.facade.engine import ServedEngine
from penstock_server.settings.settings import Settings

from .conftest import sse_events

pytestmark = pytest.mark.anyio

NUM_CLIENTS = 60
CONFIG = EngineConfig(max_num_seqs=4, max_queued_seqs=12, num_kv_tokens=512, max_model_len=128)


@dataclass
class Client:
    """A request on the plain ASGI interface. `leaves_after`: parts of the answer after which it is gone."""

    body: dict[str, Any]
    leaves_after: int | None = None
    sent: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._messages = [
            {"type": "http.request", "body": json.dumps(self.body).encode(), "more_body": False}
        ]
        self._gone = asyncio.Event()
        self._see()

    async def receive(self) -> Any:
        if self._messages:
            return self._messages.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        self._see()

    def _see(self) -> None:
        if self.leaves_after is not None and len(self.sent) >= self.leaves_after:
            self._gone.set()

    async def ask(self, app: Any) -> None:
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        await app(scope, self.receive, self.send)

    @property
    def outcome(self) -> str:
        """What it was left with; an assertion fails if that is neither an answer nor an error."""
        if self.leaves_after is not None:
            return "left"
        assert self.sent, "no answer at all"
        status = self.sent[0]["status"]
        assert not self.sent[-1].get("more_body"), "the answer has no end"
        text = b"".join(message.get("body", b"") for message in self.sent[1:]).decode()
        if status != 200:
            return str(json.loads(text)["error"]["code"])
        num_choices = self.body.get("n", 1)
        if not self.body.get("stream"):
            choices = json.loads(text)["choices"]
            assert len(choices) == num_choices and all(choice["finish_reason"] for choice in choices)
            return "whole"
        *chunks, done = sse_events(text)
        assert done == "[DONE]"
        if "error" in chunks[-1]:
            return str(chunks[-1]["error"]["code"])
        ends = [each["finish_reason"] for chunk in chunks for each in chunk["choices"]]
        assert len([end for end in ends if end]) == num_choices
        return "streamed"


def some_client(random_: random.Random) -> Client:
    body = {
        "prompt": random_.choice(["the water", "runs " * 10, [5, 6, 7]]),
        "max_tokens": random_.randint(1, 24),
        "ignore_eos": True,
        "n": random_.choice([1, 1, 1, 2, 3]),
        "use_beam_search": random_.random() < 0.3,
        "stream": random_.random() < 0.5,
    }
    return Client(body, random_.choice([None, None, 0, 1, 3]))


def metrics_of(text: str, name: str, label: str | None = None) -> dict[str, float]:
    """Values of a series by one of its labels."""
    return {
        sample.labels.get(label or "", ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


async def all_ask(app: Any, engine: AsyncEngine, clients: list[Client]) -> str:
    """What /metrics says when all have an answer and the engine has nothing to do."""
    async with app.router.lifespan_context(app):
        await engine.wait_until_ready()
        await asyncio.gather(*(client.ask(app) for client in clients))
        if engine.status.state == "ready":
            while engine.engine.has_work or engine._streams:
                await asyncio.sleep(0.001)
            manager = engine.engine.scheduler.block_manager
            assert manager.pool.num_free == manager.num_blocks
        scrape = Client({})
        scope = {"type": "http", "method": "GET", "path": "/metrics", "query_string": b"", "headers": []}
        await app(scope, scrape.receive, scrape.send)
    return b"".join(message.get("body", b"") for message in scrape.sent[1:]).decode()


def load(folder: Path, fails: Any = None) -> Any:
    """fails(number of the step) may raise in place of the step's sweep."""

    def load_engine(report: Any) -> Engine:
        engine = Engine.load(folder, CONFIG)
        forward, numbers = engine.model.executor.forward, iter(range(10**9))

        def forward_or_fail(*arguments: Any, **keywords: Any) -> Any:
            if fails is not None:
                fails(next(numbers))
            return forward(*arguments, **keywords)

        engine.model.executor.forward = forward_or_fail  # type: ignore[method-assign]
        return engine

    return load_engine


@pytest.mark.parametrize("seed", range(3))
async def test_all_end_and_all_is_free(tiny_llama: Path, seed: int) -> None:
    random_ = random.Random(seed)

    def fails(step: int) -> None:
        if step % 17 == 5:
            raise CorruptFile("a layer could not be read")

    engine = AsyncEngine(load(tiny_llama, fails))
    clients = [some_client(random_) for _ in range(NUM_CLIENTS)]
    started = count_started(engine)
    app = create_app(ServedEngine(engine), Settings(model="tiny"))
    text = await all_ask(app, engine, clients)
    outcomes = Counter(client.outcome for client in clients)
    assert set(outcomes) <= {"left", "whole", "streamed", "overloaded", "step_failed"}, outcomes
    assert all(outcomes[each] for each in ("left", "overloaded", "step_failed")), outcomes
    ends = metrics_of(text, "vllm:request_success_total", "finished_reason")
    assert sum(ends.values()) == len(started) and ends["length"] and ends["abort"] and ends["error"]
    assert sum(metrics_of(text, "http_requests_total", "status").values()) > 0
    refused = metrics_of(text, "vllm:admission_rejections_total", "reason")
    assert refused["overloaded"] >= outcomes["overloaded"]


def count_started(engine: AsyncEngine) -> list[Any]:
    """Grows by each answer that the engine is to give."""
    started: list[Any] = []
    submit = engine.submit

    def submit_and_count(*arguments: Any, **keywords: Any) -> Any:
        stream = submit(*arguments, **keywords)
        beams = arguments[0].params.beams
        started.extend([stream] * (1 if beams is None else beams.num_answers))
        return stream

    engine.submit = submit_and_count  # type: ignore[method-assign]
    return started


async def test_every_request_is_counted_once(tiny_llama: Path) -> None:
    engine = AsyncEngine(load(tiny_llama))
    clients = [some_client(random.Random(seed)) for seed in range(NUM_CLIENTS)]
    text = await all_ask(create_app(ServedEngine(engine), Settings(model="tiny")), engine, clients)
    by_status = metrics_of(text, "http_requests_total", "status")
    assert sum(by_status.values()) == NUM_CLIENTS
    outcomes = Counter(client.outcome for client in clients)
    # Who left is a 499, unless the whole answer, or a refusal, was sent before that was noticed.
    assert by_status["5xx"] <= outcomes["overloaded"] + outcomes["left"]
    assert by_status["2xx"] >= outcomes["whole"] + outcomes["streamed"]
    tokens = metrics_of(text, "vllm:request_generation_tokens_sum")[""]
    assert 0 < tokens <= metrics_of(text, "vllm:generation_tokens_total")[""]


async def test_an_engine_that_dies_leaves_nobody_waiting(tiny_llama: Path) -> None:
    def fails(step: int) -> None:
        if step == 9:
            raise ZeroDivisionError("injected")

    engine = AsyncEngine(load(tiny_llama, fails))
    clients = [some_client(random.Random(seed)) for seed in range(NUM_CLIENTS)]
    await all_ask(create_app(ServedEngine(engine), Settings(model="tiny")), engine, clients)
    outcomes = Counter(client.outcome for client in clients)
    assert set(outcomes) <= {"left", "whole", "streamed", "overloaded", "engine_dead"}
    assert outcomes["engine_dead"] and engine.status.state == "dead"


async def test_a_slow_step_holds_up_no_other_client() -> None:
    """While one request waits for its step, others are let in, answered and refused."""
    gate = asyncio.Event()
    fake: Any = FakeAsyncEngine(lambda prompt, params: [gate, "x"] if bytes(prompt) == b"slow" else ["x"])
    app = create_app(ServedEngine(fake), Settings(model="tiny"))
    slow, quick, wrong = Client({"prompt": "slow"}), Client({"prompt": "q"}), Client({"prompt": []})
    waiting = asyncio.create_task(slow.ask(app))
    await quick.ask(app)
    await wrong.ask(app)
    assert (quick.outcome, wrong.sent[0]["status"]) == ("whole", 400) and not slow.sent
    gate.set()
    await waiting
    assert slow.outcome == "whole"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("seconds", "outcomes"),
    [(2000, ("done", "queue_timeout")), (4000, ("deadline_exceeded", "deadline_exceeded"))],
)
async def test_time_limits(tiny_llama: Path, stream: bool, seconds: float, outcomes: tuple[str, str]) -> None:
    """While a step of one request takes as long as it likes, another waits for its first step."""
    is_computing, go_on = threading.Event(), threading.Event()

    def fails(step: int) -> None:
        if step == 1:
            is_computing.set()
            go_on.wait()

    passed = 0.0
    engine = AsyncEngine(load(tiny_llama, fails), clock=lambda: time.monotonic() + passed)
    settings = Settings(model="tiny", queue_timeout=1800, request_timeout=3600)
    app = create_app(ServedEngine(engine), settings)
    body = {"prompt": "x", "max_tokens": 20, "ignore_eos": True, "stream": stream}
    running, waiting = Client(body | {"n": CONFIG.max_num_seqs}), Client(body)

    async def let_time_pass() -> None:
        nonlocal passed
        await asyncio.to_thread(is_computing.wait)
        while len(engine._streams) <= CONFIG.max_num_seqs:
            await asyncio.sleep(0.001)
        passed = seconds
        go_on.set()

    passing = asyncio.create_task(let_time_pass())
    text = await all_ask(app, engine, [running, waiting])
    await passing
    done = "streamed" if stream else "whole"
    assert (running.outcome, waiting.outcome) == tuple(done if each == "done" else each for each in outcomes)
    if not stream:
        assert waiting.sent[0]["status"] == (503 if outcomes[1] == "queue_timeout" else 504)
        assert (b"retry-after" in dict(waiting.sent[0]["headers"])) == (outcomes[1] == "queue_timeout")
    refused = metrics_of(text, "vllm:admission_rejections_total", "reason")
    assert refused.get("queue_timeout", 0) == outcomes.count("queue_timeout")
    ends = metrics_of(text, "vllm:request_success_total", "finished_reason")
    assert sum(ends.values()) == CONFIG.max_num_seqs + 1
