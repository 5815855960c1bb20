"""What is read of an engine's inside, on a real one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_seams import engine_of, open_mixture, write_mixture

from penstock import Engine, EngineConfig, GenerationRequest, SamplingParams
from penstock.memory.hardware import HardwareProfile
from penstock.memory.planning.plan import gib
from penstock.memory.planning.step_work import StepLoad
from penstock_server.facade import inside
from penstock_server.facade.plan_table import plan_table

#: Rates of an invented machine, so that there is something to predict by.
MACHINE = HardwareProfile(2, 8 << 30, 4 << 30, 10.0, 100.0)


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[Engine]:
    config = EngineConfig(num_kv_tokens=256, max_num_seqs=4, max_num_batched_tokens=16)
    with Engine.load(tiny_llama, config, hardware=MACHINE) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
        yield engine


def test_facts_of_the_model(engine: Engine) -> None:
    model = inside.model_of(engine)
    assert model.vocab_size > max(engine.tokenizer.encode("the pipe"))
    assert model.max_model_len == engine.max_model_len <= 256


def test_how_it_stands(engine: Engine) -> None:
    found = inside.snapshot_of(engine)
    assert (found.stats.num_steps, found.stats.prompt_tokens, found.stats.generated_tokens) == (2, 3, 2)
    assert found.stats.last_step is not None and found.stats.last_step.num_tokens == 1
    assert sum(found.stats.steps_by_tokens) == 2
    assert len(found.stats.steps_by_tokens) == len(found.step_token_bounds) + 1
    assert (found.stats.current_layer, found.block_size, found.kv_dtype) == (None, 16, "float16")
    assert found.stats.kv_blocks_total * found.block_size == 256


def test_its_plan(engine: Engine) -> None:
    plan = inside.served_plan_of(engine)
    assert (len(plan.layers), plan.num_resident_layers, plan.streamed_bytes) == (3, 3, 0)
    assert (plan.step.num_tokens, plan.step.seconds) == (1, engine.meter.predict(StepLoad.decode(1)).seconds)
    assert plan.step.seconds > 0 and plan.num_kv_tokens == 256
    rows = [row for row in plan_table(plan) if row.startswith("3 layers")]
    assert len(rows) == 1 and rows[0].endswith("resident")


def test_the_plans_lines_add_up(tmp_path: Path) -> None:
    """For a mixture of experts, whose slots take memory of their own."""
    write_mixture(tmp_path / "model")
    with engine_of(
        open_mixture(tmp_path / "model"), EngineConfig(device="cpu", num_kv_tokens=4096)
    ) as engine:
        plan = inside.served_plan_of(engine)
        greedy = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        engine.generate([[5, 9, 3], [7] * 20], greedy)
        stats = inside.snapshot_of(engine).stats
    assert plan.num_expert_slots == 15 and plan.num_host_expert_slots == 0
    layers = sum(layer.num_bytes for layer in plan.layers)
    others = plan.embedding_bytes + plan.head_bytes + plan.kv_bytes + plan.workspace_bytes
    assert layers + others + 15 * plan.expert_slot_bytes == plan.host_used_bytes
    (line,) = (line for line in plan_table(plan) if line.startswith("experts"))
    assert line.split() == ["experts", "host", *gib(15 * plan.expert_slot_bytes).split(), "15", "slots"]
    # With room for all, an expert is read once.
    assert stats.expert_queries - stats.expert_hits <= 15 < stats.expert_queries
    assert stats.expert_hits > 0
    experts = stats.experts
    assert experts is not None and experts.num_experts == [0, 0, 5, 5, 5] and experts.num_slots == 15
    assert experts.in_slots == experts.num_arrived and sum(experts.in_slots) <= 15
    assert stats.expert_queries - stats.expert_hits == sum(experts.num_arrived)
    assert {(each.layer in (2, 3, 4), each.expert in range(5)) for each in experts.hot} == {(True, True)}
    assert [each.share for each in experts.hot] == sorted((each.share for each in experts.hot), reverse=True)


@pytest.mark.parametrize("num_seqs", [1, 3, 4])
def test_a_rehearsal_ends_where_the_engine_does(tiny_llama: Path, num_seqs: int) -> None:
    config = EngineConfig(
        num_kv_tokens=256, max_num_seqs=4, max_num_batched_tokens=16, enable_prefix_caching=False
    )
    num_tokens = dict.fromkeys(map(str, range(num_seqs)), 16)
    with Engine.load(tiny_llama, config) as engine:
        for name in num_tokens:
            engine.add(GenerationRequest([5] * 16, SamplingParams(ignore_eos=True), name))
        num_left = 5
        while num_left:
            num_left -= all(number > 16 for number in num_tokens.values())
            for output in engine.step():
                num_tokens[output.request_id] += len(output.token_ids)
        longest = inside.longest_sequence(config, engine.plan, num_seqs, 16, 5)
        assert longest == max(num_tokens.values())
        four_blocks = replace(engine.plan, num_kv_blocks=4)
    # A sequence needs a second block for its 17th token.
    assert (inside.longest_sequence(config, four_blocks, num_seqs, 16, 5) is None) == (num_seqs > 2)
