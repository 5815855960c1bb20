"""Drafts: guesses that are computed beside a sequence's tokens change how many steps an answer takes, and not
a bit of it. The drafters are those of drafters.py."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from drafters import Dice, Forest, Oracle
from test_engine import BLOCK_BYTES, PARAMS, PROMPTS, exact

from penstock.config import EngineConfig
from penstock.engine import Completion, Engine
from penstock.errors import ComputationError, CorruptFile, StepFailed
from penstock.generation.grammars.grammar import Grammar
from penstock.generation.model_inputs import ModelInputs
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.sequence import FinishReason

CHAIN = 6


GRAMMAR = Grammar.json_schema(
    {
        "type": "object",
        "properties": {
            "the water": {"type": "string", "maxLength": 12},
            "the wheel turns": {"enum": ["down the pipe", "down", "up"]},
        },
        "required": ["the water", "the wheel turns"],
        "additionalProperties": False,
    }
)
#: Prompt, parameters: with those of test_engine, whatever looks at the tokens before, and ends of all kinds.
ASKED: list[tuple[list[int], SamplingParams]] = [
    *zip(PROMPTS, PARAMS, strict=True),
    ([7, 8, 9], SamplingParams(seed=5, temperature=1.0, grammar=GRAMMAR, max_tokens=80)),
    ([7, 8, 10], SamplingParams(seed=5, temperature=1.0, grammar=GRAMMAR, max_tokens=80, logprobs=2)),
    ([11, 12], SamplingParams(temperature=0, max_tokens=30, min_tokens=9, stop_token_ids=tuple(range(90)))),
    ([13] * 20, SamplingParams(seed=2, temperature=1.3, bad_words=((5,), (6, 7), (8, 9)), max_tokens=25)),
    ([17, 18] * 9, SamplingParams(temperature=0, no_repeat_ngram_size=2, max_tokens=40, ignore_eos=True)),
    ([13] * 21, SamplingParams(seed=3, temperature=1.1, no_repeat_ngram_size=1, max_tokens=30)),
    (
        [7, 8, 11],
        SamplingParams(seed=6, temperature=1.0, grammar=GRAMMAR, no_repeat_ngram_size=6, max_tokens=80),
    ),
    ([14] * 33, SamplingParams(seed=4, temperature=2, allowed_token_ids=tuple(range(50, 70)), max_tokens=21)),
    ([15] * 5, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)),
    ([16] * 50, SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1)),
]
ASKED_PROMPTS, ASKED_PARAMS = (list(column) for column in zip(*ASKED, strict=True))


@pytest.fixture(scope="module")
def undrafted(tiny_llama: Path) -> list[Completion]:
    with Engine.load(tiny_llama, EngineConfig(enable_prefix_caching=False)) as engine:
        return engine.generate(ASKED_PROMPTS, ASKED_PARAMS)


def oracle(undrafted: list[Completion], length: int = CHAIN, num_right: int = 1000) -> Oracle:
    answers = zip(ASKED, undrafted, strict=True)
    return Oracle(
        {(params.seed, *prompt): done.token_ids for (prompt, params), done in answers}, length, num_right
    )


def load(folder: Path, drafter: Oracle | Dice, **config: object) -> Engine:
    return Engine.load(folder, EngineConfig(**config), drafter=drafter)  # type: ignore[arg-type]


def check_all_is_free(engine: Engine) -> None:
    manager = engine.scheduler.block_manager
    assert manager.pool.num_free == manager.num_blocks and not engine.has_work


CONFIGS: dict[str, dict[str, object]] = {
    "together": {},
    "without prefix cache": {"enable_prefix_caching": False},
    "two at a time": {"max_num_seqs": 2},  # and a chain's logits come in parts
    "chunked prompts beside": {"max_num_batched_tokens": 40},
    "hardly room": {"max_num_batched_tokens": 15},
    "preemptions": {"kv_cache_bytes": 14 * BLOCK_BYTES, "max_model_len": 200},
    "streamed": {"num_resident_layers": 1},
}
#: For a drafter whose guesses come to the scheduler as others do: what is between the two is tried with those
#: of this file in all configs.
SOME_CONFIGS = ("chunked prompts beside", "hardly room", "preemptions", "streamed")


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("together", "right"), ("together", "wrong"),
        *((case, "half right") for case in ("together", "preemptions", "streamed")),
        *((case, kind) for case in CONFIGS for kind in ("random", "tree")),
    ],
)  # fmt: skip
def test_answers_are_those_without_drafts(
    case: str, kind: str, tiny_llama: Path, undrafted: list[Completion]
) -> None:
    drafter = {
        "right": oracle(undrafted),
        "wrong": oracle(undrafted, num_right=0),
        "half right": oracle(undrafted, num_right=3),
        "random": Dice(oracle(undrafted)),
        "tree": Forest(oracle(undrafted)),
    }[kind]
    with load(tiny_llama, drafter, **CONFIGS[case]) as engine:
        assert exact(engine.generate(ASKED_PROMPTS, ASKED_PARAMS)) == exact(undrafted)
        assert (engine.metrics.num_preemptions > 0) == (case == "preemptions")
        check_all_is_free(engine)
        if kind == "tree" and case == "together":
            assert isinstance(drafter, Forest) and drafter.num_branches > 20
        # Nothing wrong is found in the prefix cache, and what is right is.
        assert exact(engine.generate(ASKED_PROMPTS, ASKED_PARAMS)) == exact(undrafted)
        check_all_is_free(engine)


#: How many times a hundred random requests are drafted. Take 70 for 21,000 answers:
#: `PENSTOCK_RANDOM_ROUNDS=70 pytest tests/engine/test_drafts.py -k random_requests`.
ROUNDS = int(os.environ.get("PENSTOCK_RANDOM_ROUNDS", "4"))


def random_request(dice: random.Random) -> tuple[list[int], SamplingParams]:
    """Whatever a request may have, in any combination."""

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(dice.randrange(260) for _ in range(count))

    max_tokens = dice.randrange(1, 24)
    options: dict[str, object] = {
        "top_k": dice.choice((1, 5, 50)),
        "top_p": dice.choice((0.3, 0.9)),
        "min_p": dice.choice((0.01, 0.2)),
        "repetition_penalty": dice.choice((0.8, 1.3)),
        "presence_penalty": dice.uniform(-2, 2),
        "frequency_penalty": dice.uniform(-2, 2),
        "no_repeat_ngram_size": dice.choice((1, 2, 4)),
        "logit_bias": {token: dice.uniform(-5, 5) for token in tokens(6)},
        "min_tokens": dice.randrange(max_tokens),
        "stop_token_ids": tokens(40),
        "stop": (dice.choice("aeiou "), "th"),
        "bad_words": tuple(tokens(dice.choice((1, 2, 3))) for _ in range(20)),
        "allowed_token_ids": tokens(60),
        "logprobs": dice.randrange(4),
        "prompt_logprobs": dice.randrange(2),
        "ignore_eos": True,
    }
    chosen = {name: value for name, value in options.items() if dice.random() < 0.25}
    if dice.random() < 0.1:  # and no token that the grammar needs is forbidden
        chosen = {
            "grammar": GRAMMAR,
            **{name: chosen[name] for name in ("logprobs", "top_k") if name in chosen},
        }
    temperature = dice.choice((0.0, 0.0, 0.7, 1.0, 2.0))
    params = SamplingParams(
        temperature=temperature,
        seed=dice.randrange(9),
        max_tokens=max_tokens,
        **chosen,  # type: ignore[arg-type]
    )
    return list(tokens(dice.choice((1, 5, 16, 17, 40)))), params


@pytest.mark.slow
@pytest.mark.parametrize("number", range(ROUNDS))
def test_random_requests_get_what_they_get_without_drafts(number: int, tiny_llama: Path) -> None:
    """A hundred requests, three drafters, three configs."""
    dice = random.Random(number)
    asked = [random_request(dice) for _ in range(100)]
    prompts, params = (list(column) for column in zip(*asked, strict=True))
    with Engine.load(tiny_llama, EngineConfig(enable_prefix_caching=False)) as engine:
        expected = engine.generate(prompts, params)
    answers = {
        (each.seed, *prompt): done.token_ids for (prompt, each), done in zip(asked, expected, strict=True)
    }
    for maker, case in zip((Forest, Forest, Dice), dice.sample(list(CONFIGS), 3), strict=True):
        drafter = maker(Oracle(answers, CHAIN))
        drafter.dice.seed(number)
        with load(tiny_llama, drafter, **CONFIGS[case]) as engine:
            assert exact(engine.generate(prompts, params)) == exact(expected)
            assert engine.metrics.accepted_tokens
            check_all_is_free(engine)


@pytest.mark.parametrize("length", [1, 3, 7, 500])
def test_right_guesses_make_fewer_steps(length: int, tiny_llama: Path, undrafted: list[Completion]) -> None:
    """Each step gives what was guessed and one token more."""
    for index in range(4):
        with load(tiny_llama, oracle(undrafted, length), enable_prefix_caching=False) as engine:
            engine.generate([ASKED_PROMPTS[index]], ASKED_PARAMS[index])
            num_tokens = len(undrafted[index].token_ids)
            assert engine.metrics.num_steps == -(-num_tokens // (1 + length))
            assert engine.metrics.generated_tokens == num_tokens


def test_wrong_guesses_make_as_many_steps_and_as_many_tokens(
    tiny_llama: Path, undrafted: list[Completion]
) -> None:
    drafter = oracle(undrafted, num_right=0)
    with load(tiny_llama, drafter) as engine:
        engine.generate([ASKED_PROMPTS[0]], ASKED_PARAMS[0])
        assert engine.metrics.num_steps == engine.metrics.generated_tokens == 24
        assert drafter.num_proposed > 100


def test_a_stop_string_within_a_chain_ends_the_answer_there(
    tiny_llama: Path, undrafted: list[Completion]
) -> None:
    """Nothing after it is told or counted; and the same for a stop token, and the length."""
    whole = undrafted[0]
    stop = whole.text[5:8]
    for options in ({"stop": (stop,)}, {"stop_token_ids": (whole.token_ids[3],)}, {"max_tokens": 4}):
        params = SamplingParams(**({"temperature": 0, "max_tokens": 24, "ignore_eos": True} | options))
        with Engine.load(tiny_llama) as engine:
            expected = engine.generate([PROMPTS[0]], params)
        with load(tiny_llama, oracle(undrafted, 20)) as engine:
            engine.add(GenerationRequest(PROMPTS[0], params))
            outputs = engine.step()
            while engine.has_work:
                outputs += engine.step()
            last = outputs[-1]
            assert len(outputs) == 1 and list(last.token_ids) == expected[0].token_ids
            assert (last.text, last.stop_reason) == (expected[0].text, expected[0].stop_reason)
            assert last.finish_reason == expected[0].finish_reason
            assert last.num_output_tokens == engine.metrics.generated_tokens == len(last.token_ids)
            check_all_is_free(engine)


def test_what_a_grammar_forces_and_what_was_guessed_are_told_apart(
    tiny_llama: Path, undrafted: list[Completion]
) -> None:
    index = ASKED_PROMPTS.index([7, 8, 9])
    forced = []
    for drafter in (oracle(undrafted, num_right=0), oracle(undrafted)):
        with load(tiny_llama, drafter) as engine:
            (found,) = engine.generate([ASKED_PROMPTS[index]], ASKED_PARAMS[index])
            assert found == undrafted[index]
            forced.append(engine.metrics.fast_forwarded_tokens)
    assert 0 < forced[1] < forced[0]


def test_accepted_tokens_are_found_by_the_next_prompt(tiny_llama: Path, undrafted: list[Completion]) -> None:
    """The conversation goes on: all blocks of the answer are there, the last one that is full too."""
    found = []
    follow_up = PROMPTS[0] + undrafted[0].token_ids + [5]
    expected = None
    for drafter in (oracle(undrafted, 0), oracle(undrafted, 500), oracle(undrafted, num_right=2)):
        with load(tiny_llama, drafter) as engine:
            engine.generate([PROMPTS[0]], PARAMS[0])
            before = engine.metrics.prefix_cache_hits
            completion = engine.generate([follow_up], PARAMS[0])
            expected = expected or exact(completion)
            assert exact(completion) == expected
            found.append(engine.metrics.prefix_cache_hits - before)
    assert found == [16, 16, 16]


def test_choices_share_their_prompt_and_draft_each_for_itself(
    tiny_llama: Path, undrafted: list[Completion]
) -> None:
    """A guess is not written into a block that others see."""
    prompt = PROMPTS[3][:37]
    params = [
        SamplingParams(seed=seed, temperature=0.8, max_tokens=20, ignore_eos=True, logprobs=1)
        for seed in range(4)
    ]
    with Engine.load(tiny_llama, EngineConfig(enable_prefix_caching=False)) as engine:
        expected = engine.generate([prompt] * 4, params)
    for num_right in (0, 2, 100):
        answers = {(seed, *prompt): done.token_ids for seed, done in enumerate(expected)}
        drafter = Oracle(answers, CHAIN, num_right)
        with load(tiny_llama, drafter) as engine:
            assert exact(engine.generate([prompt] * 4, params)) == exact(expected)
            assert engine.metrics.prefix_cache_hits
            check_all_is_free(engine)


def test_a_guess_takes_no_block_from_anybody(tiny_llama: Path, undrafted: list[Completion]) -> None:
    """Room for one sequence and a half: without guesses nobody has to give way, and so with them."""
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    config = {"kv_cache_bytes": 4 * BLOCK_BYTES, "max_model_len": 64, "enable_prefix_caching": False}
    with load(tiny_llama, Dice(oracle(undrafted)), **config) as engine:
        engine.generate([[9] * 17, [10] * 17], params)
        assert engine.metrics.num_preemptions == 0
        check_all_is_free(engine)


@pytest.mark.parametrize("kind", ["cancelled", "failed"])
def test_a_step_with_drafts_that_is_not_computed_leaves_nothing(
    kind: str, tiny_llama: Path, undrafted: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(tiny_llama, oracle(undrafted)) as engine:
        for index in range(3):
            engine.add(GenerationRequest(ASKED_PROMPTS[index], ASKED_PARAMS[index], str(index)))
        engine.step()
        engine.step()
        names = {str(index) for index in range(3)}
        if kind == "cancelled":
            assert engine.step(aborted=names) == []
        else:
            copy_blocks = engine.model.executor._kv_cache.copy_blocks

            def fail(*arguments: object) -> None:
                raise CorruptFile("a layer could not be read")

            monkeypatch.setattr(engine.model.executor._kv_cache, "copy_blocks", fail)
            with pytest.raises(StepFailed):
                engine.step()
            monkeypatch.setattr(engine.model.executor._kv_cache, "copy_blocks", copy_blocks)
        for name in names:
            engine.abort(name)
        check_all_is_free(engine)
        assert exact(engine.generate(ASKED_PROMPTS, ASKED_PARAMS)) == exact(undrafted)


def test_a_cancelled_step_goes_on_as_without_drafts(tiny_llama: Path, undrafted: list[Completion]) -> None:
    """The caller of another request left; this one is computed again."""
    with load(tiny_llama, oracle(undrafted, 4)) as engine:
        engine.add(GenerationRequest(PROMPTS[3], PARAMS[3], "a"))
        done = Completion()
        for _ in range(3):
            for output in engine.step():
                done.extend(output)
        assert engine.step(aborted={"a"}) == []
        while engine.has_work:
            for output in engine.step():
                done.extend(output)
        assert exact([done]) == exact([undrafted[3]])
        check_all_is_free(engine)


def test_a_row_that_is_no_numbers_within_a_chain_fails_after_the_tokens_before_it(
    tiny_llama: Path, undrafted: list[Completion]
) -> None:
    """As without drafts: the tokens are told, and then the error."""
    bad = undrafted[0].token_ids[4]
    first = undrafted[0].token_ids.index(bad)
    with load(tiny_llama, oracle(undrafted, 20)) as engine:
        forward = engine.model.executor.forward

        def poisoned(inputs: ModelInputs, *callbacks: object) -> list[torch.Tensor]:
            logits = torch.cat(list(forward(inputs, *callbacks)))  # type: ignore[arg-type]
            logits[inputs.input_ids[inputs.wanted_rows] == bad] = torch.nan
            return [logits]

        engine.model.executor.forward = poisoned  # type: ignore[assignment,method-assign]
        engine.add(GenerationRequest(PROMPTS[0], PARAMS[0]))
        (told,), (failed,) = engine.step(), engine.step()
        assert list(told.token_ids) == undrafted[0].token_ids[: first + 1]
        assert isinstance(failed.error, ComputationError) and failed.finish_reason is FinishReason.ERROR
        check_all_is_free(engine)


def test_guesses_stay_within_the_step(tiny_llama: Path, undrafted: list[Completion]) -> None:
    """They take what prompts leave of it, and prompts come first."""
    with load(tiny_llama, oracle(undrafted, 50), max_num_batched_tokens=30) as engine:
        engine.add(GenerationRequest(PROMPTS[0], PARAMS[0]))
        engine.step()
        assert engine.metrics.last_step is not None and engine.metrics.last_step.num_tokens == 24
        engine.add(GenerationRequest(PROMPTS[1], PARAMS[1]))
        engine.add(GenerationRequest(PROMPTS[4], PARAMS[4]))
        while engine.has_work:
            engine.step()
            assert engine.metrics.last_step.num_tokens <= 30
