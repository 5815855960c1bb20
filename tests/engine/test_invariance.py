"""The promise, for every kind of layer: token ids and log-probabilities of a request are those it gets alone,
whatever its company, the chunks of its prompt, the moment it came, preemptions, streaming, threads and trees
of guesses, and whoever computed the beginning of its prompt.

docs/internals/overview.md says what it rests on.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from drafters import Forest, Oracle
from test_convert import Ids
from tiny_models import RECURRENT, VOCAB_SIZE, WHOLE, build

from penstock.config import EngineConfig, KVDtype
from penstock.engine import Completion, Engine
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.model.registry import open_model
from penstock.weights.conversion.convert import convert

PLAIN = EngineConfig(max_model_len=96, max_num_batched_tokens=128, enable_prefix_caching=False)
NUM_REQUESTS, MAX_TOKENS = 8, 34
#: Models, and what they change of their configs: here some prompts are longer than what rope's frequencies
#: depend on, and some answers cross that.
CROSSING: list[tuple[str, dict[str, int]]] = [
    ("Phi-3, rope longrope", {"original_max_position_embeddings": 40}),
    ("Llama, rope dynamic", {"max_position_embeddings": 48}),
]
EVERY: list[tuple[str, dict[str, int], KVDtype]] = [(name, {}, "float16") for name in WHOLE]
EVERY += [(*each, "float16") for each in CROSSING]
#: Windows and sinks are gpt-oss's.
EVERY += [("Llama", {}, "int8"), ("gpt-oss", {}, "int8")]


def requests(dice: random.Random) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of all lengths, greedy and drawn; some are, or begin as, another."""
    made: list[tuple[list[int], SamplingParams]] = []
    shared = [dice.randrange(3, VOCAB_SIZE) for _ in range(50)]
    for seed in range(NUM_REQUESTS):
        prompt = [dice.randrange(3, VOCAB_SIZE) for _ in range(dice.choice((1, 2, 15, 16, 17, 31, 60)))]
        if seed >= 4:
            prompt = (shared[: dice.choice((33, 40, 50))] + dice.choice(([], prompt)))[:60]
        temperature = dice.choice((0.0, 0.7, 1.5))
        length = dice.randrange(17, MAX_TOKENS)
        params = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=length, ignore_eos=True, logprobs=3
        )
        made.append((prompt, params))
    return made


def config(dice: random.Random, kv_bytes_per_token: int, kv_dtype: KVDtype) -> EngineConfig:
    """Small steps and a cache in which not all have room, so that some are preempted."""
    return EngineConfig(
        max_num_batched_tokens=dice.choice((3, 8, 33, 100)),
        max_num_seqs=dice.choice((3, 7)),
        num_resident_layers=dice.choice((0, 1, 2, None)),
        num_threads=dice.choice((1, 2)),
        block_size=dice.choice((16, 32)),
        kv_cache_bytes=dice.choice((96, 128)) * kv_bytes_per_token,
        max_model_len=96,
        kv_dtype=kv_dtype,
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
            engine.add(GenerationRequest(*asked[index], str(index)))
        for output in engine.step():
            completions[int(output.request_id)].extend(output)
    return completions


Converted = Callable[..., Path]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """converted(name, **changes): the folder of a converted model. (A streamed layer of a folder that is not
    converted is quantized in each step.)"""

    @functools.cache
    def folder_of(name: str, **changes: int) -> Path:
        folder = tmp_path_factory.mktemp("model")
        build(name, folder / "made", **changes)
        convert(open_model(folder / "made").store, folder / "int8")
        return folder / "int8"

    return folder_of


@pytest.mark.parametrize(("name", "changes", "kv_dtype"), EVERY)
def test_a_request_gets_in_any_company_what_it_gets_alone(
    name: str, changes: dict[str, int], kv_dtype: KVDtype, converted: Converted
) -> None:
    model = converted(name, **changes)
    dice = random.Random(f"{name}, crossing" if changes else name)
    asked = requests(dice)
    with Engine.load(model, replace(PLAIN, kv_dtype=kv_dtype), tokenizer=Ids()) as engine:
        alone = [engine.generate([prompt], params)[0] for prompt, params in asked]
        kv_bytes_per_token = engine.spec.kv_bytes_per_token(engine.spec.kv_layout(kv_dtype))
    answers = {
        (params.seed, *prompt): done.token_ids for (prompt, params), done in zip(asked, alone, strict=True)
    }
    drafter = Forest(Oracle(answers, 6, vocab_size=VOCAB_SIZE))
    settings = config(dice, kv_bytes_per_token, kv_dtype)
    with Engine.load(model, settings, tokenizer=Ids(), drafter=drafter) as engine:
        together = arriving(engine, dice, asked)
    for mine, expected in zip(together, alone, strict=True):
        assert (mine.token_ids, mine.logprobs) == (expected.token_ids, expected.logprobs), engine.config
    assert engine.metrics.kv_blocks_used == 0
    assert engine.metrics.num_preemptions, "nothing was preempted: the cache is too large to test it"
    assert engine.metrics.prefix_cache_hits, "nothing was found in the prefix cache"
    assert (name in RECURRENT) or drafter.num_branches, "no guess beside another one was right"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_resident"),
    [(name, (1, None)[index % 2]) for index, name in enumerate(WHOLE) if name not in RECURRENT],
)
def test_a_prompt_that_others_computed_gives_what_it_gives_alone(
    name: str, num_resident: int | None, converted: Converted
) -> None:
    """Three choices that come at once; the same again; the conversation going on."""
    model = converted(name)
    dice = random.Random(name)
    prompt = [dice.randrange(3, VOCAB_SIZE) for _ in range(dice.choice((21, 32, 45)))]
    choices = [
        SamplingParams(temperature=0.9, seed=seed, max_tokens=8, ignore_eos=True, logprobs=2)
        for seed in range(3)
    ]
    with Engine.load(model, PLAIN, tokenizer=Ids()) as engine:
        expected = [engine.generate([prompt], params)[0] for params in choices]
        longer = [prompt + expected[0].token_ids + [dice.randrange(3, VOCAB_SIZE)], prompt[:-1] + [3]]
        expected_longer = [engine.generate([each], choices[0])[0] for each in longer]
        assert engine.metrics.prefix_cache_queries == 0
    config = EngineConfig(max_model_len=96, num_resident_layers=num_resident, max_num_batched_tokens=64)
    with Engine.load(model, config, tokenizer=Ids()) as engine:
        assert engine.generate([prompt] * 3, choices) == expected
        first = engine.metrics.prefix_cache_hits
        assert engine.metrics.prefix_cache_queries == 3 * len(prompt) and first == 2 * (len(prompt) - 1)
        assert engine.generate([prompt] * 3, choices) == expected
        again = engine.metrics.prefix_cache_hits
        # The first finds whole blocks for certain: the rest of the last one may have been overwritten.
        assert again >= first + (len(prompt) - 1) // 16 * 16 + 2 * (len(prompt) - 1)
        assert [engine.generate([each], choices[0])[0] for each in longer] == expected_longer
        # Whole blocks: of the prompt and the answer but for its last token, and of what two prompts share.
        whole = (len(prompt) + 7) // 16 + (len(prompt) - 1) // 16
        assert engine.metrics.prefix_cache_hits == again + 16 * whole


@pytest.mark.parametrize("name", [name for name in WHOLE if name in RECURRENT])
def test_a_state_that_others_left_gives_what_a_prompt_gives_alone(name: str, converted: Converted) -> None:
    """The same prompt again, a conversation going on behind an answer, and prompts that begin alike."""
    model = converted(name)
    dice = random.Random(name)
    prompt = [dice.randrange(3, VOCAB_SIZE) for _ in range(dice.choice((39, 48)))]
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=20, ignore_eos=True, logprobs=2)

    def others(answer: list[int]) -> list[list[int]]:
        return [prompt, [*prompt, *answer, 5], *([*prompt[:20], each] * 2 for each in (3, 4, 5))]

    with Engine.load(model, PLAIN, tokenizer=Ids()) as engine:
        first = engine.generate([prompt], params)[0]
        expected = [engine.generate([each], params)[0] for each in others(first.token_ids)]
        assert engine.metrics.prefix_cache_queries == 0
    config = EngineConfig(max_model_len=96, max_num_batched_tokens=dice.choice((7, 64)))
    hits = []
    with Engine.load(model, config, tokenizer=Ids()) as engine:
        assert engine.generate([prompt], params)[0] == first
        for each, completion in zip(others(first.token_ids), expected, strict=True):
            before = engine.metrics.prefix_cache_hits
            assert engine.generate([each], params)[0] == completion
            hits.append(engine.metrics.prefix_cache_hits - before)
    # The last block of the prompt, and of the answer but for its last token. The first of the prompts that
    # begin alike leaves a state where they part.
    assert hits == [(len(prompt) - 1) // 16 * 16, (len(prompt) + 19) // 16 * 16, 0, 16, 16]
