"""The promise, for every family: token ids and log-probabilities of a request are those it gets alone,
whatever its company, the chunks of its prompt, the moment it came, preemptions, streaming and threads.

engine/README.md says what it rests on.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from test_convert import Ids
from tiny_models import MODELS, VOCAB_SIZE, build

from penstock.config import EngineConfig
from penstock.engine import Completion, Engine
from penstock.generation.sequence import SamplingParams

NUM_REQUESTS, MAX_TOKENS = 6, 34


def requests(dice: random.Random) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of all lengths, greedy and drawn."""
    made = []
    for seed in range(NUM_REQUESTS):
        prompt = [dice.randrange(3, VOCAB_SIZE) for _ in range(dice.choice((1, 2, 15, 16, 17, 31, 60)))]
        temperature = dice.choice((0.0, 0.7, 1.5))
        length = dice.randrange(17, MAX_TOKENS)
        params = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=length, ignore_eos=True, logprobs=3
        )
        made.append((prompt, params))
    return made


def config(dice: random.Random, kv_bytes_per_token: int) -> EngineConfig:
    """Small steps and a cache in which not all have room, so that some are preempted."""
    return EngineConfig(
        max_num_batched_tokens=dice.choice((3, 8, 33, 100)),
        max_num_seqs=dice.choice((3, 7)),
        num_resident_layers=dice.choice((0, 1, 2, None)),
        num_threads=dice.choice((1, 2)),
        block_size=dice.choice((16, 32)),
        kv_cache_bytes=dice.choice((96, 128)) * kv_bytes_per_token,
        max_model_len=96,
    )


def arriving(
    engine: Engine, dice: random.Random, asked: list[tuple[list[int], SamplingParams]]
) -> list[Completion]:
    """Requests that come in any order, some steps apart."""
    completions = [Completion() for _ in asked]
    pending = list(range(len(asked)))
    dice.shuffle(pending)
    while pending or engine.has_work:
        while pending and (not engine.has_work or dice.random() < 0.4):
            index = pending.pop()
            engine.add(str(index), *asked[index])
        for output in engine.step():
            completions[int(output.request_id)].extend(output)
    return completions


@pytest.mark.parametrize("name", MODELS)
def test_a_request_gets_in_any_company_what_it_gets_alone(name: str, tmp_path: Path) -> None:
    build(name, tmp_path)
    dice = random.Random(name)
    asked = requests(dice)
    with Engine.load(tmp_path, EngineConfig(max_model_len=96), tokenizer=Ids()) as engine:
        alone = [engine.generate([prompt], params)[0] for prompt, params in asked]
        kv_bytes_per_token = engine.spec.kv_bytes_per_token(2)
    num_preemptions = 0
    for _ in range(4):
        with Engine.load(tmp_path, config(dice, kv_bytes_per_token), tokenizer=Ids()) as engine:
            together = arriving(engine, dice, asked)
            num_preemptions += engine.metrics.num_preemptions
        for mine, expected in zip(together, alone, strict=True):
            assert (mine.token_ids, mine.logprobs) == (expected.token_ids, expected.logprobs), engine.config
    assert num_preemptions, "nothing was preempted: the cache is too large for this to be tested"
