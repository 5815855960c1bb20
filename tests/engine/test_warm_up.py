"""What a step takes beside weights and KV, against torch's own record of what it allocates."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from test_convert import Ids
from test_seams import engine_of, open_mixture, write_mixture
from tiny_models import build

from penstock.config import EngineConfig, KernelChoice
from penstock.engine import Engine
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.warm_up import largest_step
from penstock.kernels.cpu_builds import compiled_builds
from penstock.kernels.scratch import scratch
from penstock.kernels.sublayers import partial_results
from penstock.kernels.sublayers.partial_results import SPLIT_KEYS

needs_native = pytest.mark.skipif(not compiled_builds(), reason="no compiled kernels here")


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("name", 
    [
        "Llama", "Gemma 2", "GPT-2", "Falcon, untied, biases", "BLOOM, 6 heads", "Llama, rope dynamic",
        "Phi-3, rope longrope",
    ],
)  # fmt: skip
def test_the_largest_step_takes_what_was_measured(name: str, kernels: KernelChoice, tmp_path: Path) -> None:
    """No step of the largest size takes more, and what is set aside for nothing is a layer streamed."""
    if kernels == "native" and not compiled_builds():
        pytest.skip("no compiled kernels here")
    build(name, tmp_path)
    config = EngineConfig(
        max_num_batched_tokens=128, max_num_seqs=4, kernels=kernels, num_kv_tokens=1024, num_threads=1
    )
    params = SamplingParams(temperature=1.0, top_p=0.9, logprobs=5, max_tokens=2, ignore_eos=True)
    tokenizer: Any = Ids()
    with Engine.load(tmp_path, config, tokenizer=tokenizer) as engine:
        scratch(1)  # what a thread keeps for good is no step's
        for number in range(4):
            engine.add(GenerationRequest([3 + number] * 100, params, str(number)))
        with torch.profiler.profile(profile_memory=True) as profiler:
            while engine.has_work:
                engine.step()
        plan = engine.plan
    assert plan.is_workspace_measured
    assert 0.7 * plan.workspace_bytes < peak_bytes(profiler) <= 1.05 * plan.workspace_bytes


@needs_native
@pytest.mark.parametrize("most_shared", [64, 60])
def test_partial_results_of_long_contexts_are_measured(
    most_shared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the largest step has none, and a smaller one, here the prompt's last 60 tokens, has."""
    build("GPT-2", tmp_path, n_positions=4096, n_inner=64)
    num_prompt = 3 * SPLIT_KEYS + 60  # 48 steps of 64 tokens, and one
    token_bytes = 4 * 4 * (16 + 16) * 4  # of 4 heads in 4 parts
    monkeypatch.setattr(partial_results, "MAX_PARTIAL_BYTES", most_shared * token_bytes)
    config = EngineConfig(max_num_batched_tokens=64, max_num_seqs=4, num_kv_tokens=4096, num_threads=1)
    tokenizer: Any = Ids()
    with Engine.load(tmp_path, config, tokenizer=tokenizer) as engine:
        engine.add(GenerationRequest([3] * num_prompt, SamplingParams(max_tokens=2, ignore_eos=True), "0"))
        with torch.profiler.profile(profile_memory=True) as profiler:
            while engine.has_work:
                engine.step()
        plan = engine.plan
    assert 0.7 * plan.workspace_bytes < peak_bytes(profiler) <= 1.05 * plan.workspace_bytes


def test_no_choice_of_experts_takes_more_than_was_measured(tmp_path: Path) -> None:
    """A hundred equal tokens, which choose nearly the same experts, and a hundred different ones."""
    write_mixture(tmp_path / "model")
    config = EngineConfig(device="cpu", max_num_batched_tokens=128, num_kv_tokens=1024, num_threads=1)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with engine_of(open_mixture(tmp_path / "model"), config) as engine:
        with torch.profiler.profile(profile_memory=True) as profiler:
            engine.generate([[7] * 100], params)
            engine.generate([list(range(3, 103))], params)
        assert 0.7 * engine.plan.workspace_bytes < peak_bytes(profiler) <= 1.05 * engine.plan.workspace_bytes


def peak_bytes(profiler: torch.profiler.profile) -> int:
    """The most that was allocated at a time while the profiler ran."""
    events: Any = profiler.profiler
    records = [event for event in events.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(records, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes))


@pytest.mark.parametrize(("num_tokens", "num_seqs", "longest"), [(512, 64, 4096), (512, 64, 5), (7, 64, 99)])
def test_the_largest_step_is_what_the_config_allows(num_tokens: int, num_seqs: int, longest: int) -> None:
    config = EngineConfig(max_num_batched_tokens=num_tokens, max_num_seqs=num_seqs)
    batch = largest_step(config, longest)
    assert batch.num_tokens == min(num_tokens, num_seqs * longest)
    sampled = [item.sequence for item in batch.scheduled if item.is_sampled]
    assert len(sampled) == min(num_seqs, num_tokens)
    assert max(sequence.num_tokens for sequence in sampled) <= longest
