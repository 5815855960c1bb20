"""Answers that follow a grammar: valid by the jsonschema package and `re`; the same tokens with and without
fast-forwarding, alone and in company; and their ends."""

from __future__ import annotations

import gc
import json
import random
import re
import weakref
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
from random_schemas import random_schema
from tiny_tokenizers import save_byte_level, save_sentencepiece

from conftest import save_tiny_llama
from penstock.config import EngineConfig
from penstock.engine import Completion, Engine
from penstock.errors import InvalidParameter, NoTokenLeft
from penstock.generation.grammars.grammar import Grammar
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.sequence import FinishReason

#: KV bytes of 16 tokens of the tiny model.
BLOCK_BYTES = 2 * 3 * 2 * 16 * 2 * 16
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module", params=["byte-level", "byte fallback", "demo"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str | Path:
    """Random weights over tokens that cut characters apart, with a padded vocabulary; or the demo model."""
    if request.param == "demo":
        return "demo"
    folder = tmp_path_factory.mktemp("grammars")
    is_byte_level = request.param == "byte-level"
    sizes = {"vocab_size": 340, "max_position_embeddings": 512, "eos_token_id": 1 if is_byte_level else 2}
    save_tiny_llama(folder, **sizes)
    for file in folder.glob("*tokenizer*"):
        file.unlink()
    (save_byte_level if is_byte_level else save_sentencepiece)(folder)
    return folder


@pytest.fixture(scope="module")
def engine(model: str | Path) -> Iterator[Engine]:
    with Engine.load(model) as engine:
        yield engine


@pytest.fixture(scope="module")
def tiny(tiny_llama: Path) -> Iterator[Engine]:
    with Engine.load(tiny_llama) as engine:
        yield engine


def constrained(grammar: Grammar, seed: int = 0, **options: object) -> SamplingParams:
    return SamplingParams(grammar=grammar, seed=seed, **({"max_tokens": 200} | options))  # type: ignore[arg-type]


def ask(engine: Engine, params: SamplingParams) -> Completion:
    return engine.generate([PROMPT], params)[0]


@pytest.mark.inner
def test_json_of_many_schemas_is_valid_and_forced_tokens_change_nothing(engine: Engine) -> None:
    """At temperature 1. The twin asks for logprobs, and so samples each token in a step of its own."""
    dice = random.Random(1)
    schemas = [random_schema(dice) for _ in range(30)]
    params = [constrained(Grammar.json_schema(schema), seed) for seed, schema in enumerate(schemas)]
    before = engine.metrics.fast_forwarded_tokens
    fast = engine.generate([PROMPT] * len(params), params)
    assert engine.metrics.fast_forwarded_tokens - before > 150
    before = engine.metrics.fast_forwarded_tokens
    plain = engine.generate(
        [PROMPT] * len(params),
        [constrained(each.grammar, each.seed, logprobs=0) for each in params],  # type: ignore[arg-type]
    )
    assert engine.metrics.fast_forwarded_tokens == before
    num_whole = 0
    for schema, mine, twin in zip(schemas, fast, plain, strict=True):
        assert (mine.token_ids, mine.text, mine.finish_reason) == (
            twin.token_ids,
            twin.text,
            twin.finish_reason,
        )
        assert len(twin.logprobs) == len(twin.token_ids)
        if mine.finish_reason is FinishReason.STOP:
            jsonschema.validate(json.loads(mine.text), schema)
            num_whole += 1
    assert num_whole > 25


@pytest.mark.parametrize(
    "pattern",
    ["[a-z]{3,9}", "(the|a) (water|wheel)s?", "\\d+(\\.\\d{2})? €", "[中文国é]{2,5}😀?", "(.|\n){5}"],
)
def test_texts_match_their_regular_expression(pattern: str, engine: Engine) -> None:
    params = [constrained(Grammar.regex(pattern), seed, temperature=1.5) for seed in range(12)]
    texts = [
        done.text
        for done in engine.generate([PROMPT] * 12, params)
        if done.finish_reason is FinishReason.STOP
    ]
    assert len(texts) > 6 and all(re.fullmatch(pattern, text) for text in texts), texts
    assert len(set(texts)) > 1


def test_greedy_and_filtered_answers_follow_the_grammar_too(engine: Engine) -> None:
    grammar = Grammar.choice(["the water", "the wheel", "é😀", "中文"])
    for options in (
        {"temperature": 0},
        {"top_k": 1},
        {"top_p": 0.01},
        {"min_p": 1.0},
        {"temperature": 0, "logit_bias": {token_id: -100 for token_id in range(50)}},
        {"repetition_penalty": 2.0, "frequency_penalty": 2.0},
    ):
        done = ask(engine, constrained(grammar, 3, **options))
        assert done.text in json.loads(grammar.text) and done.finish_reason is FinishReason.STOP


SCHEMA = {
    "type": "object",
    "properties": {
        "the water": {"type": "string", "maxLength": 12},
        "the wheel turns": {"enum": ["down the pipe", "down", "up"]},
        "number": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["the water", "the wheel turns", "number"],
    "additionalProperties": False,
}
GRAMMARS = [Grammar.json_schema(SCHEMA), Grammar.regex("[a-z ]{20,40}"), Grammar.choice(["the pipe" * 9])]


@pytest.mark.inner
def test_company_chunks_and_preemptions_change_nothing(tiny_llama: Path) -> None:
    asked = [constrained(GRAMMARS[seed % 3], seed, max_tokens=90) for seed in range(7)]
    prompts = [[5 + seed] * (1 + 9 * seed) for seed in range(7)]
    with Engine.load(tiny_llama) as engine:
        alone = [engine.generate([prompt], each)[0] for prompt, each in zip(prompts, asked, strict=True)]
    for config in (
        EngineConfig(),
        EngineConfig(max_num_batched_tokens=5),
        EngineConfig(kv_cache_bytes=12 * BLOCK_BYTES, max_model_len=170),
        EngineConfig(num_resident_layers=0, max_num_seqs=2),
    ):
        with Engine.load(tiny_llama, config) as engine:
            assert engine.generate(prompts, asked) == alone
            assert (engine.metrics.num_preemptions > 0) == (config.kv_cache_bytes is not None)


def test_a_text_that_is_forced_whole_takes_one_step(tiny: Engine) -> None:
    text = "the water runs down the pipe"
    for options in ({}, {"stop": ("never",)}):
        before = tiny.metrics.num_steps
        done = ask(tiny, constrained(Grammar.choice([text]), **options))
        assert (done.text, done.finish_reason) == (text, FinishReason.STOP)
        assert tiny.metrics.num_steps - before == 1
        assert len(done.token_ids) > 5


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 12, 13])
def test_the_length_is_kept_to_the_token(max_tokens: int, tiny: Engine) -> None:
    whole = ask(tiny, constrained(GRAMMARS[0], 2))
    short = ask(tiny, constrained(GRAMMARS[0], 2, max_tokens=max_tokens))
    assert short.token_ids == whole.token_ids[:max_tokens]
    assert whole.text.startswith(short.text.rstrip("\ufffd"))  # it may be cut within a character
    assert short.finish_reason is FinishReason.LENGTH
    exact = ask(tiny, constrained(GRAMMARS[0], 2, max_tokens=len(whole.token_ids)))
    assert exact == whole and whole.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("stop", ["{", "the w", 'er":', "turns", "}"])
def test_a_stop_string_within_forced_tokens_ends_the_answer(stop: str, tiny: Engine) -> None:
    whole = ask(tiny, constrained(GRAMMARS[0], 2))
    cut = ask(tiny, constrained(GRAMMARS[0], 2, stop=(stop,)))
    assert (cut.text, cut.stop_reason) == (whole.text[: whole.text.index(stop)], stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


def test_a_stop_token_within_forced_tokens_ends_the_answer(tiny: Engine) -> None:
    whole = ask(tiny, constrained(GRAMMARS[0], 2))
    for index in (0, 1, 6):
        token_id = whole.token_ids[index]
        cut = ask(tiny, constrained(GRAMMARS[0], 2, stop_token_ids=(token_id,)))
        assert cut.token_ids == whole.token_ids[: whole.token_ids.index(token_id) + 1]
        assert (cut.finish_reason, cut.stop_reason) == (FinishReason.STOP, token_id)


def test_the_minimum_holds_while_the_grammar_lets_it(tiny: Engine) -> None:
    letters = Grammar.regex("[a-z]*x?[a-z]")
    for seed in range(8):
        done = ask(tiny, constrained(letters, seed, min_tokens=9, max_tokens=30))
        assert len(done.token_ids) >= 9
    short = ask(tiny, constrained(Grammar.choice(["pipe", "down"]), 1, min_tokens=50))
    assert short.text in ("pipe", "down") and short.finish_reason is FinishReason.STOP


def test_no_token_left_is_an_error_of_the_request(tiny: Engine) -> None:
    forced = ask(tiny, constrained(Grammar.choice(["pipe"]))).token_ids
    for index in (0, len(forced) - 1):
        params = constrained(Grammar.choice(["pipe"]), min_tokens=50, stop_token_ids=(forced[index],))
        with pytest.raises(NoTokenLeft, match="min_tokens and the grammar leave no token"):
            ask(tiny, params)
    with pytest.raises(InvalidParameter, match="Too many items"):
        ask(tiny, constrained(Grammar.lark("start: /a/ start")))
    assert not tiny.has_work and ask(tiny, constrained(GRAMMARS[1])).text


def test_a_wrong_grammar_is_refused_before_anything_is_queued(tiny: Engine) -> None:
    request = GenerationRequest(PROMPT, constrained(Grammar.regex("(a")))
    for refuse in (tiny.validate, tiny.add):
        with pytest.raises(InvalidParameter, match="unclosed group"):
            refuse(request)
    assert not tiny.has_work


def test_an_abort_frees_the_matcher(tiny: Engine) -> None:
    tiny.add(GenerationRequest(PROMPT, constrained(GRAMMARS[1]), "left"))
    tiny.step()
    (sequence,) = tiny.scheduler
    matcher = weakref.ref(sequence.matcher)
    del sequence
    tiny.abort("left")
    gc.collect()
    assert matcher() is None and not tiny.has_work
