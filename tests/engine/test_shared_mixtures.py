"""Mixtures on two lanes: a card and the processor share the products of dense layers, and the experts. And
models of which a part can't be shared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from pretended_card import PretendedCard, engines, missing
from test_shared_experts import NUM_EXPERTS, counted_crossings
from tiny_models import build

from penstock.engine import Completion, Engine
from penstock.kernels.shared.shared_experts import SharedExperts
from penstock.kernels.shared.shared_kernels import SharedKernels
from penstock.kernels.shared.split_matrix import SplitMatrix
from penstock.memory.hardware import DeviceProfile, HardwareProfile, capacities
from penstock.memory.planning import expert_plan
from penstock.memory.planning import plan as plans
from penstock.weights.layer_weights import LayerWeights

GIB = 1 << 30
pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
#: Of a model, the matrices of a layer that stay whole on the card.
WHOLE = {"DeepSeek V3": {"kv_b"}, "MiniCPM3": {"kv_b"}}


def machine(processor_gops: float = 1000.0) -> HardwareProfile:
    """A link so slow, beside this processor, that all lanes have something to do."""
    card = DeviceProfile("a card", (6, 1), 6 * GIB, 6 * GIB, 100.0, 0.01, 1000.0, GIB, crossing_s=1e-6)
    return replace(capacities(), memory_read_gbps=40.0, int8_gops=processor_gops, device=card)


def load(folder: Path, device_bytes: int | None = None, **config: object) -> Engine:
    """With a share of each layer on the card."""
    config = {"num_resident_layers": 1, "device_memory_bytes": device_bytes} | config
    # What sharing takes beside experts is more than all experts of a model so small.
    with (
        patch.object(expert_plan, "activation_bytes", lambda size: 0),
        patch.object(plans, "HANDOVER_BYTES", 0),
    ):
        return engines.load(folder, hardware=machine(), **config)


def split_names(engine: Engine) -> set[str]:
    """The matrices of layers that lie in two places or more."""
    views = engine.model.streamer._views.values()
    return {name for each in views for name, matrix in each.items() if isinstance(matrix, SplitMatrix)}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folders = [tmp_path_factory.mktemp(name) for name in ("unconverted", "converted")]
    sizes = {"num_experts": NUM_EXPERTS // 2, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
    build("Qwen3-MoE", folders[0], **sizes)
    engines.convert_for_streaming(*folders)
    return folders[1]


def answers(engine: Engine) -> list[Completion]:
    """Of steps of several tokens, and of one."""
    return engine.generate(engines.PROMPTS[:2], engines.PARAMS) + engine.generate([[11, 2]], engines.PARAMS)


@pytest.mark.slow
@pytest.mark.parametrize(("num_on_card", "weights"), [(4, "int8"), (20, "int8"), (4, "planes")])
def test_both_kinds_of_sharing_at_once(
    num_on_card: int, weights: str, mixture: Path, card: PretendedCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of the card alone, with dense layers in two places and experts in two memories. All that the
    processor computes crosses by flags."""
    crossed, handed = counted_crossings(monkeypatch)
    with load(mixture, share_products="off") as alone:
        plan = alone.plan
        expected = alone.generate(engines.PROMPTS, engines.PARAMS)
    room = plan.device_used_bytes - (NUM_EXPERTS - num_on_card) * plan.expert_slot_bytes
    engine = load(mixture, room, weights=weights)
    assert engine.plan.kept_share == 1 / 3 and engine.plan.shares_experts
    assert engine.plan.num_expert_slots < NUM_EXPERTS
    kernels = engine.model.executor.family.kernels
    assert isinstance(kernels, SharedKernels) and isinstance(kernels.experts, SharedExperts)
    with engine:
        assert engine.generate(engines.PROMPTS, engines.PARAMS) == expected
    num_asked, _, _, num_in_ram = engine.model.streamer.tiers.expert_counts
    assert handed and crossed == [True] * (kernels.num_shared + len(handed))
    assert kernels.num_shared > 0 and 0 < num_in_ram == kernels.experts.num_in_ram < num_asked
    assert "router" not in split_names(engine)
    for note in ("share each product", "experts that lie in RAM"):
        assert any(note in each for each in engine.plan.notes)
    del engine, kernels, alone
    engines.forget_orders()
    assert not card.races.found
    assert card.driver.num_registered == card.memory.used_bytes == 0


@pytest.mark.inner
@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("Qwen2-MoE", "int8"), ("DeepSeek V3", "int8"), ("gpt-oss", "int8"), ("MiniCPM3", "int8"),
        ("DeepSeek V3", "planes"),
    ],
)  # fmt: skip
def test_models_of_which_products_are_shared(
    name: str, weights: str, tmp_path: Path, card: PretendedCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared experts, latents and biases. All experts stay on the card."""
    build(name, tmp_path)
    with load(tmp_path, share_products="off") as alone:
        expected = answers(alone)
    engine = load(tmp_path, weights=weights)
    assert engine.plan.kept_share is not None
    names, views = set[str](), LayerWeights.with_matrices

    def watched(self: LayerWeights, matrices: dict[str, SplitMatrix]) -> LayerWeights:
        names.update(name for name, matrix in matrices.items() if isinstance(matrix, SplitMatrix))
        return views(self, matrices)

    monkeypatch.setattr(LayerWeights, "with_matrices", watched)
    with engine:
        assert answers(engine) == expected
    matrices = {each.name for layer in engine.model.store.tensors.layers for each in layer if each.is_matrix}
    assert names == matrices - WHOLE.get(name, set()) and "o" in names
