"""Which models' products a card and the processor share, beside those of ordinary decoders: encoder-decoders
without their encoders, models that pool, and recurrences."""

from __future__ import annotations

from pathlib import Path

import pytest
from pretended_card import PretendedCard, engines, missing
from test_encoder_decoder import build as build_encoder_decoder
from test_shared_products import load
from test_two_lanes import MACHINE, planned, size_of
from tiny_models import build

import embedding_models
from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.kernels.shared.shared_kernels import SharedKernels
from penstock.memory.planning.cost import predict_step
from penstock.memory.planning.step_work import StepLoad

needs_card = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def shared_products(engine: Engine) -> int:
    kernels = engine.model.executor.family.kernels
    assert isinstance(kernels, SharedKernels)
    return kernels.num_shared


@pytest.mark.slow
@needs_card
@pytest.mark.parametrize("name", ["CPM-2", "BART", "T5 v1.1"])
def test_an_encoder_stays_whole(name: str, tmp_path: Path, card: PretendedCard) -> None:
    """The decoder's products are shared, to the last bit; the encoder's layers come over the link as ever."""
    build_encoder_decoder(name, tmp_path)
    alone = load(tmp_path, num_resident_layers=1, share_products="off")
    assert alone.plan.kept_share is None
    expected = engines.answer(alone)
    engine = load(tmp_path, num_resident_layers=1)
    plan = engine.plan
    assert plan.kept_share == pytest.approx(1 / len([each for each in plan.step_layers if each.is_lower]))
    encoder = plan.layers[: plan.num_encoder_layers]
    assert encoder == alone.plan.layers[: plan.num_encoder_layers]
    assert {each.home for each in encoder} == {"host"}
    card.host_waits.clear()
    assert engines.answer(engine) == expected
    assert card.host_waits == ["a copy"] * engine.metrics.num_steps, "sharing makes nobody wait"
    assert shared_products(engine) > engine.metrics.num_steps
    del engine, alone
    assert not card.races.found
    assert card.driver.num_registered == card.memory.used_bytes == 0


def test_a_plan_of_an_encoder_decoder() -> None:
    """CPM-2 on a GTX 1060, where a quarter of the decoder has no place: a step is more than twice as fast,
    and a prompt's encoder, which the card computes alone, is no slower."""
    size, settings = size_of("cpm-2", "int8"), EngineConfig(num_kv_tokens=2048, max_num_seqs=8)
    shared, alone = planned(size, settings)
    assert shared.kept_share is not None and alone.kept_share is None
    assert shared.device_used_bytes <= shared.device_budget_bytes
    assert shared.host_used_bytes <= shared.host_budget_bytes and not shared.at_home("disk")
    assert sum(each.num_bytes for each in shared.layers) == pytest.approx(sum(size.layer_bytes), rel=1e-3)
    assert len(shared.layers) == len(alone.layers) + size.num_layers - size.num_encoder_layers
    (note,) = (note for note in shared.notes if "share each product" in note)
    assert "but for the encoder's" in note
    for num_encoded, gain in ((0, 2.0), (16, 1.1), (512, 0.95)):
        mine, theirs = (
            predict_step(plan, size, MACHINE, settings, StepLoad(1, 1, num_encoded))
            for plan in (shared, alone)
        )
        assert mine.floor_s <= mine.seconds and mine.num_encoded == num_encoded
        assert theirs.seconds / mine.seconds > gain, num_encoded


@needs_card
def test_vectors(tmp_path: Path, card: PretendedCard) -> None:
    """A BERT has one stack, which a text passes once."""
    embedding_models.save(tmp_path, "BertModel", num_hidden_layers=3)
    found = list[list[list[float]]]()
    for choice in ("off", "auto"):
        with load(tmp_path, num_resident_layers=1, share_products=choice) as engine:
            assert (engine.plan.kept_share is None) == (choice == "off")
            found.append(engine.pool(engines.PROMPTS))
            assert choice == "off" or shared_products(engine)
    assert found[0] == found[1]


@pytest.mark.slow
@needs_card
@pytest.mark.parametrize("name", ["Qwen3-Next", "Granite 4", "LFM2"])
def test_recurrences(name: str, tmp_path: Path, card: PretendedCard) -> None:
    """Projections of recurrences are products like others."""
    build(name, tmp_path)
    expected, shared = (
        load(tmp_path, num_resident_layers=1, share_products=choice) for choice in ("off", "auto")
    )
    assert expected.plan.kept_share is None and shared.plan.kept_share is not None
    assert shared.plan.state_bytes > 0
    assert engines.answer(shared) == engines.answer(expected)
    assert shared_products(shared)
