"""The engine's promise: the tokens and logprobs of a request are those it gets alone, whatever shares its
steps; and its bookkeeping: ends, errors, aborts, blocks."""

from __future__ import annotations

import json
import logging
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from units import layer_bytes

from penstock.config import INT8_ACTIVATIONS_COST, EngineConfig
from penstock.engine import Completion, Engine
from penstock.errors import (
    CapacityError,
    ComputationError,
    ConfigError,
    ContextOverflow,
    CorruptFile,
    DeadlineExceeded,
    InvalidParameter,
    QueueTimeout,
    RequestFailed,
)
from penstock.generation.model_inputs import ModelInputs
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.requests.request import RequestOutput
from penstock.generation.sequence import FinishReason
from penstock.kernels import cpu
from penstock.loader import loading
from penstock.memory.hardware import DiskProfile, HardwareProfile
from penstock.memory.planning.cost import UNKNOWN, MeasuredSteps, StepPrediction
from penstock.memory.planning.step_work import StepLoad
from penstock.text.tokenizer import NoText
from warm_python import run_warm

#: KV bytes per block of the tiny model: 2 (K, V) * 3 layers * 2 heads * 16 dims * 2 bytes * 16 tokens.
BLOCK_BYTES = 2 * 3 * 2 * 16 * 2 * 16

GENERATOR = random.Random(5)
PROMPTS = [[GENERATOR.randrange(2, 278) for _ in range(size)] for size in (1, 5, 17, 40, 100, 33)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=1.5, seed=1, max_tokens=30, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=0.9, seed=2, top_p=0.8, max_tokens=20, ignore_eos=True, logprobs=1),
    SamplingParams(
        temperature=2.0, seed=3, top_k=20, min_p=0.01, max_tokens=25, ignore_eos=True, logprobs=1,
        prompt_logprobs=0,
    ),
    SamplingParams(
        temperature=1.2, seed=4, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2,
        max_tokens=28, ignore_eos=True, logprobs=2,
    ),
    SamplingParams(
        temperature=0, logit_bias={7: 3.0}, max_tokens=26, ignore_eos=True, logprobs=2, prompt_logprobs=2,
    ),
]  # fmt: skip


def exact(completions: list[Completion]) -> list[tuple[object, ...]]:
    """Everything that has to be identical, floats included."""
    return [(c.token_ids, c.logprobs, c.text, c.finish_reason, c.prompt_logprobs) for c in completions]


@pytest.fixture(scope="module")
def alone(tiny_llama: Path) -> list[tuple[object, ...]]:
    """Each request by itself, on a fresh engine of default configuration."""
    engine = Engine.load(tiny_llama)
    return exact([engine.generate([p], s)[0] for p, s in zip(PROMPTS, PARAMS, strict=True)])


CONFIGS = {
    "in one batch": EngineConfig(),
    "with chunked prompts": EngineConfig(max_num_batched_tokens=7),
    "with two at a time": EngineConfig(max_num_seqs=2),
    "with preemptions": EngineConfig(kv_cache_bytes=12 * BLOCK_BYTES, max_model_len=150),
    "with one layer resident": EngineConfig(num_resident_layers=1),
    "with no layer resident": EngineConfig(num_resident_layers=0, max_num_batched_tokens=50),
    "with larger blocks": EngineConfig(block_size=64),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_request_gets_what_it_gets_alone(
    case: str, tiny_llama: Path, alone: list[tuple[object, ...]]
) -> None:
    engine = Engine.load(tiny_llama, CONFIGS[case])
    assert exact(engine.generate(PROMPTS, PARAMS)) == alone
    assert (engine.metrics.num_preemptions > 0) == (case == "with preemptions")
    assert engine.metrics.kv_blocks_used == 0


def test_each_answer_knows_how_often_it_gave_way(tiny_llama: Path) -> None:
    with Engine.load(tiny_llama, CONFIGS["with preemptions"]) as engine:
        for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            engine.add(GenerationRequest(prompt, params, str(index)))
        counts = dict[str, int]()
        while engine.has_work:
            counts |= {output.request_id: output.num_preemptions for output in engine.step()}
        assert sum(counts.values()) == engine.metrics.num_preemptions > 0


def test_steps_are_compared_with_what_was_measured_of_the_machine(tiny_llama: Path) -> None:
    hardware = HardwareProfile(2, 8 << 30, 8 << 30, 10.0, 500.0, DiskProfile(2.0, 1 << 20, 2, True))
    config = EngineConfig(num_resident_layers=1, device="cpu")
    with Engine.load(tiny_llama, config, hardware=hardware) as engine:
        engine.generate(PROMPTS[:1], PARAMS[0])
        metrics, step = engine.metrics, engine.meter.predict(StepLoad.decode(1))
    assert step.binding == "disk" and step.floor_s == pytest.approx(engine.plan.streamed_bytes / 2e9)
    assert metrics.floor_seconds == pytest.approx(metrics.num_steps * step.floor_s)
    assert metrics.predicted_seconds > metrics.floor_seconds
    assert metrics.links["disk"].num_bytes >= metrics.num_steps * 2 * layer_bytes(engine.model.store)
    with Engine.load(tiny_llama, config) as unmeasured:
        unmeasured.generate(PROMPTS[:1], PARAMS[0])
    assert unmeasured.metrics.floor_seconds == unmeasured.metrics.predicted_seconds == 0


def test_the_layer_in_work_can_be_seen_from_outside(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer by layer, and nothing between sweeps, however one ends."""
    with Engine.load(tiny_llama, EngineConfig(num_resident_layers=1)) as engine:
        seen: list[int | None] = []
        layer = engine.model.executor._family.layer

        def watched(*arguments: Any) -> torch.Tensor:
            seen.append(engine.streamer.current_layer)
            return layer(*arguments)

        monkeypatch.setattr(engine.model.executor._family, "layer", watched)
        engine.add(GenerationRequest(PROMPTS[0], SamplingParams(max_tokens=2), "r"))
        assert engine.streamer.current_layer is None and engine.metrics.last_step is None
        engine.step()
        assert seen == list(range(engine.spec.num_layers)) and engine.streamer.current_layer is None
        assert engine.metrics.last_step and engine.metrics.last_step.num_tokens == len(PROMPTS[0])
        assert engine.step(aborted={"r"}) == [] and engine.streamer.current_layer is None


#: A process of its own, because the threads of the native kernels only ever grow.
ONE_THREAD = """
import pickle, sys
from pathlib import Path
import torch
from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.kernels.cpu import NativeKernels

with Engine.load(sys.argv[1], EngineConfig(num_threads=1)) as engine:
    kernels = engine.model.executor._family.kernels
    if isinstance(kernels, NativeKernels):
        assert kernels.set_num_threads(1) == 1
    assert torch.get_num_threads() == 1
    answers = engine.generate(*pickle.loads(Path(sys.argv[2]).read_bytes()))
Path(sys.argv[2]).write_bytes(pickle.dumps(answers))
"""


def test_a_request_gets_with_one_thread_what_it_gets_with_all(
    tiny_llama: Path, alone: list[tuple[object, ...]], tmp_path: Path
) -> None:
    file = tmp_path / "asked and answered"
    file.write_bytes(pickle.dumps((PROMPTS, PARAMS)))
    run_warm("-c", ONE_THREAD, str(tiny_llama), str(file)).check_returncode()
    assert exact(pickle.loads(file.read_bytes())) == alone


@pytest.mark.parametrize(
    ("kernels", "activations"),
    [("torch", "int16"), ("torch", "int8"), ("reference", "int8"), ("native", "int8")],
)
def test_every_set_of_kernels_keeps_the_promise(kernels: str, activations: str, tiny_llama: Path) -> None:
    """Few tokens, and small steps to measure: the plain kernels are slow."""
    params = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)] * 3
    config = {"kernels": kernels, "activations": activations}
    engine = Engine.load(tiny_llama, EngineConfig(max_num_batched_tokens=64, **config))
    expected = exact([engine.generate([prompt], params[0])[0] for prompt in PROMPTS[:3]])
    chunked = Engine.load(tiny_llama, EngineConfig(max_num_batched_tokens=6, **config))
    assert exact(chunked.generate(PROMPTS[:3], params)) == expected


def test_arrivals_in_the_middle_change_nothing(tiny_llama: Path, alone: list[tuple[object, ...]]) -> None:
    engine = Engine.load(tiny_llama, EngineConfig(max_num_batched_tokens=30))
    completions = [Completion() for _ in PROMPTS]
    pending = list(enumerate(zip(PROMPTS, PARAMS, strict=True)))
    while pending or engine.has_work:
        if pending and engine.metrics.num_steps >= 3 * (len(PROMPTS) - len(pending)):
            index, (prompt, params) = pending.pop(0)
            engine.add(GenerationRequest(prompt, params, str(index)))
        for output in engine.step():
            completions[int(output.request_id)].extend(output)
    assert exact(completions) == alone


def test_same_seed_same_text_other_seed_other_text(tiny_llama: Path) -> None:
    engine = Engine.load(tiny_llama)
    params = [SamplingParams(temperature=2.0, seed=seed, max_tokens=20) for seed in (9, 9, 10)]
    first, second, other = engine.generate([PROMPTS[2]] * 3, params)
    assert first.token_ids == second.token_ids != other.token_ids


def test_fresh_seeds_differ(tiny_llama: Path) -> None:
    engine = Engine.load(tiny_llama)
    answers = engine.generate([PROMPTS[2]] * 4, SamplingParams(temperature=2.0, max_tokens=20))
    assert len({tuple(answer.token_ids) for answer in answers}) > 1


def greedy(engine: Engine, **params: object) -> Completion:
    return engine.generate([PROMPTS[3]], SamplingParams(temperature=0, **params))[0]


@pytest.mark.parametrize(
    ("advice", "expected"),
    [
        (None, {}),
        ({"eos_token_id": 1, "top_k": None, "max_new_tokens": 7, "num_beams": 4}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": False}, {}),
        ({"do_sample": False, "top_k": 50, "min_p": 0.1}, {"top_k": 50, "min_p": 0.1}),
    ],
)
def test_a_models_own_sampling_parameters_are_taken_as_vllm_takes_them(
    advice: dict[str, object] | None, expected: dict[str, object], tiny_llama: Path, tmp_path: Path
) -> None:
    """By name: transformers' do_sample decides nothing."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    (folder / "generation_config.json").unlink()
    if advice is not None:
        (folder / "generation_config.json").write_text(json.dumps(advice))
    with Engine.load(folder) as engine:
        assert engine.default_sampling == expected


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("temperature", -1, "at least 0"),
        ("temperature", "warm", "a number"),
        ("temperature", float("nan"), "at least 0"),
        ("top_p", -0.5, "between 0 and 1"),
        ("top_p", 2.0, "between 0 and 1"),
        ("top_k", -5, "at least -1"),
        ("top_k", 1.5, "a whole number"),
        ("top_k", float("inf"), "a whole number"),
        ("min_p", True, "a number"),
        ("repetition_penalty", 0, "above 0"),
        ("no_repeat_ngram_size", [3], "a number"),
    ],
)
def test_advice_that_no_request_may_follow_is_left_out_and_told(
    name: str,
    value: object,
    reason: str,
    tiny_llama: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """When the model is loaded. Requests that say nothing of it are answered."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    advice = {"temperature": 0.5, "top_k": 20.0, name: value}
    (folder / "generation_config.json").write_text(json.dumps(advice))
    with Engine.load(folder) as engine:
        usual = {"temperature": 0.5, "top_k": 20}
        assert engine.default_sampling == {key: usual[key] for key in usual if key != name}
        params = SamplingParams(**engine.default_sampling, max_tokens=2, ignore_eos=True)
        assert len(engine.generate([PROMPTS[3]], params)[0].token_ids) == 2
    (line,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "generation_config.json" in line and name in line and reason in line


def test_a_broken_generation_config_is_found_before_there_is_a_lane(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would close the lane, and a card's memory would stay taken."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    (folder / "generation_config.json").write_text("{")
    lanes: list[str] = []
    monkeypatch.setattr(loading, "find_lane", lanes.append)
    with pytest.raises(CorruptFile, match=r"generation_config\.json"):
        Engine.load(folder, tokenizer=NoText())
    assert not lanes


def test_max_tokens_and_the_context_end_an_answer(tiny_llama: Path) -> None:
    engine = Engine.load(tiny_llama, EngineConfig(max_model_len=60))
    short = greedy(engine, max_tokens=5, ignore_eos=True)
    assert (len(short.token_ids), short.finish_reason) == (5, FinishReason.LENGTH)
    full = greedy(engine, ignore_eos=True)
    assert (len(full.token_ids), full.finish_reason) == (20, FinishReason.LENGTH)
    assert full.text == engine.tokenizer.decode(full.token_ids)


def test_stop_tokens_and_eos_end_an_answer_and_are_not_in_its_text(tiny_llama: Path) -> None:
    engine = Engine.load(tiny_llama)
    free = greedy(engine, max_tokens=12, ignore_eos=True)
    stop = free.token_ids[6]
    first = free.token_ids.index(stop)
    stopped = greedy(engine, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,))
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, stop)
    assert stopped.text == engine.tokenizer.decode(free.token_ids[:first])
    forced = greedy(engine, max_tokens=12, logit_bias={1: 100.0})
    assert (forced.token_ids, forced.text, forced.finish_reason) == ([1], "", FinishReason.STOP)
    assert forced.stop_reason is None
    later = greedy(engine, max_tokens=12, logit_bias={1: 100.0}, min_tokens=5)
    assert len(later.token_ids) == 6 and later.token_ids[-1] == 1


def test_stop_strings_end_an_answer_across_tokens(tiny_llama: Path) -> None:
    engine = Engine.load(tiny_llama)
    free = greedy(engine, max_tokens=60, ignore_eos=True)
    middle = len(free.text) // 2
    stop = free.text[middle - 2 : middle + 2]
    stopped = greedy(engine, max_tokens=60, ignore_eos=True, stop=(stop,))
    assert stopped.text == free.text[: free.text.index(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, stop)
    kept = greedy(engine, max_tokens=60, ignore_eos=True, stop=(stop,), include_stop_str_in_output=True)
    assert kept.text == stopped.text + stop


def test_impossible_requests_are_refused_with_the_numbers(tiny_llama: Path) -> None:
    engine = Engine.load(tiny_llama, EngineConfig(max_model_len=64))
    with pytest.raises(ContextOverflow, match="60 tokens.*10 more.*70.*64") as caught:
        engine.add(GenerationRequest([5] * 60, SamplingParams(max_tokens=10), "a"))
    assert (caught.value.num_prompt_tokens, caught.value.max_model_len) == (60, 64)
    for prompt, params, name in (
        ([], SamplingParams(), "prompt"),
        ([278], SamplingParams(), "prompt"),
        ([-1], SamplingParams(), "prompt"),
        ([1], SamplingParams(logit_bias={278: 1.0}), "logit_bias"),
        ([1], SamplingParams(allowed_token_ids=(3, 278)), "allowed_token_ids"),
        ([1], SamplingParams(bad_words=((3,), (4, 278))), "bad_words"),
    ):
        with pytest.raises(InvalidParameter) as refused:
            engine.add(GenerationRequest(prompt, params, "a"))
        assert refused.value.param == name
    assert not engine.has_work
    engine.add(GenerationRequest([5] * 63, SamplingParams(), "a"))  # one token fits
    with pytest.raises(InvalidParameter, match="being computed"):
        engine.add(GenerationRequest([5], SamplingParams(), "a"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("top_k", -2),
        ("top_p", -0.1), ("top_p", 1.1), ("min_p", -0.1), ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("logit_bias", {3: 101.0}), ("seed", 2**63),
        ("stop", ("",)), ("max_tokens", -1), ("min_tokens", -1), ("logprobs", 21),
        ("prompt_logprobs", -1), ("allowed_token_ids", ()), ("allowed_token_ids", (-1,)),
        ("bad_words", ((),)),
        ("no_repeat_ngram_size", -1),
    ],
)  # fmt: skip
def test_parameters_out_of_range_are_named(name: str, value: object) -> None:
    with pytest.raises(InvalidParameter, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_aborts_free_blocks_wherever_the_request_is(tiny_llama: Path) -> None:
    engine = Engine.load(tiny_llama, EngineConfig(max_num_seqs=1))
    for name in ("running", "waiting", "other"):
        engine.add(GenerationRequest(PROMPTS[3], SamplingParams(max_tokens=50, ignore_eos=True), name))
    engine.step()
    engine.abort("running")
    engine.abort("waiting")
    engine.abort("never heard of")
    assert [output.request_id for output in engine.step()] == ["other"]
    engine.abort("other")
    assert engine.step() == [] and not engine.has_work
    assert engine.scheduler.block_manager.pool.num_free == engine.scheduler.block_manager.num_blocks


def test_requests_end_when_their_time_is_up(tiny_llama: Path) -> None:
    engine = Engine.load(tiny_llama, EngineConfig(max_num_seqs=1))
    endless = SamplingParams(ignore_eos=True)
    engine.add(GenerationRequest([5] * 40, endless, "runs", start_by=10.0, finish_by=20.0))
    engine.add(GenerationRequest([6], endless, "waits", start_by=10.0, finish_by=20.0))
    short = SamplingParams(max_tokens=5, ignore_eos=True)
    engine.add(GenerationRequest([7], short, "patient", start_by=30.0))
    engine.step()
    assert engine.expire(9.9) == []
    (waited,) = engine.expire(10.0)
    assert waited.request_id == "waits" and isinstance(waited.error, QueueTimeout)
    assert (waited.finish_reason, waited.num_prompt_tokens) == (FinishReason.ERROR, 1)
    engine.step()
    (late,) = engine.expire(20.0)
    assert late.request_id == "runs" and isinstance(late.error, DeadlineExceeded)
    assert late.num_output_tokens == 2 and "2 tokens" in str(late.error)
    assert engine.metrics.kv_blocks_used == 0
    engine.step()
    assert engine.expire(1000.0) == [], "it has started in time"
    while engine.has_work:
        outputs = engine.step()
    assert outputs[0].finish_reason is FinishReason.LENGTH and engine.expire(1e9) == []


def test_a_cancelled_sweep_is_not_found_by_others(tiny_llama: Path) -> None:
    """Nor is one that failed; what was computed before is."""
    engine = Engine.load(tiny_llama, EngineConfig(max_num_batched_tokens=32))
    prompt, params = [9] * 70, SamplingParams(temperature=0, max_tokens=5, logprobs=1)
    expected = exact(Engine.load(tiny_llama).generate([prompt], params))
    engine.add(GenerationRequest(prompt, params, "first"))
    engine.step()
    assert engine.step(aborted={"first"}) == []
    engine.abort("first")
    completion = engine.generate([prompt], params)
    assert exact(completion) == expected
    assert engine.metrics.prefix_cache_hits == 32


def test_a_prompt_is_found_only_with_its_salt(tiny_llama: Path) -> None:
    engine = Engine.load(tiny_llama)
    found = []
    for index, salt in enumerate(("", "a", "a", "")):
        engine.add(GenerationRequest([9] * 40, SamplingParams(max_tokens=1), str(index), cache_salt=salt))
        found += [output.num_cached_tokens for output in engine.step()]
    assert found == [0, 0, 39, 39]
    assert (engine.metrics.prefix_cache_queries, engine.metrics.prefix_cache_hits) == (160, 78)


def test_chunks_become_as_large_as_the_target_for_a_steps_time_allows(tiny_llama: Path) -> None:
    """By what was measured of the hardware, where there is something; else by the steps themselves."""
    engine = Engine.load(tiny_llama, EngineConfig(step_time_target_s=1.0, max_num_batched_tokens=200))
    engine.meter.predict = lambda load: StepPrediction(
        *load[:2], {"arithmetic": load.num_tokens * 0.02}, load.num_tokens * 0.02
    )
    engine.add(GenerationRequest([9] * 120, SamplingParams(), "first"))
    engine.step()
    assert engine.scheduler.admission.running[0].num_computed_tokens == 50
    engine.meter.predict = lambda load: UNKNOWN
    engine.meter.measured = MeasuredSteps()
    engine.meter.measured.record(10, 0.4)
    engine.meter.measured.record(100, 4.0)
    engine.step()
    # 40 ms a token would be 25; a chunk of 32 is the least.
    assert engine.scheduler.admission.running[0].num_computed_tokens == 82


def test_a_sweep_nobody_wants_ends_between_layers(
    tiny_llama: Path, alone: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aborted during layer 1 of 3: layer 2 is not computed, and another request is none the worse."""
    engine = Engine.load(tiny_llama)
    aborted: set[str] = set()
    computed: list[int] = []
    family = engine.model.executor._family
    layer = family.layer

    def watch(index: int, *arguments: object) -> torch.Tensor:
        computed.append(index)
        if index == 1:
            aborted.add("gone")
        return layer(index, *arguments)

    monkeypatch.setattr(family, "layer", watch)
    engine.add(GenerationRequest(PROMPTS[4], SamplingParams(), "gone"))
    assert engine.step(aborted) == []
    assert computed == [0, 1]
    engine.abort("gone")
    monkeypatch.undo()
    assert exact(engine.generate(PROMPTS, PARAMS)) == alone


def test_an_interrupted_step_leaves_nothing_that_others_find(
    tiny_llama: Path, alone: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of the interrupted step have keys, and K and V in the first layer only."""
    engine = Engine.load(tiny_llama)
    family = engine.model.executor._family
    layer = family.layer

    def interrupt(index: int, *arguments: object) -> torch.Tensor:
        if index == 1:
            raise KeyboardInterrupt
        return layer(index, *arguments)

    monkeypatch.setattr(family, "layer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, PARAMS)
    monkeypatch.undo()
    assert not engine.has_work
    assert exact(engine.generate(PROMPTS, PARAMS)) == alone


def test_the_context_that_a_setting_limits_is_not_blamed_on_the_cache(tiny_llama: Path) -> None:
    engine = Engine.load(tiny_llama, EngineConfig(max_model_len=64, num_kv_tokens=64))
    with pytest.raises(ContextOverflow) as refused:
        engine.validate(GenerationRequest([5] * 80, SamplingParams()))
    assert "--kv-tokens" not in str(refused.value)


def test_a_tokenizer_that_fails_costs_its_request_alone(
    tiny_llama: Path, alone: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the answer is made, and at once, with the prompt."""
    engine = Engine.load(tiny_llama)
    decode = engine.tokenizer.decode

    def fail(token_ids: list[int], skip_special_tokens: bool = True) -> str:
        if 277 in token_ids:
            raise IndexError("piece id is out of range")
        return decode(token_ids, skip_special_tokens)

    monkeypatch.setattr(engine.tokenizer, "decode", fail)
    with pytest.raises(RequestFailed, match="tokenizer"):
        engine.add(GenerationRequest([5, 277], SamplingParams(), "prompt"))
    engine.add(GenerationRequest([5], SamplingParams(logit_bias={277: 100.0}), "answer"))
    completions, failed = added(engine, PROMPTS, PARAMS)
    assert exact(completions) == alone
    assert [(output.request_id, output.finish_reason) for output in failed] == [
        ("answer", FinishReason.ERROR)
    ]
    assert isinstance(failed[0].error, RequestFailed) and "out of range" not in str(failed[0].error)
    assert engine.metrics.kv_blocks_used == 0


def poison(engine: Engine, token_id: int) -> None:
    """The logits after this token are no numbers."""
    forward = engine.model.executor.forward

    def poisoned(inputs: ModelInputs, *callbacks: Any) -> list[torch.Tensor]:
        logits = torch.cat(list(forward(inputs, *callbacks)))
        logits[inputs.input_ids[inputs.wanted_rows] == token_id] = torch.nan
        return [logits]

    engine.model.executor.forward = poisoned


def test_a_row_that_is_no_numbers_costs_its_request_alone(
    tiny_llama: Path, alone: list[tuple[object, ...]]
) -> None:
    engine = Engine.load(tiny_llama)
    used = set().union(*PROMPTS, *(token_ids for token_ids, *_ in alone))
    poison(engine, bad := min(set(range(278)) - used))
    engine.add(GenerationRequest([5, bad], SamplingParams(), "bad"))
    completions, failed = added(engine, PROMPTS, PARAMS)
    assert exact(completions) == alone
    assert [(output.request_id, output.token_ids) for output in failed] == [("bad", ())]
    assert isinstance(failed[0].error, ComputationError)
    assert engine.metrics.kv_blocks_used == 0
    assert engine.metrics.generated_tokens == sum(len(c.token_ids) for c in completions)
    with pytest.raises(ComputationError):
        engine.generate([[5], [5, bad]], SamplingParams(max_tokens=20))
    assert not engine.has_work


def added(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[list[Completion], list[RequestOutput]]:
    """The answers beside whatever else is in the engine, and the outputs that carry an error."""
    completions, failed = [Completion() for _ in prompts], []
    for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        engine.add(GenerationRequest(prompt, own, str(index)))
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                failed.append(output)
            else:
                completions[int(output.request_id)].extend(output)
    return completions, failed


def test_a_kv_budget_too_small_is_refused_and_a_modest_one_cuts_the_context(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CapacityError, match="--kv-cache-memory"):
        Engine.load(tiny_llama, EngineConfig(kv_cache_bytes=BLOCK_BYTES - 1))
    with pytest.raises(CapacityError, match="100"):
        Engine.load(tiny_llama, EngineConfig(kv_cache_bytes=2 * BLOCK_BYTES, max_model_len=100))
    engine = Engine.load(tiny_llama, EngineConfig(kv_cache_bytes=3 * BLOCK_BYTES))
    assert engine.max_model_len == 48
    assert "cut to 48" in caplog.text
    with pytest.raises(
        ContextOverflow, match="50 tokens; .* 48 tokens, which is .*--kv-tokens.*an answer has to fit"
    ):
        engine.add(GenerationRequest([5] * 50, SamplingParams(), "a"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 24},
        {"max_num_seqs": 0},
        {"activations": "int4"},
        {"kv_dtype": "int4"},
        {"step_time_target_s": -1.0},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        EngineConfig(**wrong)


def test_native_kernels_serve_where_they_were_compiled(tiny_llama: Path) -> None:
    """The generic build runs on any processor, so that a library is enough."""
    is_compiled = any(Path(cpu.__file__).parent.glob("_cpu_generic*.so"))
    with Engine.load(tiny_llama) as engine:
        assert engine.model.executor._family.kernels.traits.name == ("native" if is_compiled else "torch")


@pytest.mark.parametrize("name", ["allowed_token_ids", "stop_token_ids"])
def test_more_token_ids_than_there_are_are_refused(tiny_llama: Path, name: str) -> None:
    """They would be looked through for each token of the answer."""
    with Engine.load(tiny_llama) as engine:
        size = engine.spec.vocab_size
        engine.validate(GenerationRequest([5], SamplingParams(**{name: (5,) * size})))
        with pytest.raises(InvalidParameter, match="token ids that there are"):
            engine.validate(GenerationRequest([5], SamplingParams(**{name: (5,) * (size + 1)})))


@pytest.mark.parametrize("hardware", [None, HardwareProfile(2, 1 << 34, 1 << 34, 10.0, 100.0)])
def test_an_engine_that_never_guesses_says_so(
    hardware: HardwareProfile | None, tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(device="cpu", max_model_len=64)
    with caplog.at_level(logging.INFO), Engine.load(tiny_llama, config, hardware=hardware):
        assert ("no token is guessed ahead" in caplog.text) == (hardware is None)


@pytest.mark.parametrize("activations", ["int8", "int16"])
def test_8_bit_activations_say_what_they_cost(
    activations: Any, tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(device="cpu", activations=activations, max_model_len=64)
    with caplog.at_level(logging.WARNING), Engine.load(tiny_llama, config):
        assert (INT8_ACTIVATIONS_COST in caplog.text) == (activations == "int8")
