"""Matrices in planes whose products a card and the processor share: both planes are split at the same
channels, or the card keeps all upper ones, which guess. The bits are those of INT8."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pretended_card import PretendedCard, engines, missing
from test_convert import store_of
from test_draft_model import flat_s
from test_encoder_decoder import build as build_encoder_decoder
from test_engine import exact
from test_shared_products import load
from test_two_lanes import GIB, MACHINE, planned, size_of
from tiny_models import build
from torch import Tensor

from penstock.config import EngineConfig
from penstock.engine import Completion, Engine
from penstock.generation.drafting.speculation import Speculation
from penstock.kernels.shared.shared_kernels import SharedKernels
from penstock.memory.hardware import HardwareProfile
from penstock.memory.planning.cost import predict_step
from penstock.memory.planning.shared_plan import split_footprint
from penstock.memory.planning.split_cost import split_work
from penstock.memory.planning.step_work import StepLoad
from penstock.model.footprint import footprint
from penstock.model.registry import open_model
from penstock.weights.conversion.convert import convert
from penstock.weights.split import sharing
from penstock.weights.split.row_split import split_rows

needs_card = pytest.mark.skipif(missing() is not None, reason=str(missing()))
#: Layers that stay (of 4), and which share of the rest is streamed in steps of one token and of more.
SPLITS = [(2, 0.0, 0.0), (2, 1.0, 0.5), (1, 0.25, 0.75), (3, 0.5, 1.0), (0, 0.75, 0.0)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    build("Llama, tied, biases", folder, num_hidden_layers=4)
    return folder


def force_shares(patch: pytest.MonkeyPatch, one: float, more: float) -> None:
    """Whatever rates make of it, a step of one token streams this share of the rest, and others that."""
    patch.setattr(sharing, "streamed_share", lambda *_: lambda n: one if n == 1 else more)


def guessing(engine: Engine) -> tuple[list[Completion], list[Tensor]]:
    """Answers with guesses of the upper planes, whatever they cost, and these planes; the engine is
    closed."""
    with engine:
        engine.scheduler._drafter = Speculation(flat_s, engine.draft_model)
        found = engine.generate(engines.PROMPTS, replace(engines.PARAMS, max_tokens=6))
        assert engine.metrics.draft_tokens
        return found, upper_planes(engine)


def small_machine(card_gib: int) -> HardwareProfile:
    """A GTX 1060 with so much memory, and its host."""
    assert MACHINE.device is not None
    num_bytes = card_gib * GIB
    return replace(MACHINE, device=replace(MACHINE.device, total_bytes=num_bytes, free_bytes=num_bytes))


def upper_planes(engine: Engine) -> list[Tensor]:
    """What guesses, as float32 matrices on the host."""
    return [
        matrix.map(lambda part: part.cpu()).dequantize()
        for weights in engine.streamer.upper_planes()
        for _, matrix in weights.items()
        if not isinstance(matrix, Tensor)
    ]


def check_shared(engine: Engine, keeps_upper: bool) -> None:
    kernels = engine.model.executor.family.kernels
    while not isinstance(kernels, SharedKernels):
        kernels = kernels._kernels  # type: ignore[attr-defined]
    assert kernels.num_shared and engine.plan.keeps_upper == keeps_upper
    assert engines.homes(engine) == {"device", "host"}


@pytest.mark.inner
@needs_card
@pytest.mark.parametrize("group_size", [None, 32])
@pytest.mark.parametrize("is_converted", [True, False])
def test_every_split_has_the_bits_of_int8(
    is_converted: bool,
    group_size: int | None,
    checkpoint: Path,
    tmp_path: Path,
    card: PretendedCard,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both planes of the first channels are kept, those of others streamed, or computed by the processor."""
    expected = engines.answer(load(checkpoint, share_products="off", group_size=group_size))
    folder, config = checkpoint, {"weights": "planes", "group_size": group_size}
    if is_converted:
        convert(store_of(checkpoint, group_size, "planes"), tmp_path / "planes")
        folder, config = tmp_path / "planes", {}
    for num_resident, one, more in SPLITS[: None if is_converted else 2]:
        force_shares(monkeypatch, one, more)
        engine = load(folder, num_resident_layers=num_resident, **config)
        assert engine.plan.kept_share == num_resident / 4
        assert engines.answer(engine) == expected, (num_resident, one, more)
        if min(one, more) < 1:
            check_shared(engine, keeps_upper=False)
    del engine
    assert not card.races.found
    assert card.driver.num_registered == card.memory.used_bytes == 0


@pytest.mark.slow
@needs_card
@pytest.mark.parametrize("group_size", [None, 32])
def test_upper_planes_guess_beside_shared_products(
    group_size: int | None, checkpoint: Path, card: PretendedCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay on the card, whose link brings lower planes alone, half of the bytes."""
    config = {"weights": "planes", "group_size": group_size, "max_model_len": 64}
    alone = load(checkpoint, share_products="off", draft_with_planes=True, **config)
    assert alone.plan.kept_share is None
    expected, planes = guessing(alone)
    splits = SPLITS[1:] + [(2, 1.0, 1.0)] if group_size is None else SPLITS[3:4]
    for num_resident, one, more in splits:
        num_resident = max(2, num_resident)  # of 8 planes 4: all upper ones
        force_shares(monkeypatch, one, more)
        engine = load(checkpoint, num_resident_layers=num_resident, draft_with_planes=True, **config)
        assert engine.plan.kept_share == (2 * num_resident - 4) / 4
        found, guessed = guessing(engine)
        assert exact(found) == exact(expected), (num_resident, one, more)
        assert len(guessed) == 16 and all(map(torch.equal, guessed, planes))
        num_sweeps, plan = engine.metrics.num_steps + 1, engine.plan  # and what is read ahead
        streamed = engine.metrics.links["host to device"].num_bytes - plan.layer_bytes("device")
        assert streamed <= max(one, more) * num_sweeps * plan.streamed_bytes / 2
        if min(one, more) < 1:
            check_shared(engine, keeps_upper=True)
    del engine, alone
    assert not card.races.found
    assert card.driver.num_registered == card.memory.used_bytes == 0


@pytest.mark.parametrize("keeps_upper", [False, True])
def test_the_plan_knows_the_bytes_of_the_split(keeps_upper: bool, checkpoint: Path) -> None:
    opened = open_model(checkpoint, group_size=32, weights="planes")
    size = footprint(opened.spec, opened.store.tensors)
    for share in (0.0, 0.25, 0.5):
        units = split_rows(opened.store.tensors, share, keeps_upper).dense_units
        told = split_footprint(size, share, keeps_upper)
        assert told.layer_bytes == tuple(unit.num_bytes for unit in units)
        assert told.num_layers == size.num_layers
    opened.store.close()


def test_plans() -> None:
    """SOLAR-10.7B on a card of 8 GiB. Planes that don't guess are shared as INT8 is. Beside upper planes that
    guess the link brings lower planes alone, and the processor reads both."""
    settings = EngineConfig(num_kv_tokens=4096)
    machine = small_machine(8)
    whole, size = size_of("solar-10.7b", "int8"), size_of("solar-10.7b", "planes")
    shared, streamed = planned(size, settings, machine)
    assert shared.kept_share == planned(whole, settings, machine)[0].kept_share and not shared.keeps_upper
    guessing, alone = planned(size, replace(settings, draft_with_planes=True), machine)
    assert guessing.keeps_upper and guessing.kept_share is not None
    assert shared.kept_share is not None and guessing.kept_share < shared.kept_share
    for plan in (shared, guessing):
        assert plan.device_used_bytes <= plan.device_budget_bytes
        assert plan.host_used_bytes <= plan.host_budget_bytes and not plan.at_home("disk")
    assert guessing.layer_bytes("device") == pytest.approx(shared.layer_bytes("device"), rel=0.02)
    (note,) = (note for note in guessing.notes if "share each product" in note)
    assert "all upper planes among it" in note
    for mine, theirs, least in ((shared, streamed, 2.4), (guessing, alone, 1.7)):
        steps = [predict_step(plan, size, machine, settings, StepLoad.decode(1)) for plan in (mine, theirs)]
        assert steps[0].floor_s <= steps[0].seconds and steps[1].seconds / steps[0].seconds > least
        apart = predict_step(mine, size, machine, settings, StepLoad(1, 1, is_alone=True))
        assert apart.processor_share == 0 and apart.seconds > steps[0].seconds
    work = split_work(guessing, size, machine, settings, 1)
    assert work is not None and work.step.link_share == pytest.approx(0.5, abs=0.001)
    assert work.step.kept_bytes + work.step.rest_bytes == pytest.approx(sum(size.layer_bytes), rel=1e-3)


def test_planes_beside_an_encoder_are_not_shared(tmp_path: Path) -> None:
    build_encoder_decoder("BART", tmp_path)
    opened = open_model(tmp_path, weights="planes")
    assert footprint(opened.spec, opened.store.tensors).matrices == ()
    opened.store.close()


def test_upper_planes_are_no_part_of_a_model_without_planes() -> None:
    size, settings = size_of("tinyllama-1.1b", "int8"), EngineConfig(num_kv_tokens=2048)
    shared, _ = planned(size, replace(settings, draft_with_planes=True), small_machine(1))
    assert shared.kept_share is not None and not shared.keeps_upper
