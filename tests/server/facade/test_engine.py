"""The engine as the server has it: what is asked arrives whole, and what is seen stays as it was."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from fakes import FakeAsyncEngine
from penstock import EngineStatus, GenerationRequest, Grammar, SamplingParams
from penstock.errors import ContextOverflow, EngineDead, InvalidParameter
from penstock.metrics import StepStats, Traffic
from penstock_server.facade.engine import ServedEngine

pytestmark = pytest.mark.anyio


@pytest.fixture
def served(engine: FakeAsyncEngine) -> ServedEngine:
    fake: Any = engine
    return ServedEngine(fake)


async def test_a_request_arrives_with_all_that_it_has(served: ServedEngine, engine: FakeAsyncEngine) -> None:
    request = GenerationRequest([1, 2], SamplingParams(max_tokens=3), "mine", -3, "ann", "salt", 1.5, 2.5)
    served.submit(served.validate(request))
    (stream,) = engine.streams
    assert all(getattr(stream.request, each.name) == getattr(request, each.name) for each in fields(request))


async def test_what_can_not_be_computed_is_refused_first(
    served: ServedEngine, engine: FakeAsyncEngine
) -> None:
    with pytest.raises(ContextOverflow):
        served.validate(GenerationRequest([1] * 1000, SamplingParams()))
    assert not engine.streams


def test_a_model_that_is_loaded(served: ServedEngine, engine: FakeAsyncEngine) -> None:
    model = served.model
    assert (model.vocab_size, model.max_model_len) == (257, 1000)
    assert model.tokenizer is engine.model.tokenizer  # type: ignore[comparison-overlap]
    model.check_grammar(Grammar.regex("[0-9]+"))
    with pytest.raises(InvalidParameter):
        model.check_grammar(Grammar.regex("("))


def test_without_an_engine_nothing_is_known(served: ServedEngine, engine: FakeAsyncEngine) -> None:
    engine.status = EngineStatus("loading", 1, 4)
    assert not served.is_ready and served.status.loaded_layers == 1
    for ask in (lambda: served.model, served.snapshot, served.plan, lambda: served.max_num_seqs):
        with pytest.raises(EngineDead):
            ask()


def test_a_snapshot_does_not_change(served: ServedEngine, engine: FakeAsyncEngine) -> None:
    metrics = engine.model.metrics
    metrics.links = {"disk": Traffic(5, 0.5)}
    before = served.snapshot()
    copy = before.stats.model_copy(deep=True)
    metrics.record(StepStats(0.5, 3, 2, 1, 7, 0.25))
    metrics.links["disk"].num_bytes += 1
    assert before.stats == copy
    after = served.snapshot().stats
    assert (after.num_steps, after.links["disk"].num_bytes) == (1, 6) and after.time_s >= copy.time_s
