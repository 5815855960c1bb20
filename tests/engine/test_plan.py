"""The memory plan on invented machines and models."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import EngineConfig
from penstock.errors import CapacityError, ConfigError
from penstock.memory.hardware import DeviceProfile, DiskProfile, HardwareProfile
from penstock.memory.pages import PAGE
from penstock.memory.planning.cost import predict_step
from penstock.memory.planning.plan import MemoryPlan, resident_layers
from penstock.memory.planning.planner import GPU_SCRATCH_BYTES, NUM_STAGING_SLOTS, plan_memory
from penstock.memory.planning.step_work import StepLoad
from penstock.model.footprint import footprint
from penstock.model.known_shapes import find_shape
from penstock.model.registry import find_family
from penstock.spec import ModelFootprint, RopeSpec

GIB = 1 << 30
DISK = DiskProfile(2.0, 4 << 20, 4, True)
GTX_1060 = DeviceProfile("GTX 1060 6 GB", (6, 1), 6 * GIB, 6 * GIB, 192.0, 12.0, 17000.0, 12 * GIB)


def machine(free: int, device: DeviceProfile | None = None) -> HardwareProfile:
    return HardwareProfile(2, 2 * free, free, 40.0, 1500.0, DISK, device)


def shape(name: str) -> ModelFootprint:
    return sizes(find_shape(name))


def sizes(config: dict[str, Any]) -> ModelFootprint:
    family = find_family(config)
    spec = family.read_spec(config)
    return footprint(spec, family.model_tensors(spec))


footprints = st.builds(
    ModelFootprint,
    layer_bytes=st.lists(st.integers(1, 10**9), min_size=1, max_size=40).map(tuple),
    embedding_bytes=st.integers(1, 10**9),
    head_bytes=st.integers(1, 10**9),
    kv_bytes_per_token=st.integers(1, 10**6),
    layer_elements=st.integers(1, 10**11),
    head_elements=st.integers(1, 10**9),
    max_position_embeddings=st.integers(2, 10**5),
    hidden_size=st.integers(1, 10**4),
    widest_layer=st.integers(1, 10**5),
    vocab_size=st.integers(1, 10**5),
    num_encoder_layers=st.integers(0, 1),
    encoder_elements=st.integers(0, 10**10),
    ropes=st.lists(
        st.builds(
            RopeSpec, rotary_dim=st.integers(2, 256), short_length=st.integers(0, 10**5),
            scaling=st.sampled_from(["default", "longrope", "dynamic"]),
        ),
        max_size=2,
    ).map(tuple),
)  # fmt: skip
configs = st.fixed_dictionaries(
    {"max_num_seqs": st.integers(1, 64), "max_num_batched_tokens": st.integers(1, 512)},
    optional={"num_kv_tokens": st.integers(1, 10**4), "block_size": st.sampled_from([16, 32])},
)
devices = st.none() | st.builds(
    DeviceProfile,
    name=st.just("x"), compute_capability=st.just((6, 1)), total_bytes=st.just(10**12),
    free_bytes=st.integers(0, 10**11), memory_gbps=st.floats(1, 1000), host_to_device_gbps=st.floats(1, 50),
    int8_gops=st.floats(1, 10**5), pinnable_bytes=st.integers(0, 10**11),
)  # fmt: skip
machines = st.builds(machine, free=st.integers(0, 10**11), device=devices)


def planned(
    model: ModelFootprint, hardware: HardwareProfile, measured: int | None = None, **config: Any
) -> MemoryPlan | None:
    try:
        return plan_memory(model, hardware, EngineConfig(**config), measured)
    except CapacityError:
        return None


@given(num_layers=st.integers(1, 100), num_resident=st.integers(0, 120))
def test_streamed_layers_are_spread_evenly(num_layers: int, num_resident: int) -> None:
    resident = resident_layers(num_layers, num_resident)
    assert len(resident) == min(num_layers, num_resident)
    streamed = sorted(set(range(num_layers)) - resident)
    gaps = [
        b - a for a, b in zip(streamed, streamed[1:] + [s + num_layers for s in streamed[:1]], strict=True)
    ]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_none_means_all_layers() -> None:
    assert resident_layers(5, None) == {0, 1, 2, 3, 4}


@given(num_layers=st.integers(1, 60), num_resident=st.integers(0, 70), num_encoder=st.integers(0, 60))
def test_an_encoders_layers_stay_last(num_layers: int, num_resident: int, num_encoder: int) -> None:
    """A request sweeps them once, the decoder's layers once for each of its tokens."""
    num_encoder = min(num_encoder, num_layers)
    resident = resident_layers(num_layers, num_resident, num_encoder)
    decoder = {index for index in resident if index >= num_encoder}
    assert len(resident) == min(num_layers, num_resident)
    assert len(decoder) == min(num_resident, num_layers - num_encoder)


@given(model=footprints, hardware=machines, config=configs)
def test_never_over_a_budget_and_every_byte_is_counted(
    model: ModelFootprint, hardware: HardwareProfile, config: dict[str, Any]
) -> None:
    plan = planned(model, hardware, **config)
    if plan is None:
        return
    assert plan == planned(model, hardware, **config), "the same question has the same answer"
    assert plan.host_used_bytes <= plan.host_budget_bytes <= hardware.free_ram_bytes
    assert plan.device_used_bytes <= plan.device_budget_bytes
    assert [layer.num_bytes for layer in plan.layers] == [-(-b // PAGE) * PAGE for b in model.layer_bytes]
    home = "host" if hardware.device is None else "device"
    for layer in plan.layers:
        assert layer.is_resident == (layer.home == home)
    num_streamed = len(plan.layers) - len(plan.resident)
    assert plan.num_staging_slots == min(NUM_STAGING_SLOTS, num_streamed)
    # On their way to the card, all layers pass through the host that don't wait there.
    num_passing = sum(layer.home != "host" for layer in plan.layers)
    assert plan.num_host_slots == (min(NUM_STAGING_SLOTS, num_passing) if hardware.device else 0)
    assert plan.kv_bytes == plan.num_kv_blocks * plan.block_size * model.kv_bytes_per_token
    if "num_kv_tokens" in config:
        assert 0 <= plan.num_kv_tokens - config["num_kv_tokens"] < plan.block_size


@given(model=footprints, hardware=machines, config=configs, more=st.integers(0, 10**10))
def test_more_memory_never_hurts(
    model: ModelFootprint, hardware: HardwareProfile, config: dict[str, Any], more: int
) -> None:
    config = {"num_kv_tokens": 100} | config
    less = planned(model, hardware, **config)
    larger = replace(hardware, free_ram_bytes=hardware.free_ram_bytes + more)
    if hardware.device is not None:
        free = hardware.device.free_bytes + more
        larger = replace(larger, device=replace(hardware.device, free_bytes=free))
    plan = planned(model, larger, **config)
    if less is None:
        return
    assert plan is not None and len(plan.resident) >= len(less.resident)
    steps = [predict_step(p, model, larger, EngineConfig(**config), StepLoad.decode(1)) for p in (plan, less)]
    assert steps[0].seconds <= steps[1].seconds * (1 + 1e-9)


@given(model=footprints, hardware=machines, config=configs)
def test_the_least_that_would_work_works_and_less_does_not(
    model: ModelFootprint, hardware: HardwareProfile, config: dict[str, Any]
) -> None:
    name = "host" if hardware.device is None else "device"
    setting = f"{name}_memory_bytes"
    with pytest.raises(CapacityError) as caught:
        plan_memory(model, hardware, EngineConfig(**config, **{setting: 1}))
    found = re.search(r"needs at least \S+ [GMK]iB \((\d+) bytes\) of (\w+) memory", str(caught.value))
    assert found and found[2] == name
    least = int(found[1])
    enough = {"host_memory_bytes": 10**14, setting: least}
    larger = hardware
    if hardware.device is not None:
        larger = replace(hardware, device=replace(hardware.device, pinnable_bytes=10**14))
    plan_memory(model, larger, EngineConfig(**config, **enough))
    with pytest.raises(CapacityError):
        plan_memory(model, larger, EngineConfig(**config, **enough | {setting: least - 1}))


@given(model=footprints, config=configs, gpu=devices.filter(bool))
def test_both_budgets_that_the_messages_ask_for_suffice(
    model: ModelFootprint, config: dict[str, Any], gpu: DeviceProfile
) -> None:
    hardware = machine(10**14, replace(gpu, pinnable_bytes=10**14))
    budgets = {"host_memory_bytes": 1, "device_memory_bytes": 1}
    asked = set()
    while planned(model, hardware, **config, **budgets) is None:
        with pytest.raises(CapacityError) as caught:
            plan_memory(model, hardware, EngineConfig(**config, **budgets))
        found = re.search(r"needs at least \S+ [GMK]iB \((\d+) bytes\) of (\w+) memory", str(caught.value))
        assert found and found[2] not in asked, "asked once, and for enough"
        asked.add(found[2])
        budgets[f"{found[2]}_memory_bytes"] = int(found[1])
    for name in asked:
        key = f"{name}_memory_bytes"
        assert planned(model, hardware, **config, **(budgets | {key: budgets[key] - 1})) is None


@pytest.mark.parametrize("gpu", [None, GTX_1060])
def test_what_keys_and_values_cost_in_layers_is_said_and_true(gpu: DeviceProfile | None) -> None:
    """Whoever follows the note gets just so many layers more."""
    model, hardware = shape("solar-10.7b"), machine(64 * GIB, gpu)
    name, seen = "host" if gpu is None else "device", 0
    for budget in range(2 * GIB, 12 * GIB, GIB // 3):
        for config in ({}, {"num_kv_tokens": 8192}):
            config |= {f"{name}_memory_bytes": budget, "share_products": "off"}
            plan = planned(model, hardware, **config)
            for note in plan.notes if plan else ():
                found = re.match(r"(\d+) more layers? would stay in memory with --kv-tokens (\d+)", note)
                if found and plan:
                    other = planned(model, hardware, **config | {"num_kv_tokens": int(found[2])})
                    assert other and len(other.resident) - len(plan.resident) == int(found[1]) > 0
                    assert int(found[2]) >= 2048, "no less than a sequence"
                    seen += 1
    assert seen >= 20


def test_a_budget_beyond_what_is_free_is_told() -> None:
    model, config = shape("tinyllama-1.1b"), EngineConfig(host_memory_bytes=8 * GIB)
    (warning,) = plan_memory(model, machine(4 * GIB), config).warnings
    assert "8.00 GiB is more than" in warning
    assert plan_memory(model, machine(8 * GIB), config).warnings == ()


def test_a_device_budget_without_a_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="--device-memory"):
        plan_memory(shape("tinyllama-1.1b"), machine(8 * GIB), EngineConfig(device_memory_bytes=GIB))


def test_a_head_that_shares_the_embedding_lies_on_the_gpu_as_well() -> None:
    """The embedding is looked up on the host; the product with it is the GPU's."""
    config = find_shape("tinyllama-1.1b")
    untied, tied = sizes(config), sizes(config | {"tie_word_embeddings": True})
    assert tied.head_bytes < untied.head_bytes and tied.head_elements == untied.head_elements
    on_cpu = [plan_memory(model, machine(8 * GIB), EngineConfig()).head_bytes for model in (untied, tied)]
    on_gpu = [
        plan_memory(model, machine(8 * GIB, GTX_1060), EngineConfig()).head_bytes for model in (untied, tied)
    ]
    assert on_cpu[1] < on_cpu[0] == on_gpu[0] == on_gpu[1]


def test_too_little_pinned_memory_is_told() -> None:
    gpu = replace(GTX_1060, pinnable_bytes=100 << 20)
    with pytest.raises(CapacityError, match="pinned memory.* pin 100.00 MiB"):
        plan_memory(shape("solar-10.7b"), machine(16 * GIB, gpu), EngineConfig())


def test_solar_on_a_gtx_1060() -> None:
    """10.7 GB of INT8, 6 GiB of device memory, 16 GiB free: a bit over half is streamed from pinned RAM, and
    the link is what a step waits for. test_product_split.py has the plan in which the processor helps."""
    model, hardware = shape("solar-10.7b"), machine(16 * GIB, GTX_1060)
    config = EngineConfig(num_kv_tokens=4096, share_products="off")
    plan = plan_memory(model, hardware, config)
    assert 5.7 * GIB < plan.device_used_bytes <= 6 * GIB
    assert plan.layer_bytes("disk") == 0 and plan.num_host_slots == 2  # through which layers reach the card
    assert len(plan.resident) == pytest.approx(21, abs=2)
    step = predict_step(plan, model, hardware, config, StepLoad.decode(1))
    assert step.binding == "host to device"
    assert step.floor_s == pytest.approx(plan.streamed_bytes / 12e9)
    prompt = predict_step(plan, model, hardware, config, StepLoad(512, 1))
    assert prompt.binding == "arithmetic"
    # With 4 GiB on the host most of it comes from disk, through a ring of two slots.
    plan = plan_memory(model, machine(4 * GIB, GTX_1060), config)
    assert plan.layer_bytes("disk") > 0 and plan.num_host_slots == 2


def test_solar_without_a_gpu_in_6_gib() -> None:
    model, hardware = shape("solar-10.7b"), machine(20 * GIB)
    config = EngineConfig(host_memory_bytes=6 * GIB)
    plan = plan_memory(model, hardware, config)
    assert plan.host_budget_bytes == 6 * GIB and not plan.has_gpu
    assert 5.8 * GIB < plan.host_used_bytes <= 6 * GIB
    assert predict_step(plan, model, hardware, config, StepLoad.decode(1)).binding == "disk"
    assert plan.num_kv_tokens >= 2048 and plan.notes
    whole = plan_memory(model, hardware, EngineConfig())
    assert len(whole.resident) == 48 and whole.num_staging_slots == 0
    assert predict_step(whole, model, hardware, config, StepLoad.decode(1)).binding == "memory"


def test_experts_are_not_crowded_out_by_keys_and_values() -> None:
    """Dense layers of 0.6 GiB fit beside the whole context's 6 GiB, and 18 GiB of experts in INT8 don't."""
    config = EngineConfig(host_memory_bytes=8 * GIB)
    plan = plan_memory(shape("gpt-oss-20b"), machine(64 * GIB), config)
    assert plan.num_expert_slots > 150 and plan.kv_bytes < 9 * GIB / 8
    roomy = plan_memory(shape("gpt-oss-20b"), machine(64 * GIB), EngineConfig())
    assert roomy.num_expert_slots == 24 * 32 and roomy.num_kv_tokens >= 131072


def test_cpm_2_on_a_gtx_1060() -> None:
    """11 billion parameters in 6 GiB of device memory, without the processor's help. The layers that stay on
    the card are the decoder's, and a decoding step streams no layer of the encoder."""
    model, hardware = shape("cpm-2"), machine(16 * GIB, GTX_1060)
    config = EngineConfig(max_num_seqs=4, num_kv_tokens=1024, max_model_len=512, share_products="off")
    plan = plan_memory(model, hardware, config)
    assert plan.num_encoder_layers == 48 and len(plan.step_layers) == 24 and plan.num_cross_layers == 24
    assert min(plan.resident) >= 48 and len(plan.resident) == pytest.approx(18, abs=3)
    assert plan.layer_bytes("disk") == 0
    step = predict_step(plan, model, hardware, config, StepLoad.decode(1))
    assert step.floor_s == pytest.approx((24 - len(plan.resident)) * 226.5e6 / 12e9, rel=0.01)
    encoding = predict_step(plan, model, hardware, config, StepLoad(1, 1, 100))
    assert encoding.terms["host to device"] - step.floor_s == pytest.approx(
        model.encoder_bytes / 12e9, rel=0.01
    )
    assert encoding.num_encoded == 100
    operations = 4 * 100 * model.encoder_elements
    assert encoding.terms["arithmetic"] - step.terms["arithmetic"] == pytest.approx(operations / 17e12)


def test_a_fast_link_waits_for_the_hosts_memory() -> None:
    """What is copied to a GPU is read from RAM, and what comes from disk was written there before."""
    model, gpu = shape("llama-3-70b"), replace(GTX_1060, host_to_device_gbps=52.0, pinnable_bytes=10**12)
    config = EngineConfig(num_kv_tokens=2048)
    for free, from_disk in ((128 * GIB, False), (40 * GIB, True)):
        hardware = replace(machine(free, gpu), disk=replace(DISK, read_gbps=40.0))
        plan = plan_memory(model, hardware, config)
        assert (plan.layer_bytes("disk") > 0) == from_disk
        step = predict_step(plan, model, hardware, config, StepLoad.decode(1))
        assert step.binding == "host memory"
        assert step.floor_s == pytest.approx((plan.streamed_bytes + plan.layer_bytes("disk")) / 40e9)


def test_a_number_of_resident_layers_can_be_forced() -> None:
    model, hardware = shape("tinyllama-1.1b"), machine(8 * GIB)
    for count in (0, 1, 21, 22, 50):
        plan = plan_memory(model, hardware, EngineConfig(num_resident_layers=count))
        assert plan.resident == resident_layers(22, count)
    with pytest.raises(CapacityError):
        plan_memory(model, hardware, EngineConfig(num_resident_layers=22, host_memory_bytes=GIB))


def test_keys_and_values_are_said_once() -> None:
    with pytest.raises(ConfigError, match="say the same thing"):
        EngineConfig(num_kv_tokens=10, kv_cache_bytes=10)


@given(model=footprints, hardware=machines, config=configs, share=st.floats(0.01, 0.99))
def test_a_share_of_the_budget_for_keys_and_values(
    model: ModelFootprint, hardware: HardwareProfile, config: dict[str, Any], share: float
) -> None:
    config.pop("num_kv_tokens", None)
    plan = planned(model, hardware, **config, kv_cache_share=share)
    if plan is not None:
        budget = plan.device_budget_bytes if plan.has_gpu else plan.host_budget_bytes
        block_bytes = plan.block_size * model.kv_bytes_per_token
        assert 0 <= share * budget - plan.kv_bytes < block_bytes + 1


@given(model=footprints, hardware=machines, config=configs, measured=st.integers(0, 10**9))
def test_what_was_measured_counts_instead_of_the_estimate(
    model: ModelFootprint, hardware: HardwareProfile, config: dict[str, Any], measured: int
) -> None:
    plan = planned(model, hardware, measured, **config)
    if plan is not None:
        scratch = GPU_SCRATCH_BYTES if plan.has_gpu else 0
        longest = min(config.get("max_model_len", 10**9), model.max_position_embeddings)
        tables = sum(rope.table_bytes(longest) for rope in model.ropes)
        assert plan.workspace_bytes == measured + tables + scratch
        assert plan.is_workspace_measured


#: Qwen3-Next-80B-A3B-Instruct, by the numbers that its config.json has.
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 151936,
    "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "hidden_act": "silu", "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6, "rope_theta": 10000000, "partial_rotary_factor": 0.25, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "decoder_sparse_step": 1, "num_experts": 512,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10,
    "norm_topk_prob": True, "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip


def test_states_decide_how_many_sequences_run() -> None:
    """Three of four layers of Qwen3-Next have a state of 2 MiB and 96 KiB for each sequence."""
    size = sizes(QWEN3_NEXT)
    each = 36 * ((32 * 128 * 128 + 3 * 8192) * 4)
    assert size.state_bytes == each and size.kv_bytes_per_token == 12 * 2 * 2 * 256 * 2
    config = EngineConfig(num_kv_tokens=4096, max_model_len=4096, host_memory_bytes=16 * GIB)
    plan = plan_memory(size, machine(20 * GIB), config)
    assert plan.num_state_slots == 2 * GIB // each == 27 and plan.num_state_sequences == 14
    # A guess brings to each: the convolution's row, k, v, decay and beta. 64 guesses take a 16th of the rest.
    kept = 36 * (8192 + 16 * 128 + 32 * 128 + 32 + 32) * 4
    assert plan.guess_room == (64, 16) and 80 * kept > 27 * each / 16 > 64 * kept
    assert plan.state_bytes == 27 * each + 64 * kept + 16 * each // 36
    assert plan.host_used_bytes <= 16 * GIB
    assert any("14 sequences run at a time instead of 64" in note for note in plan.notes)
    without = replace(config, enable_prefix_caching=False, max_num_seqs=4)
    assert plan_memory(size, machine(20 * GIB), without).num_state_slots == 4
    unguessed = plan_memory(size, machine(20 * GIB), replace(without, speculation="off"))
    assert unguessed.state_bytes == 4 * each and unguessed.guess_room == (0, 0)
    with pytest.raises(CapacityError, match="--state-memory"):
        plan_memory(size, machine(20 * GIB), replace(config, state_bytes=each - 1))
