"""Experts on two lanes: an expert that lies in RAM is computed there, beside a card, and no bit tells where
it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from pretended_card import PretendedCard, engines, missing
from pretended_card.streams import Stream
from test_shared_products import FORMATS, ThreadHandover, random_matrix
from tiny_models import build
from torch import Tensor

from penstock.config import EngineConfig
from penstock.engine import Completion, Engine
from penstock.errors import ComputationError, StepFailed
from penstock.kernels import GatedExpert, choose_kernels
from penstock.kernels.cpu import NativeKernels
from penstock.kernels.operands import ClampedGate, GatedFunction
from penstock.kernels.shared.crossing import Crossing
from penstock.kernels.shared.shared_experts import Product, SharedExperts
from penstock.kernels.shared.shared_kernels import SharedKernels
from penstock.kernels.shared.split_matrix import SplitMatrix
from penstock.memory.cuda_handover import CudaHandover
from penstock.memory.hardware import DeviceProfile, DiskProfile, HardwareProfile, capacities
from penstock.memory.planning import expert_plan
from penstock.memory.planning import plan as plans
from penstock.memory.planning.expert_lanes import Choice, ExpertLoad, ExpertRates
from penstock.memory.planning.plan import MemoryPlan
from penstock.weights.tiers.demand_tier import Group
from penstock.weights.tiers.experts_in_ram import ExpertsInRam

GIB = 1 << 30
needs_card = pytest.mark.skipif(missing() is not None, reason=str(missing()))


# The kernels.


class InPieces(ThreadHandover):
    """Brings rows in pieces, as a handover with a small buffer."""

    def begin(self, x: Tensor, out_features: int, compute: Callable[[Tensor], Tensor], *_: object) -> Tensor:
        whole = super().begin
        return whole(x, out_features, lambda rows: torch.cat([compute(piece) for piece in rows.split(3)]))


@pytest.mark.parametrize("function", ["silu", ClampedGate(1.702, 7.0)])
@pytest.mark.parametrize("name", ["INT8", "INT4, groups of 32", "table of 16"])
def test_an_expert_is_the_same_wherever_it_lies(name: str, function: GatedFunction) -> None:
    """With every set of experts in RAM, and the groups in which they come then."""
    torch.manual_seed(0)
    experts = [
        GatedExpert(
            random_matrix(FORMATS[name], (128, 64)), random_matrix(FORMATS[name], (64, 64)),
            torch.randn(128), torch.randn(64),
        )
        for _ in range(3)
    ]  # fmt: skip
    spans, x, tokens = [(0, 4), (4, 5), (5, 12)], torch.randn(6, 64), torch.randint(6, (12,))
    rows, scores = torch.randperm(12).view(6, 2), torch.rand(6, 2)
    kernels = choose_kernels(EngineConfig())
    expected = torch.empty(12, 64)
    given = [(expert, *span) for expert, span in zip(experts, spans, strict=True)]
    for each in given:
        kernels.experts.compute(x, tokens, [each], function, expected)
    for handover in (ThreadHandover(), InPieces()):
        shared = SharedKernels(kernels, choose_kernels(EngineConfig()), handover).experts
        for chosen in range(1 << len(experts)):
            in_ram = [in_ram_form(each) for place, each in enumerate(given) if chosen >> place & 1]
            on_card = [each for place, each in enumerate(given) if not chosen >> place & 1]
            for groups in ([on_card], [[each] for each in on_card]):
                y = torch.full((12, 64), float("nan"))
                for group in [in_ram, *groups, []]:
                    shared.compute(x, tokens, group, function, y)
                assert torch.equal(shared.add(y, rows, scores), kernels.experts.add(expected, rows, scores))


def in_ram_form(given: tuple[GatedExpert, int, int]) -> tuple[GatedExpert, int, int]:
    expert, first, end = given
    matrices = SplitMatrix((), expert.gate_up), SplitMatrix((), expert.down)
    return GatedExpert(*matrices, expert.gate_up_bias, expert.down_bias), first, end


# Whole engines on a pretended card.

#: Of two layers; the third one has none.
NUM_EXPERTS = 32
PLANS: dict[object, MemoryPlan] = {}


@pytest.fixture(scope="module")
def unconverted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unconverted")
    build("Qwen3-MoE", folder, num_experts=NUM_EXPERTS // 2, num_experts_per_tok=4, moe_intermediate_size=64)
    return folder


@pytest.fixture(scope="module")
def checkpoint(unconverted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    engines.convert_for_streaming(unconverted, folder)
    return folder


def machine(link_gbps: float = 0.03, disk: DiskProfile | None = None) -> HardwareProfile:
    """A link so slow, beside this processor, that both have something to do."""
    card = DeviceProfile("a card", (6, 1), 6 * GIB, 6 * GIB, 100.0, link_gbps, 1000.0, GIB)
    return replace(capacities(), memory_read_gbps=40.0, int8_gops=1000.0, device=card, disk=disk)


def whole_plan(folder: Path, **config: object) -> MemoryPlan:
    """With room for all experts everywhere."""
    key = folder, str(config)
    if key not in PLANS:
        with engines.load(folder, hardware=machine(), **config | {"share_products": "off"}) as whole:
            PLANS[key] = whole.plan
    return PLANS[key]


def load(
    folder: Path,
    num_on_card: int,
    num_in_ram: int = NUM_EXPERTS,
    link_gbps: float = 0.03,
    disk: DiskProfile | None = None,
    **config: object,
) -> Engine:
    """An engine with slots for so many experts on the card and in RAM."""
    plan = whole_plan(folder, **config)
    assert plan.num_expert_slots == plan.num_host_expert_slots == NUM_EXPERTS
    budgets = {
        "device_memory_bytes": plan.device_used_bytes - (NUM_EXPERTS - num_on_card) * plan.expert_slot_bytes,
        "host_memory_bytes": plan.host_used_bytes - (NUM_EXPERTS - num_in_ram) * plan.expert_slot_bytes,
    }
    # What sharing takes beside experts is more than all experts of a model so small.
    with (
        patch.object(expert_plan, "activation_bytes", lambda size: 0),
        patch.object(plans, "HANDOVER_BYTES", 0),
    ):
        engine = engines.load(folder, hardware=machine(link_gbps, disk), **(budgets | config))
    assert (engine.plan.num_expert_slots, engine.plan.num_host_expert_slots) == (num_on_card, num_in_ram)
    return engine


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[Completion]:
    """Of the card alone, with all experts in its memory."""
    with engines.card_with_kernels():
        return answers(engines.load(checkpoint, share_products="off"))


def answers(engine: Engine) -> list[Completion]:
    """Of steps of 40 tokens and of one. And close."""
    with engine:
        found = engine.generate(engines.PROMPTS, replace(engines.PARAMS, max_tokens=4))
        return found + engine.generate([[11, 2]], replace(engines.PARAMS, max_tokens=12))


def is_watched(patch: pytest.MonkeyPatch, card: PretendedCard) -> None:
    """Experts on two lanes may not make the thread that launches wait for the card."""
    for name in ("compute", "add"):
        method = getattr(SharedExperts, name)

        def watched(*args: object, method: Callable[..., object] = method) -> object:
            before = len(card.host_waits)
            result = method(*args)
            assert len(card.host_waits) == before
            return result

        patch.setattr(SharedExperts, name, watched)


def counted_crossings(patch: pytest.MonkeyPatch) -> tuple[list[bool], list[int]]:
    """Whether products have crossed by flags, one after the other; and the number of products of each call
    that hands experts over."""
    crossed, handed = list[bool](), list[int]()
    begin, hand_over = Crossing.begin, SharedExperts._hand_over

    def counted(self: SharedExperts, rows: Tensor, products: list[Product]) -> Tensor:
        handed.append(len(products))
        return hand_over(self, rows, products)

    patch.setattr(Crossing, "begin", lambda *args: crossed.append(begin(*args)) or crossed[-1])
    patch.setattr(SharedExperts, "_hand_over", counted)
    return crossed, handed


@needs_card
@pytest.mark.parametrize("by_flags", [True, False])
@pytest.mark.parametrize(("num_on_card", "num_in_ram"), [(4, 32), (12, 32), (4, 20), (2, 6)])
def test_answers_are_those_of_the_card_alone(
    num_on_card: int,
    num_in_ram: int,
    by_flags: bool,
    checkpoint: Path,
    expected: list[Completion],
    card: PretendedCard,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the last bit of each log-probability, although experts are computed here and there, move, and give
    their places up. All cross by flags where the card's streams write and wait for values."""
    card.driver.fake_stream_values(by_flags)
    is_watched(monkeypatch, card)
    crossed, handed = counted_crossings(monkeypatch)
    engine = load(checkpoint, num_on_card, num_in_ram)
    assert answers(engine) == expected and engine.plan.shares_experts
    num_asked, num_moved, num_from_disk, num_in_place = engine.model.streamer.tiers.expert_counts
    assert num_in_place > 0.1 * num_asked and num_moved > 0 and num_from_disk > 0
    kernels = engine.model.executor.family.kernels
    assert isinstance(kernels.experts, SharedExperts) and kernels.experts.num_in_ram == num_in_place
    assert sum(handed) == 2 * num_in_place and max(handed) > 1
    assert crossed == [True] * (len(handed) if by_flags else 0)
    del engine, kernels
    engines.forget_orders()
    assert not card.races.found
    assert card.driver.num_registered == card.memory.used_bytes == 0


@pytest.mark.inner
@needs_card
@pytest.mark.parametrize("num_moved", ["none", "all"])
def test_answers_of_either_lane(
    num_moved: str, checkpoint: Path, expected: list[Completion], card: PretendedCard
) -> None:
    """The processor computes every expert that was in RAM and is not to stay on the card, or none."""

    def chosen(
        self: ExpertRates, experts: Sequence[ExpertLoad], card_s: float, coming: Sequence[ExpertLoad]
    ) -> Choice:
        return Choice(0 if num_moved == "none" else len(experts), False)

    engine = load(checkpoint, 3)
    with patch.object(ExpertRates, "choose", chosen):
        assert answers(engine) == expected
    num_asked, _, _, num_in_place = engine.model.streamer.tiers.expert_counts
    assert num_in_place > 0.5 * num_asked if num_moved == "none" else num_in_place == 0


#: A disk so fast, beside the link, that experts which come from there stay in RAM.
DISK = DiskProfile(1.0, 1 << 16, 2, False)


def counted_coming(patch: pytest.MonkeyPatch) -> list[int]:
    """How many experts come from the disk and stay in RAM, layer by layer."""
    counts, arriving = list[int](), ExpertsInRam.arriving

    def counted(self: ExpertsInRam, coming: Group) -> Iterator[Group]:
        counts.append(len(coming))
        return arriving(self, coming)

    patch.setattr(ExpertsInRam, "arriving", counted)
    return counts


@pytest.mark.slow
@needs_card
@pytest.mark.parametrize(("num_on_card", "num_in_ram"), [(4, 20), (2, 6)])
def test_experts_from_the_disk_are_computed_in_ram(
    num_on_card: int,
    num_in_ram: int,
    checkpoint: Path,
    expected: list[Completion],
    card: PretendedCard,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the bits of the card alone."""
    is_watched(monkeypatch, card)
    counts = counted_coming(monkeypatch)
    crossed, handed = counted_crossings(monkeypatch)
    engine = load(checkpoint, num_on_card, num_in_ram, disk=DISK)
    assert answers(engine) == expected
    num_asked, num_moved, num_from_disk, num_in_place = engine.model.streamer.tiers.expert_counts
    assert 0 < sum(counts) <= min(num_from_disk, num_in_place) and num_moved + num_in_place < num_asked
    kernels = engine.model.executor.family.kernels
    assert isinstance(kernels.experts, SharedExperts) and kernels.experts.num_in_ram == num_in_place
    assert crossed == [True] * len(handed)
    del engine, kernels
    engines.forget_orders()
    assert not card.races.found
    assert card.driver.num_registered == card.memory.used_bytes == 0


@needs_card
def test_tokens_are_those_of_the_processor_alone(checkpoint: Path, card: PretendedCard) -> None:
    """Of its own lane, whose norms and activations round otherwise in the last bit."""
    alone = answers(engines.load(checkpoint, "cpu"))
    assert [each.token_ids for each in answers(load(checkpoint, 4))] == [each.token_ids for each in alone]


@needs_card
def test_codes_of_4_bits(unconverted: Path, card: PretendedCard) -> None:
    quantized: dict[str, object] = {"weights": "int4", "group_size": 32, "activations": "int8"}
    expected = answers(load(unconverted, 6, share_products="off", **quantized))
    engine = load(unconverted, 6, **quantized)
    assert answers(engine) == expected and engine.model.streamer.tiers.expert_counts[3] > 0


# Faults, each of which the tests above have to notice.


def crossing_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Crossing, "end", lambda self: self._results)


def join_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaHandover, "join", lambda self: None)


def work_does_not_wait_for_the_card(patch: pytest.MonkeyPatch) -> None:
    wait = Stream.wait_event
    patch.setattr(Stream, "wait_event", lambda self, event: wait(self, event) if self.is_default else None)


def results_are_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SharedExperts, "_go_on", lambda self, begun: setattr(self, "_begun", None))


@needs_card
@pytest.mark.parametrize(
    "fault",
    [crossing_does_not_wait, join_does_not_wait, work_does_not_wait_for_the_card, results_are_left_out],
)
def test_faults_are_caught(
    fault: Callable[[pytest.MonkeyPatch], None],
    checkpoint: Path,
    expected: list[Completion],
    card: PretendedCard,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By an error or a wrong answer."""
    card.driver.fake_stream_values(fault is not work_does_not_wait_for_the_card)
    fault(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, ComputationError)):
        assert answers(load(checkpoint, 4)) == expected


@needs_card
def test_an_error_of_the_processor_ends_the_step(
    checkpoint: Path, expected: list[Completion], card: PretendedCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step's requests alone. The next ones get their answers, and experts give their places up again."""
    card.driver.fake_stream_values(False)  # compiled calls don't fail
    with load(checkpoint, 4, 20) as engine:
        engine.generate(engines.PROMPTS, engines.PARAMS)
        linear = NativeKernels.linear

        def fail(*arguments: object) -> Tensor:
            raise MemoryError("no room for a product")

        monkeypatch.setattr(NativeKernels, "linear", fail)
        with pytest.raises(StepFailed, match="no room for a product"):
            engine.generate([list(range(2, 36))], engines.PARAMS)
        monkeypatch.setattr(NativeKernels, "linear", linear)
        assert answers(engine) == expected


@needs_card
def test_when_experts_are_shared(checkpoint: Path, card: PretendedCard) -> None:
    for num_on_card, config, shares in (
        (6, {}, True),
        (6, {"share_products": "off"}, False),
        (6, {"link_gbps": 100.0}, False),
        (NUM_EXPERTS, {}, False),
    ):
        with load(checkpoint, num_on_card, **config) as engine:
            assert engine.plan.shares_experts == shares, config
            assert any("experts that lie in RAM" in note for note in engine.plan.notes) == shares
