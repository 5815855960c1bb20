"""Heads of multi-token prediction: they compute what the formula says, and answers stay the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_folders import PlainHead, save_with_head
from test_drafts import ASKED_PARAMS, ASKED_PROMPTS, check_all_is_free
from test_draft_model import flat_s
from test_engine import exact
from torch import Tensor

from penstock.config import EngineConfig
from penstock.drafters.mtp_drafter import MAX_WAITING, MTPDrafter
from penstock.engine import Completion, Engine
from penstock.errors import CapacityError, ConfigError
from penstock.generation.drafting.speculation import Speculation
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.scheduling.batch import Batch

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=["DeepSeek V3", "GLM-4.5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PlainHead]:
    path = tmp_path_factory.mktemp("head")
    return path, save_with_head(request.param, path)


@pytest.fixture(scope="module")
def undrafted(folder: tuple[Path, PlainHead]) -> list[Completion]:
    with Engine.load(folder[0], EngineConfig(enable_prefix_caching=False, speculation="off")) as engine:
        assert engine.draft_model is None
        return engine.generate(ASKED_PROMPTS, ASKED_PARAMS)


def with_head(folder: Path, **config: Any) -> Engine:
    engine = Engine.load(folder, EngineConfig(mtp="on", **config))
    assert isinstance(engine.draft_model, MTPDrafter)
    engine.scheduler._drafter = Speculation(flat_s, engine.draft_model)
    return engine


def head_of(engine: Engine) -> MTPDrafter:
    assert isinstance(engine.draft_model, MTPDrafter)
    return engine.draft_model


class Heard(list[tuple[list[int], int, int, Tensor]]):
    """What a head computes: texts that end in guesses, how many guesses, the first row's place, logits."""

    def __init__(self, head: MTPDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        candidates = head._sampler.candidates

        def record(logits: Iterator[Tensor], batch: Batch, count: int) -> list[list[tuple[int, float]]]:
            rows = list(logits)
            for item, row in zip(batch.scheduled, torch.cat(rows), strict=True):
                twin = head._twins[item.sequence.sequence_id]
                sequence = twin.sequence()
                assert sequence is not None
                num_guesses = item.sequence.num_tokens - sequence.num_tokens
                self.append((list(item.sequence.token_ids), num_guesses, twin.first, row.clone()))
            return candidates(rows, batch, count)

        monkeypatch.setattr(head._sampler, "candidates", record)


def test_a_head_computes_its_formula(
    folder: tuple[Path, PlainHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each place, behind guesses too, and where the head's rows begin amid a text."""
    path, plain = folder
    prompts = [[5, 9, 20] * 5, [7, 8, 30 + 1] * 9]
    with with_head(path, kv_dtype="float32") as engine:
        heard = Heard(head_of(engine), monkeypatch)
        engine.generate(prompts, PARAMS)
        engine.generate([prompts[1] + [5] * 10], PARAMS)  # of which the cache has a part
        assert {num for _, num, _, _ in heard} >= {0, 1, 2} and {first for _, _, first, _ in heard} > {1}
        for text, num_guesses, first, row in heard:
            expected = plain.logits(text, num_guesses, first)
            assert (row - expected).abs().max() <= 2e-3 * (expected.max() - expected.min())


CASES: dict[str, dict[str, Any]] = {
    "together": {},
    "chunked prompts beside": {"max_num_batched_tokens": 40},
    "two at a time": {"max_num_seqs": 2},
    "streamed": {"num_resident_layers": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_without_a_head(
    case: str, folder: tuple[Path, PlainHead], undrafted: list[Completion]
) -> None:
    with with_head(folder[0], **CASES[case]) as engine:
        head = head_of(engine)
        for _ in range(2):
            assert exact(engine.generate(ASKED_PROMPTS, ASKED_PARAMS)) == exact(undrafted)
            check_all_is_free(engine)
        assert engine.metrics.draft_tokens
        head._take_in()
        head._forget()
        assert head._blocks.pool.num_free == head._blocks.num_blocks


def test_what_nobody_asks_for_takes_little_memory(folder: tuple[Path, PlainHead]) -> None:
    with with_head(folder[0]) as engine:
        engine.scheduler._drafter = Speculation(lambda num_tokens: 0.0)
        for number in range(9):
            engine.add(GenerationRequest([5, 9, number] * 30, PARAMS, str(number)))
        head = head_of(engine)
        for _ in range(5):
            engine.step()
            head._take_in()
            head._shrink()
            assert 0 < sum(len(twin.waiting) for twin in head._twins.values()) <= MAX_WAITING
