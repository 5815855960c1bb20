"""An engine whose model is loaded: what is asked arrives whole, and what is seen stays as it was."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields
from typing import Any

import pytest

from fakes import FakeAsyncEngine
from penstock import GenerationRequest, Grammar, SamplingParams
from penstock.errors import ContextOverflow, InvalidParameter
from penstock.metrics import StepStats, Traffic
from penstock_server.facade.loaded_engine import LoadedEngine

pytestmark = pytest.mark.anyio


@pytest.fixture
def loaded(engine: FakeAsyncEngine) -> LoadedEngine:
    fake: Any = engine
    return LoadedEngine(fake)


async def test_a_request_arrives_with_all_that_it_has(loaded: LoadedEngine, engine: FakeAsyncEngine) -> None:
    request = GenerationRequest([1, 2], SamplingParams(max_tokens=3), "mine", -3, "ann", "salt", 1.5, 2.5)
    loaded.submit(loaded.validate(request))
    (stream,) = engine.streams
    assert all(getattr(stream.request, each.name) == getattr(request, each.name) for each in fields(request))


async def test_what_can_not_be_computed_is_refused_first(
    loaded: LoadedEngine, engine: FakeAsyncEngine
) -> None:
    with pytest.raises(ContextOverflow):
        loaded.validate(GenerationRequest([1] * 1000, SamplingParams()))
    assert not engine.streams


def test_a_model_that_is_loaded(loaded: LoadedEngine, engine: FakeAsyncEngine) -> None:
    model = loaded.model
    assert (model.vocab_size, model.max_model_len) == (257, 1000)
    assert model.tokenizer is engine.model.tokenizer  # type: ignore[comparison-overlap]
    model.check_grammar(Grammar.regex("[0-9]+"))
    with pytest.raises(InvalidParameter):
        model.check_grammar(Grammar.regex("("))


def test_a_snapshot_does_not_change(loaded: LoadedEngine, engine: FakeAsyncEngine) -> None:
    metrics = engine.model.metrics
    metrics.links = {"disk": Traffic(5, 0.5)}
    before = loaded.snapshot()
    copy = deepcopy(before.stats)
    metrics.record(StepStats(0.5, 3, 2, 1, 7, 0.25))
    metrics.links["disk"].num_bytes += 1
    assert before.stats == copy
    after = loaded.snapshot().stats
    assert (after.num_steps, after.links["disk"].num_bytes) == (1, 6) and after.time_s >= copy.time_s
