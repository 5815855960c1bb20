"""Heads of multi-token prediction: they compute what the formula says, and answers stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_folders import PlainHead, save_with_head
from test_draft_model import flat_s
from test_drafts import ASKED_PARAMS, ASKED_PROMPTS, check_all_is_free
from test_engine import exact
from torch import Tensor

from penstock.config import EngineConfig, WeightBits
from penstock.drafters.mtp_drafter import MAX_WAITING, MTPDrafter
from penstock.drafters.mtp_plan import PlannedMTP
from penstock.engine import Completion, Engine
from penstock.errors import CapacityError, ConfigError
from penstock.generation.drafting.speculation import Speculation
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.scheduling.batch import Batch
from penstock.memory.hardware import DiskProfile, HardwareProfile
from penstock.model.registry import open_model, open_mtp_head
from penstock.weights.conversion.convert import convert
from penstock.weights.conversion.manifest import verify
from penstock.weights.tensors import beside_shared

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
#: Hybrids: the model has recurrent states, and the head has attention alone.
QWENS = ("Qwen3-Next", "Qwen3.5", "Qwen3.5 MoE")


@pytest.fixture(scope="module", params=["DeepSeek V3", "GLM-4.5", *QWENS])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PlainHead]:
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


@pytest.mark.inner
def test_a_head_computes_its_formula(folder: tuple[Path, PlainHead], monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.inner
@pytest.mark.parametrize(
    ("folder", "case"),
    [
        *(("GLM-4.5", case) for case in CASES),
        ("DeepSeek V3", "streamed"),
        *((name, "chunked prompts beside") for name in QWENS),
    ],
    indirect=["folder"],
)
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


@pytest.mark.parametrize(
    ("name", "weights", "group_size"),
    [
        ("GLM-4.5", "int8", None), ("GLM-4.5", "int8", 32), ("GLM-4.5", "int4", 32),
        ("GLM-4.5", "planes", None), ("Qwen3.5 MoE", "int4", 32), ("Qwen3.5", "int8", None),
    ],
)  # fmt: skip
def test_a_converted_folder_keeps_the_head(
    name: str, weights: WeightBits, group_size: int | None, tmp_path: Path
) -> None:
    """Of the same INT8, one read for each unit, whatever the model's layers are kept in."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    sizes = {"linear_value_head_dim": 16, "head_dim": 32, "shared_expert_intermediate_size": 32}
    is_qwen = name.startswith("Qwen")
    save_with_head(name, source, moe_intermediate_size=64, **(sizes if is_qwen else {}))
    opened = open_model(source, group_size=group_size, weights=weights, keeps_mtp=True)
    convert(opened.store, target)
    opened.store.close()
    verify(target)
    heads = [open_mtp_head(source, group_size if weights == "int8" else None), open_mtp_head(target)]
    before, after = (head.store for head in heads if head is not None)
    for old, new in zip(before.tensors.groups, after.tensors.groups, strict=True):
        assert after.contiguous(beside_shared(new)) is not None
        ours, theirs = (
            store.read_resident(beside_shared(tensors)).map(lambda part: part.clone())
            for store, tensors in ((before, old), (after, new))
        )
        for (name, first), (_, second) in zip(ours.items(), theirs.items(), strict=True):
            same = [first, second] if isinstance(first, Tensor) else [first.qweight, second.qweight]
            assert torch.equal(*same), name
    for store in (before, after):
        store.close()
    with with_head(target) as engine:
        assert engine.generate([[5, 9, 20] * 5], PARAMS)
        assert engine.metrics.draft_tokens


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


MEASURED = HardwareProfile(2, 8 << 30, 8 << 30, 10.0, 500.0, DiskProfile(0.01, 1 << 20, 2, True))


@pytest.mark.parametrize("folder", ["DeepSeek V3", "GLM-4.5"], indirect=True)
def test_a_head_is_taken_where_it_should_pay(folder: tuple[Path, PlainHead]) -> None:
    """In memory it does. Where a step waits for experts, each guess would wait for more of them. Without
    measured rates there are no guesses."""
    with Engine.load(folder[0], EngineConfig(device="cpu"), hardware=MEASURED) as engine:
        assert isinstance(engine.draft_model, MTPDrafter)
        taken, budget = engine.draft_model.plan.host_used_bytes, engine.plan.host_budget_bytes
        engine.generate([[5, 9, 20] * 5], PARAMS)
        assert engine.metrics.draft_tokens
    with Engine.load(folder[0], EngineConfig(device="cpu", mtp="off"), hardware=MEASURED) as engine:
        assert engine.draft_model is None
        alone = engine.plan.host_budget_bytes
        assert alone - taken <= budget < alone
    assert PlannedMTP.find(folder[0], EngineConfig()) is None
    config = EngineConfig(device="cpu", num_kv_tokens=512, max_num_seqs=2, max_num_batched_tokens=16)
    with Engine.load(folder[0], replace(config, mtp="on"), hardware=MEASURED) as engine:
        assert engine.draft_model is not None
        least = engine.plan.host_used_bytes + engine.draft_model.plan.host_used_bytes
    for missing in (0, 100_000, 300_000):  # all experts stay, some of them, and there is no room at all
        config = replace(config, host_memory_bytes=least - missing)
        found = PlannedMTP.find(folder[0], config, hardware=MEASURED)
        assert (found is not None) == (missing == 0)
        if missing < 200_000:
            with Engine.load(folder[0], replace(config, mtp="on"), hardware=MEASURED) as engine:
                assert (engine.plan.num_expert_slots == 16) == (missing == 0)


def test_what_can_not_be_had_is_refused(tiny_llama: Path, folder: tuple[Path, PlainHead]) -> None:
    with pytest.raises(ConfigError, match="its files hold no head"):
        Engine.load(tiny_llama, EngineConfig(mtp="on"))
    with pytest.raises(CapacityError):
        Engine.load(folder[0], EngineConfig(mtp="on", host_memory_bytes=1 << 20))
    with pytest.raises(ConfigError, match="leave one of the two out"):
        EngineConfig(mtp="on", draft_model="other")
    with pytest.raises(ConfigError, match="--speculation off .* --mtp on"):
        EngineConfig(mtp="on", speculation="off")
