"""The shipped mixture: small enough, of some use, and the same answers where most experts are read anew."""

from __future__ import annotations

from dataclasses import replace

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.generation.requests.generation_request import SamplingParams
from penstock.text.chat import render_chat
from penstock.weights.checkpoints.hub import SHIPPED

SMALL = EngineConfig(device="cpu", num_kv_tokens=1024, max_num_seqs=2, max_num_batched_tokens=128)
FOX = "Write a story about a fox who wants to find a lost bell."


def answers(engine: Engine, questions: list[str], max_tokens: int) -> list[str]:
    """Greedy answers, one after the other."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    prompts = [render_chat(engine.tokenizer, [{"role": "user", "content": text}]) for text in questions]
    return [engine.generate([prompt], params)[0].text for prompt in prompts]


def test_it_is_small_enough_to_ship() -> None:
    assert sum(path.stat().st_size for path in SHIPPED["demo-moe"].iterdir() if path.is_file()) < 8e6


def test_it_answers_alike_with_few_experts_in_memory() -> None:
    sums = [f"What is {a} plus {b}?" for a, b in ((1, 2), (7, 5), (4, 9), (8, 8))]
    capitals = [f"What is the capital of {country}?" for country in ("France", "Italy", "Japan")]
    with Engine.load("demo-moe", SMALL) as engine:
        plan, story = engine.plan, answers(engine, [FOX], 40)
        found = answers(engine, sums, 16)
        assert (
            sum(text.endswith(end) for text, end in zip(found, ("3.", "12.", "13.", "16."), strict=True)) >= 3
        )
        for text, city in zip(answers(engine, capitals, 24), ("Paris", "Rome", "Tokyo"), strict=True):
            assert city in text
    assert plan.num_expert_slots == 96 and "fox" in story[0]
    spared = 66 * plan.expert_slot_bytes
    with Engine.load("demo-moe", replace(SMALL, host_memory_bytes=plan.host_used_bytes - spared)) as engine:
        assert engine.plan.num_expert_slots == 30
        assert answers(engine, [FOX], 40) == story
        num_asked, num_missed, *_ = engine.streamer.tiers.expert_counts
        assert 96 < num_missed < num_asked
