"""Models whose rope changes with the length of a sequence, around that length: the same answers as
transformers, and the same bits whatever the KV cache holds, how prompts are cut, who else is there, and what
was computed before."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_convert import Ids
from test_families import TOLERANCE, dequantized
from tiny_models import LONGROPE, MODELS, SMALL, VOCAB_SIZE, build
from torch import Tensor

from penstock.config import EngineConfig
from penstock.engine import Completion, Engine
from penstock.generation.requests.generation_request import SamplingParams

BORDER, NUM_GREEDY = 200, 12
LONG = SMALL | {"max_position_embeddings": 512}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}
#: name -> (transformers' class, config). Dynamic NTK's longest context is 3 times the trained length.
CROSSING: dict[str, tuple[str, dict[str, Any]]] = {
    "Phi-3, longrope": (
        "Phi3",
        LONG | {"rope_parameters": LONGROPE, "original_max_position_embeddings": BORDER},
    ),
    "Llama, longrope": (
        "Llama",
        LONG | {"rope_parameters": LONGROPE | {"original_max_position_embeddings": BORDER}},
    ),
    "Llama, dynamic": ("Llama", SMALL | {"rope_parameters": DYNAMIC, "max_position_embeddings": BORDER}),
}
DICE = random.Random(4)
PROMPTS = {
    size: [DICE.randrange(3, VOCAB_SIZE) for _ in range(size)] for size in (50, 195, 199, 200, 201, 300)
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_GREEDY, ignore_eos=True, logprobs=3)
PLAIN = EngineConfig(kv_dtype="float32", num_kv_tokens=512, enable_prefix_caching=False)


@dataclass(frozen=True)
class Crossing:
    """A model, what transformers makes of each prompt, and what our engine answers to it alone."""

    folder: Path
    oracle: transformers.PreTrainedModel
    alone: dict[int, Completion]

    def load(self, **config: Any) -> Engine:
        return Engine.load(self.folder, EngineConfig(kv_dtype="float32", **config), tokenizer=Ids())


@pytest.fixture(scope="module", params=CROSSING)
def crossing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crossing]:
    folder = tmp_path_factory.mktemp("crossing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, request.param, CROSSING[request.param])
        oracle = dequantized(build(request.param, folder), folder)
    with Engine.load(folder, PLAIN, tokenizer=Ids()) as engine:
        alone = {size: engine.generate([prompt], GREEDY)[0] for size, prompt in PROMPTS.items()}
    yield Crossing(folder, oracle, alone)


def config_of(crossing: Crossing) -> Any:
    return crossing.oracle.config


@torch.inference_mode()
def generated(crossing: Crossing, prompt: list[int]) -> tuple[list[int], Tensor]:
    """transformers' greedy tokens and the logits that they were chosen by, [NUM_GREEDY, vocab_size].

    Its Llama with LongRoPE keeps the keys of the short factors beside new ones of the long factors, so each
    token is computed there without a cache, as Phi-3 does it when it crosses. Dynamic NTK's frequencies grow
    with the longest sequence that the model has seen: each prompt gets a model that has seen none.
    """
    config = config_of(crossing)
    if config.model_type == "llama" and config.rope_parameters["rope_type"] == "longrope":
        ids, rows = list(prompt), []
        for _ in range(NUM_GREEDY):
            rows.append(crossing.oracle(torch.tensor([ids]), use_cache=False).logits[0, -1])
            ids.append(int(rows[-1].argmax()))
        return ids[len(prompt) :], torch.stack(rows)
    fresh = type(crossing.oracle)(config).eval()
    fresh.load_state_dict(crossing.oracle.state_dict())
    found = fresh.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False, max_new_tokens=NUM_GREEDY, min_new_tokens=NUM_GREEDY, eos_token_id=None,
        pad_token_id=0, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return found.sequences[0, len(prompt) :].tolist(), torch.cat(found.logits)


@pytest.mark.parametrize("size", PROMPTS)
def test_answers_equal_those_of_transformers(crossing: Crossing, size: int) -> None:
    tokens, logits = generated(crossing, PROMPTS[size])
    answer = crossing.alone[size]
    assert answer.token_ids == tokens
    expected, span = logits.double().log_softmax(-1), float(logits.max() - logits.min())
    for row, mine in zip(expected, answer.logprobs, strict=True):
        for token_id, logprob in ((mine.token_id, mine.logprob), *mine.top):
            assert abs(logprob - float(row[token_id])) <= TOLERANCE["float32"] * span


@torch.inference_mode()
@pytest.mark.parametrize("size", PROMPTS)
def test_scored_prompts_equal_a_forward_pass(crossing: Crossing, size: int) -> None:
    """The prompt's length decides for all of its tokens, also for those before the border."""
    prompt = PROMPTS[size]
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    with crossing.load(num_kv_tokens=512, max_num_batched_tokens=64) as engine:
        found = engine.generate([prompt], params)[0].prompt_logprobs
    fresh = type(crossing.oracle)(config_of(crossing)).eval()
    fresh.load_state_dict(crossing.oracle.state_dict())
    logits = fresh(torch.tensor([prompt])).logits[0]
    expected, span = logits.double().log_softmax(-1), float(logits.max() - logits.min())
    assert found is not None
    for position, mine in enumerate(found[1:]):
        assert mine is not None
        assert abs(mine.logprob - float(expected[position, mine.token_id])) <= TOLERANCE["float32"] * span


@pytest.mark.parametrize(
    "config",
    [
        {"num_kv_tokens": 192},
        {"num_kv_tokens": 240},
        {"num_kv_tokens": 2048},
        {"num_kv_tokens": 512, "max_num_batched_tokens": 7},
        {"num_kv_tokens": 512, "max_num_batched_tokens": 100, "block_size": 32, "num_threads": 2},
        {"num_kv_tokens": 512, "num_resident_layers": 0},
        {"num_kv_tokens": 512, "kernels": "native", "max_model_len": 400},
    ],
    ids=lambda config: "-".join(map(str, config.values())),
)
def test_what_the_engine_has_room_for_changes_no_bit(crossing: Crossing, config: dict[str, Any]) -> None:
    num_compared = 0
    with crossing.load(**config) as engine:
        for size, prompt in PROMPTS.items():
            params = GREEDY
            room = engine.max_model_len - size
            if room < 1:
                continue
            if room < NUM_GREEDY:
                params = SamplingParams(temperature=0.0, max_tokens=room, ignore_eos=True, logprobs=3)
            answer, expected = engine.generate([prompt], params)[0], crossing.alone[size]
            assert answer.token_ids == expected.token_ids[:room]
            assert answer.logprobs == expected.logprobs[:room]
            num_compared += 1
    assert num_compared == sum(size < engine.max_model_len for size in PROMPTS) > 0


@pytest.mark.parametrize("num_kv_tokens", [352, 4096])
def test_company_and_the_prefix_cache_change_no_bit(crossing: Crossing, num_kv_tokens: int) -> None:
    """All prompts at once, each twice, and prompts that begin as others do, shorter or longer than the
    border."""
    dice = random.Random(num_kv_tokens)
    cut = {size: PROMPTS[300][:size] for size in (190, 198, 202, 260)}
    with Engine.load(crossing.folder, PLAIN, tokenizer=Ids()) as engine:
        beginnings = {size: engine.generate([prompt], GREEDY)[0] for size, prompt in cut.items()}
        assert engine.metrics.num_preemptions == engine.metrics.prefix_cache_hits == 0
    asked = [(prompt, crossing.alone[size]) for size, prompt in PROMPTS.items()]
    asked += [(prompt, beginnings[size]) for size, prompt in cut.items()]
    asked = asked * 2
    dice.shuffle(asked)
    with crossing.load(num_kv_tokens=num_kv_tokens, max_num_batched_tokens=96, max_num_seqs=6) as engine:
        answers = engine.generate([prompt for prompt, _ in asked], GREEDY)
        assert engine.metrics.prefix_cache_hits
        assert engine.metrics.kv_blocks_used == 0
    for mine, (_, expected) in zip(answers, asked, strict=True):
        assert (mine.token_ids, mine.logprobs) == (expected.token_ids, expected.logprobs)


def test_choices_that_cross_together_and_are_preempted(crossing: Crossing) -> None:
    """They share the prompt's blocks, leave them at the border, and share those that they find there. All
    get a place in 18 blocks, for they share 12 of them, and each comes to 14."""
    choices = [
        SamplingParams(temperature=1.2, seed=seed, max_tokens=NUM_GREEDY, ignore_eos=True, logprobs=3)
        for seed in range(4)
    ]
    prompt = PROMPTS[199]
    with Engine.load(crossing.folder, PLAIN, tokenizer=Ids()) as engine:
        expected = [engine.generate([prompt], params)[0] for params in choices]
    with crossing.load(num_kv_tokens=288, max_num_batched_tokens=96) as engine:
        assert engine.generate([prompt] * 4, choices) == expected
        assert engine.metrics.num_preemptions


def test_a_long_prompt_finds_nothing_of_a_short_one(crossing: Crossing) -> None:
    short, long = PROMPTS[300][:190], PROMPTS[300][:201]
    params = functools.partial(SamplingParams, temperature=0.0, ignore_eos=True)
    with crossing.load(num_kv_tokens=2048) as engine:
        hits = []
        for prompt in (short, long, short, long):
            before = engine.metrics.prefix_cache_hits
            engine.generate([prompt], params(max_tokens=2))
            hits.append(engine.metrics.prefix_cache_hits - before)
    # The last one finds the whole of itself but for the token whose logits are wanted.
    assert hits[:2] == [0, 0] and hits[2] >= 176 and hits[3] >= 192
