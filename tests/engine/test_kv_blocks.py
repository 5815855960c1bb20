"""How many blocks of keys and values are planned, in memory and on disk."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.config import EngineConfig, ShareMode
from penstock.errors import CapacityError, ConfigError
from penstock.memory.hardware import DeviceProfile, DiskProfile, HardwareProfile
from penstock.memory.planning.cost import StepPrediction, predict_step
from penstock.memory.planning.plan import HANDOVER_BYTES
from penstock.memory.planning.planner import plan_memory
from penstock.memory.planning.splits_in_ram import AttendsInRam, SpilledKeys
from penstock.memory.planning.step_work import StepLoad
from penstock.model.footprint import footprint
from penstock.model.known_shapes import find_shape
from penstock.model.registry import read_spec
from penstock.spec import ModelFootprint
from penstock.weights.store import planned_tensors

GIB = 1 << 30
MACHINE = HardwareProfile(2, 24 * GIB, 20 * GIB, 20.0, 1000.0, DiskProfile(2.0, 4 << 20, 4, True))
CONTEXT = 32768
#: Bytes of keys and values of a token: 48 layers of 8 heads of 128 float16 numbers, twice.
TOKEN_BYTES = 48 * 8 * 128 * 2 * 2
CONFIG = EngineConfig(host_memory_bytes=6 * GIB, max_model_len=CONTEXT, kv_spill="spill")


@pytest.fixture(scope="module")
def solar() -> ModelFootprint:
    """A model of 10.7 billion parameters, with a longer context."""
    shape = find_shape("solar-10.7b") | {"max_position_embeddings": CONTEXT}
    family, spec = read_spec(shape)
    return footprint(spec, planned_tensors(family.model_tensors(spec), shape, "int8", None))


def test_32768_tokens_in_6_gib(solar: ModelFootprint) -> None:
    """An eighth of the budget has keys and values, and two slots, each for a layer's blocks from disk. What
    is too little for another layer is theirs, too."""
    plan = plan_memory(solar, MACHINE, CONFIG)
    assert plan.num_kv_tokens == CONTEXT and plan.host_used_bytes <= 6 * GIB
    in_memory = CONTEXT - plan.num_spilled_tokens
    assert plan.kv_bytes == in_memory * TOKEN_BYTES + plan.num_spilled_tokens * TOKEN_BYTES // 24
    assert 0.7 * GIB < plan.kv_bytes < 0.75 * GIB + max(solar.layer_bytes)
    with pytest.raises(CapacityError, match="--kv-tokens"):
        plan_memory(solar, MACHINE, replace(CONFIG, kv_spill=None))


def test_a_step_reads_what_lies_on_disk(solar: ModelFootprint) -> None:
    plan = plan_memory(solar, MACHINE, CONFIG)
    spilled_bytes = plan.num_spilled_tokens * TOKEN_BYTES
    short, long = (
        predict_step(plan, solar, MACHINE, CONFIG, StepLoad(1, 1, spilled_bytes=each))
        for each in (0, spilled_bytes)
    )
    assert long.terms["disk"] - short.terms["disk"] == pytest.approx(spilled_bytes / 2e9)
    assert long.terms["memory"] - short.terms["memory"] == pytest.approx(2 * spilled_bytes / 20e9)
    assert (long.binding, long.floor_s) == ("disk", long.terms["disk"])


def test_keys_and_values_on_a_disk_of_their_own(solar: ModelFootprint) -> None:
    """Both disks are read at the same time."""
    slow = replace(MACHINE, spill_disk=DiskProfile(0.5, 4 << 20, 4, True))
    plan = plan_memory(solar, slow, CONFIG)
    spilled_bytes = plan.num_spilled_tokens * TOKEN_BYTES
    short, long = (
        predict_step(plan, solar, slow, CONFIG, StepLoad(1, 1, spilled_bytes=each))
        for each in (0, spilled_bytes)
    )
    assert long.terms["disk"] == short.terms["disk"] and "spill disk" not in short.terms
    assert long.terms["spill disk"] == pytest.approx(spilled_bytes / 0.5e9)
    assert (long.binding, long.floor_s) == ("spill disk", long.terms["spill disk"])


def test_sizes_that_the_config_gives(solar: ModelFootprint) -> None:
    given = plan_memory(solar, MACHINE, replace(CONFIG, num_kv_tokens=4096))
    assert given.num_spilled_tokens == CONTEXT - 4096
    limited = plan_memory(solar, MACHINE, replace(CONFIG, kv_cache_bytes=GIB))
    assert GIB - 2 * 16 * TOKEN_BYTES < limited.kv_bytes <= GIB and limited.num_kv_tokens == CONTEXT
    whole = plan_memory(solar, MACHINE, replace(CONFIG, host_memory_bytes=20 * GIB, max_model_len=4096))
    assert whole.num_spilled_tokens == 0


def test_the_folder_of_kv_disk_serves_a_context_that_was_asked_for(solar: ModelFootprint) -> None:
    disk = replace(CONFIG, kv_spill=None, kv_disk="kv")
    assert plan_memory(solar, MACHINE, disk).num_kv_tokens == CONTEXT
    assert plan_memory(solar, MACHINE, replace(disk, num_kv_tokens=2048)).num_spilled_tokens == CONTEXT - 2048
    small = replace(disk, max_model_len=1024)
    assert plan_memory(solar, MACHINE, small) == plan_memory(solar, MACHINE, replace(small, kv_disk=None))
    assert plan_memory(solar, MACHINE, replace(disk, max_model_len=None)).num_spilled_tokens == 0


def test_blocks_that_are_no_whole_pages(solar: ModelFootprint) -> None:
    """A latent of 576 float16 numbers: 16 tokens are 4.5 pages."""
    narrow = replace(solar, kv_part_bytes=(576 * 2,))
    with pytest.raises(ConfigError, match="pass --block-size 32"):
        plan_memory(narrow, MACHINE, CONFIG)
    assert plan_memory(narrow, MACHINE, replace(CONFIG, block_size=32)).num_spilled_blocks > 0
    disk = replace(CONFIG, kv_spill=None, kv_disk="kv")
    assert plan_memory(solar, MACHINE, disk).num_spilled_blocks > 0
    with pytest.raises(CapacityError):  # nobody has asked for blocks on disk
        plan_memory(narrow, MACHINE, disk)


#: A card of 6 GiB on PCIe 3.0.
CARD = DeviceProfile("card", (6, 1), 6 * GIB, 5632 << 20, 150.0, 12.0, 15000.0, 18 * GIB)
WITH_CARD = replace(MACHINE, device=CARD)
BESIDE = EngineConfig(max_model_len=CONTEXT, kv_spill_bytes=8 * GIB, share_products="off")
#: Bytes of a block in all layers.
BLOCK_BYTES = 16 * TOKEN_BYTES


def test_blocks_in_ram_beside_a_card(solar: ModelFootprint) -> None:
    """All that was asked for lies in RAM, and two layers' share of it passes through the card."""
    plan = plan_memory(solar, WITH_CARD, BESIDE)
    num_in_ram = 8 * GIB // BLOCK_BYTES
    assert plan.num_spilled_blocks == num_in_ram and plan.num_kv_tokens > CONTEXT
    assert plan.kv_spill_bytes == num_in_ram * BLOCK_BYTES
    resident = plan.num_kv_blocks - num_in_ram
    assert plan.kv_bytes == resident * BLOCK_BYTES + num_in_ram * (BLOCK_BYTES // 24)
    assert plan.device_used_bytes <= plan.device_budget_bytes
    assert plan.host_used_bytes <= plan.host_budget_bytes
    assert plan.layer_bytes("host") + plan.kv_spill_bytes <= CARD.pinnable_bytes
    assert any("in RAM (8.00 GiB, --kv-spill-memory" in note for note in plan.notes)
    without = plan_memory(solar, WITH_CARD, replace(BESIDE, kv_spill_bytes=None, max_model_len=4096))
    assert plan.host_used_bytes - plan.kv_spill_bytes - plan.layer_bytes("host") == (
        without.host_used_bytes - without.layer_bytes("host") + HANDOVER_BYTES
    ), "nothing else is counted, but the way to the processor, which attends to them"


def test_the_way_to_the_processor_is_counted_where_it_attends(solar: ModelFootprint) -> None:
    """Scores without biases, keys and values that are no latents, whole blocks in a split, kernels of our
    own, and a RAM that is faster than the link."""
    plan = plan_memory(solar, WITH_CARD, BESIDE)
    assert plan.attended_share == pytest.approx(1 - 12 / 20) and plan.has_handover
    note = "the processor attends to 40% of the keys and values in RAM where this is faster"
    assert any(note in each for each in plan.notes)
    slow = replace(WITH_CARD, memory_read_gbps=12.0)
    others = [
        plan_memory(solar, slow, BESIDE),
        plan_memory(solar, WITH_CARD, replace(BESIDE, kernels="torch")),
        plan_memory(solar, WITH_CARD, replace(BESIDE, block_size=48)),
        plan_memory(replace(solar, attended_heads=None), WITH_CARD, BESIDE),
        plan_memory(replace(solar, attended_heads=(16, 264)), WITH_CARD, BESIDE),
    ]
    for other in others:
        assert other.kv_spill_bytes and other.attends_in_ram is None and not other.has_handover
        assert not any("the processor attends" in note for note in other.notes)
        assert other.host_used_bytes - other.layer_bytes("host") == (
            plan.host_used_bytes - plan.layer_bytes("host") - HANDOVER_BYTES
        )


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("solar-10.7b", (32, 128)),
        ("falcon-7b", (71, 64)),
        ("bloom-7b1", None),
        ("mpt-7b", None),
        ("cpm-ant", None),
        ("deepseek-v2-lite", None),
    ],
)
def test_models_to_whose_keys_the_processor_can_attend(name: str, heads: tuple[int, int] | None) -> None:
    shape = find_shape(name)
    family, spec = read_spec(shape)
    size = footprint(spec, planned_tensors(family.model_tensors(spec), shape, "int8", None))
    assert size.attended_heads == heads


def test_no_more_blocks_in_ram_than_all_sequences_take(solar: ModelFootprint) -> None:
    one = replace(BESIDE, max_num_seqs=1, num_kv_tokens=4096)
    plan = plan_memory(solar, WITH_CARD, one)
    assert plan.num_kv_tokens == CONTEXT and plan.num_spilled_tokens == CONTEXT - 4096
    assert plan.kv_spill_bytes == plan.num_spilled_tokens * TOKEN_BYTES
    limited = plan_memory(solar, WITH_CARD, replace(BESIDE, kv_cache_bytes=GIB))
    assert (
        GIB - BLOCK_BYTES < limited.kv_bytes <= GIB
        and limited.num_spilled_tokens == plan_memory(solar, WITH_CARD, BESIDE).num_spilled_tokens
    )
    half = plan_memory(solar, WITH_CARD, replace(BESIDE, kv_spill_bytes=4 * GIB))
    assert half.num_kv_tokens >= CONTEXT, "the card has the rest of a context that was asked for"
    with pytest.raises(CapacityError, match="--kv-spill-memory"):
        plan_memory(solar, WITH_CARD, replace(BESIDE, kv_spill_bytes=19 * GIB))
    with pytest.raises(ConfigError, match="one block"):
        plan_memory(solar, WITH_CARD, replace(BESIDE, kv_spill_bytes=BLOCK_BYTES - 1))


@pytest.mark.parametrize("shared", ["off", "auto"])
def test_a_step_copies_what_lies_in_ram(shared: ShareMode, solar: ModelFootprint) -> None:
    """The link brings it, beside the weights, and the disk has no part in it."""
    card = replace(CARD, total_bytes=12 * GIB, free_bytes=9 * GIB)
    config = replace(BESIDE, share_products=shared, kv_spill_bytes=4 * GIB, num_kv_tokens=4096)
    machine = replace(WITH_CARD, device=card, disk=None)
    plan = plan_memory(solar, machine, config)
    assert (plan.kept_share is not None) == (shared == "auto")
    short, long = (
        predict_step(plan, solar, machine, config, StepLoad(1, 1, spilled_bytes=each)) for each in (0, GIB)
    )
    assert long.terms["host to device"] - short.terms["host to device"] == pytest.approx(GIB / 12e9)
    assert long.terms["host memory"] - short.terms["host memory"] == pytest.approx(GIB / 20e9)
    assert "disk" not in long.terms and "spill disk" not in long.terms
    assert long.seconds - short.seconds >= 0.9 * GIB / 12e9


@pytest.mark.parametrize("shared", ["off", "auto"])
def test_a_step_whose_keys_the_processor_shares(shared: ShareMode, solar: ModelFootprint) -> None:
    """Processor and link end together, and a layer's attention ends before its next product begins; in steps
    of many tokens, the link brings all."""
    card = replace(CARD, total_bytes=12 * GIB, free_bytes=9 * GIB, crossing_s=20e-6)
    config = replace(BESIDE, share_products=shared, kv_spill_bytes=4 * GIB, num_kv_tokens=4096)
    machine = replace(WITH_CARD, device=card, disk=None)
    plan = plan_memory(solar, machine, config)
    keys = SpilledKeys.of_one(20000, CONTEXT, TOKEN_BYTES, plan.attends_in_ram)
    moved, attended = keys.parts(1)
    assert moved + attended == 20000 * TOKEN_BYTES
    assert attended == round(0.4 * (20000 // 256)) * 256 * TOKEN_BYTES

    def predict(num_tokens: int, *parts: int) -> StepPrediction:
        return predict_step(plan, solar, machine, config, StepLoad(num_tokens, 1, 0, None, *parts))

    without, alone, together = predict(1), predict(1, moved + attended), predict(1, moved, attended)
    for name, num_bytes, gbps in (
        ("host to device", moved, 12),
        ("processor", attended, 20),
        ("host memory", moved + attended, 20),
    ):
        more_s = together.terms[name] - without.terms.get(name, 0.0)
        assert more_s == pytest.approx(num_bytes / gbps / 1e9), name
    attended_s = (moved + attended) / 20e9 + 48 * 20e-6
    if shared == "auto":
        assert together.seconds - without.seconds == pytest.approx(attended_s, rel=1e-3)
    assert without.seconds < together.seconds < alone.seconds
    assert keys.parts(512) == (moved + attended, 0)


def test_a_step_that_waits_for_the_processors_attention(solar: ModelFootprint) -> None:
    """All layers are on the card: their products come before and behind each attention."""
    card = replace(CARD, total_bytes=24 * GIB, free_bytes=22 * GIB, crossing_s=20e-6)
    config = replace(BESIDE, num_kv_tokens=4096)
    machine = replace(WITH_CARD, device=card)
    plan = plan_memory(solar, machine, config)
    without, long = (
        predict_step(plan, solar, machine, config, StepLoad(1, 1, 0, None, *parts))
        for parts in ((0, 0), (GIB, GIB))
    )
    assert not plan.streamed_bytes and "experts" not in long.terms
    assert long.seconds - without.seconds == pytest.approx(2 * GIB / 20e9 + 48 * 20e-6)


def test_few_keys_in_ram_come_over_the_link(solar: ModelFootprint) -> None:
    """They come while the card computes products, and attention would make the next product wait. With more
    tokens, a step takes no less."""
    card = replace(CARD, total_bytes=24 * GIB, free_bytes=22 * GIB, crossing_s=20e-6)
    config = replace(BESIDE, num_kv_tokens=4096)
    machine = replace(WITH_CARD, device=card)
    plan = plan_memory(solar, machine, config)
    attends = plan.attends_in_ram
    assert attends is not None and 4000 < attends.least_splits * 256 < 20000

    def step_s(num_in_ram: int, attends: AttendsInRam | None, num_tokens: int = 1) -> float:
        keys = SpilledKeys.of_one(num_in_ram, num_in_ram, TOKEN_BYTES, attends)
        parts = keys.parts(num_tokens)
        return predict_step(plan, solar, machine, config, StepLoad(num_tokens, 1, 0, None, *parts)).seconds

    always, least = attends._replace(least_splits=1), attends.least_splits * 256
    assert step_s(4000, always) > step_s(4000, None) == step_s(4000, attends)
    assert step_s(least - 256, attends) == step_s(least - 256, None)
    assert step_s(least, attends) == step_s(least, always) <= 0.95 * step_s(least, None)
    for num_in_ram in (1000, 4000, least, 20000):
        steps = [step_s(num_in_ram, attends, num_tokens) for num_tokens in range(1, 17)]
        assert steps == sorted(steps), num_in_ram


def test_a_processor_that_makes_no_step_faster_has_no_share(solar: ModelFootprint) -> None:
    """Nor is its share told, and the way to it takes no memory."""
    card = replace(CARD, total_bytes=24 * GIB, free_bytes=22 * GIB, crossing_s=20e-6)
    config = replace(BESIDE, num_kv_tokens=4096)
    with_share, without = (
        plan_memory(solar, replace(WITH_CARD, device=replace(card, crossing_s=crossing_s)), config)
        for crossing_s in (20e-6, 1.0)
    )
    assert with_share.attended_share > 0 and with_share.has_handover
    assert without.num_spilled_tokens and without.attended_share == 0 and not without.has_handover
    assert without.host_used_bytes == with_share.host_used_bytes - HANDOVER_BYTES
    assert not any("the processor attends" in note for note in without.notes)
