"""Beam search against transformers' generate(num_beams=...), against a plain twin, and against itself: the
same answers alone and in any company, preempted, streamed, in chunks, however keys and values are shared."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import test_encoder_decoder
import tiny_models
import torch
from test_families import dequantized
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from penstock.config import EngineConfig
from penstock.engine import Completion, Engine
from penstock.generation.beam_search import BeamParams
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.spec import KV_LAYOUTS
from penstock.text.tokenizer import NoText

VOCAB_SIZE = 160
#: Tokens that end answers. With so many of them answers of random models end soon, and at different lengths.
ENDS = list(range(1, VOCAB_SIZE, 13))
MAX_TOKENS = 12
#: An answer may differ from transformers' where the scores differ by less than this.
NEAR_TIE = 1e-3
FAMILIES = ["Llama", "BLOOM", "T5 v1.1", "Qwen3.5"]
DICE = random.Random(8)
PROMPTS = [[DICE.randrange(3, VOCAB_SIZE) for _ in range(size)] for size in (16, 37)]


NONE = LogitsProcessorList()
#: Tokens and score.
Answer = tuple[list[int], float]


@dataclass
class Pair:
    folder: Path
    engine: Engine
    #: transformers' model with the dequantized weights
    oracle: Any
    has_encoder: bool

    def search(self, prompt: list[int], params: SamplingParams) -> list[Answer]:
        best = self.engine.generate([prompt], params)[0]
        return [(each.token_ids, each.score or 0.0) for each in (best, *best.others)]

    def logprobs(
        self, prompt: list[int], texts: list[list[int]], processors: LogitsProcessorList = NONE
    ) -> Tensor:
        """Of the token after each text; all texts have the same length. `processors` change them."""
        if self.has_encoder:
            start = self.oracle.config.decoder_start_token_id
            inputs = {
                "input_ids": [prompt] * len(texts),
                "decoder_input_ids": [[start, *text] for text in texts],
            }
        else:
            inputs = {"input_ids": [prompt + text for text in texts]}
        with torch.inference_mode():
            logits = self.oracle(**{name: torch.tensor(value) for name, value in inputs.items()}).logits
        decoded = torch.tensor(inputs.get("decoder_input_ids", inputs["input_ids"]))
        return processors(decoded, logits[:, -1].log_softmax(-1))

    def expected(self, prompt: list[int], beams: BeamParams, **options: Any) -> list[Answer]:
        """Answers with their scores."""
        found = self.oracle.generate(
            torch.tensor([prompt]),
            do_sample=False,
            num_beams=beams.num_beams,
            num_return_sequences=beams.num_answers,
            length_penalty=beams.length_penalty,
            early_stopping=beams.early_stopping,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=ENDS,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
        first = 1 if self.has_encoder else len(prompt)
        texts = [up_to_end(tokens[first:]) for tokens in found.sequences.tolist()]
        return list(zip(texts, found.sequences_scores.tolist(), strict=True))


def twin(
    pair: Pair, prompt: list[int], beams: BeamParams, processors: LogitsProcessorList = NONE
) -> tuple[list[Answer], float]:
    """The search, spelled out: all texts, ranked anew after each token. Also the smallest difference between
    two scores of which the better one won."""
    width, gaps = beams.num_beams, [math.inf]
    live: list[Answer] = [([], 0.0)]
    done: list[Answer] = []
    for length in range(1, MAX_TOKENS + 1):

        def ends(text: list[int], length: int = length) -> bool:
            return text[-1] in ENDS or length == MAX_TOKENS

        rows = pair.logprobs(prompt, [text for text, _ in live], processors).tolist()
        longer = [
            ([*text, token], total + row[token])
            for (text, total), row in zip(live, rows, strict=True)
            for token in range(VOCAB_SIZE)
        ]
        ranked = sorted(longer, key=lambda answer: -answer[1])
        going_on = [(text, total) for text, total in ranked if not ends(text)]
        done += [(text, total / length**beams.length_penalty) for text, total in ranked[:width] if ends(text)]
        done.sort(key=lambda answer: -answer[1])
        last, first_out = ranked[width - 1], ranked[width]
        if ends(last[0]) or ends(first_out[0]):
            gaps.append(last[1] - first_out[1])
        gaps += [a[1] - b[1] for a, b in itertools.pairwise(done[: width + 1])]
        gaps += [a[1] - b[1] for a, b in itertools.pairwise(going_on[width - 1 : width + 1])]
        live, done = going_on[:width], done[:width]
        if not live or (len(done) == width and beams.early_stopping is True):
            break
        if len(done) == width:
            is_patient = beams.early_stopping == "never" and beams.length_penalty > 0
            hope = live[0][1] / (MAX_TOKENS if is_patient else length) ** beams.length_penalty
            gaps.append(abs(hope - done[-1][1]))
            if hope <= done[-1][1]:
                break
    return done[: beams.num_answers], min(gaps)


def up_to_end(tokens: list[int]) -> list[int]:
    end = next((index for index, token in enumerate(tokens) if token in ENDS), len(tokens))
    return tokens[: end + 1]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder, has_encoder = tmp_path_factory.mktemp("beams"), request.param in test_encoder_decoder.MODELS
    if has_encoder:
        oracle = test_encoder_decoder.build(request.param, folder)
    else:
        oracle = dequantized(tiny_models.build(request.param, folder), folder)
    config = EngineConfig(max_model_len=96, kv_dtype="float32", max_num_batched_tokens=64)
    with Engine.load(folder, config, tokenizer=NoText()) as engine:
        yield Pair(folder, engine, oracle, has_encoder)


def params_of(beams: BeamParams, **options: Any) -> SamplingParams:
    return SamplingParams(beams=beams, max_tokens=MAX_TOKENS, stop_token_ids=tuple(ENDS), **options)


@pytest.mark.inner
def test_answers_and_scores_equal_transformers(pair: Pair) -> None:
    """Where rivals are so near each other that rounding decides, the twin does not say who wins."""
    num_compared = 0
    cases = [(4, 0.0, True), (5, -1.5, False), (4, 2.0, "never"), (3, 0.5, False)]
    for prompt, (width, penalty, early_stopping) in itertools.product(PROMPTS, cases):
        beams = BeamParams(width, width, penalty, early_stopping)
        expected, margin = twin(pair, prompt, beams)
        if margin > 1e-4:
            assert_equal(expected, pair.expected(prompt, beams))
        if margin > NEAR_TIE:
            assert_equal(pair.search(prompt, params_of(beams)), expected)
            num_compared += 1
    assert num_compared > 3


@pytest.mark.slow
def test_what_changes_log_probabilities_equals_transformers(pair: Pair) -> None:
    num_compared, allowed = 0, list(range(1, VOCAB_SIZE, 2))
    for prompt, width in itertools.product(PROMPTS, (3,)):
        first = 1 if pair.has_encoder else len(prompt)
        each_way: list[tuple[dict[str, Any], list[Any]]] = [
            (
                {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_tokens": 6},
                [
                    RepetitionPenaltyLogitsProcessor(1.3),
                    NoRepeatNGramLogitsProcessor(2),
                    MinNewTokensLengthLogitsProcessor(first, 6, ENDS),
                ],
            ),
            (
                {
                    "logit_bias": {25: 4.0, 40: -50},
                    "presence_penalty": 0.5,
                    "frequency_penalty": 1.5,
                    "bad_words": ((7, 9), (27,)),
                    "allowed_token_ids": tuple(allowed),
                },
                [
                    SequenceBiasLogitsProcessor([[[25], 4.0], [[40], -50.0]]),
                    Counts(first),
                    NoBadWordsLogitsProcessor([[7, 9], [27]]),
                    PrefixConstrainedLogitsProcessor(lambda number, ids: allowed, 1),
                ],
            ),
        ]
        for options, others in each_way:
            beams, processors = BeamParams(width, width), LogitsProcessorList(others)
            expected, margin = twin(pair, prompt, beams, processors)
            if margin > NEAR_TIE:
                assert_equal(pair.expected(prompt, beams, logits_processor=processors), expected)
                assert_equal(pair.search(prompt, params_of(beams, **options)), expected)
                num_compared += 1
    assert num_compared > 1


class Counts(LogitsProcessor):
    """Presence and frequency penalties, which transformers lacks."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores = scores.clone()
        for row, tokens in zip(scores, input_ids.tolist(), strict=True):
            for token, count in Counter(tokens[self.first :]).items():
                row[token] -= 0.5 + 1.5 * count
        return scores


def assert_equal(mine: list[Answer], expected: list[Answer]) -> None:
    assert [tokens for tokens, _ in mine] == [tokens for tokens, _ in expected]
    assert [score for _, score in mine] == pytest.approx([score for _, score in expected], abs=1e-3, rel=2e-4)


# ---------------------------------------------------------------- company


def requests(dice: random.Random) -> list[GenerationRequest]:
    """Searches, and drawn answers that are more urgent; some prompts begin alike."""
    shared, made = [dice.randrange(3, VOCAB_SIZE) for _ in range(33)], list[GenerationRequest]()
    for number, size in enumerate((33, 17, 16, 1, 30, 33)):
        prompt = shared[:size] if number % 3 == 0 else [dice.randrange(3, VOCAB_SIZE) for _ in range(size)]
        params = SamplingParams(seed=number, max_tokens=dice.randint(6, 9), ignore_eos=True, logprobs=2)
        if number < 3:
            beams = BeamParams(dice.choice((2, 3, 4)), 2, 1.0, dice.choice((True, False, "never")))
            # The first search has no end tokens: no search is longer.
            params = params_of(beams, logprobs=2) if number else SamplingParams(beams=beams, max_tokens=14)
        made.append(GenerationRequest(prompt, params, str(number), priority=-number))
    return made


def arriving(engine: Engine, asked: list[GenerationRequest]) -> list[Completion]:
    """One request after the other, some steps apart, and each more urgent than those before."""
    completions, pending = [Completion() for _ in asked], list(asked)
    for step in itertools.count():
        if pending and step % 5 == 0:
            engine.add(pending.pop(0))
        for output in engine.step():
            completions[int(output.request_id)].extend(output)
        if not (pending or engine.has_work):
            break
    return completions


@pytest.mark.parametrize("is_caching", [True, False])
def test_a_search_finds_in_any_company_what_it_finds_alone(pair: Pair, is_caching: bool) -> None:
    asked = requests(random.Random(int(is_caching)))
    alone = [pair.engine.generate([each.prompt_token_ids], each.params)[0] for each in asked]
    # Four beams have room for 48 tokens each, or for 16 each and 48 of an encoded input.
    num_blocks = 7 if pair.has_encoder else 12
    config = EngineConfig(
        max_model_len=64,
        kv_dtype="float32",
        max_num_batched_tokens=11,
        max_num_seqs=6,
        num_resident_layers=1,
        enable_prefix_caching=is_caching,
        kv_cache_bytes=num_blocks * 16 * pair.engine.spec.kv_bytes_per_token(KV_LAYOUTS["float32"]),
    )
    with Engine.load(pair.folder, config, tokenizer=NoText()) as engine:
        together = arriving(engine, asked)
        assert engine.metrics.num_preemptions, "the cache is too large for this to be tested"
        assert engine.metrics.kv_blocks_used == 0
    assert together == alone
