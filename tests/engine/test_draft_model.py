"""A draft model beside the model that it drafts for: answers stay the same, and guesses come true."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from test_drafts import ASKED_PARAMS, ASKED_PROMPTS, CONFIGS, check_all_is_free, undrafted
from test_engine import exact

from conftest import save_byte_tokenizer, save_tiny_llama
from penstock.config import EngineConfig
from penstock.drafters.draft_model import DraftModel
from penstock.engine import Completion, Engine
from penstock.errors import CapacityError, ConfigError
from penstock.generation.drafting.speculation import Speculation
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.requests.prompt_embeds import PromptEmbeds
from penstock.memory.hardware import capacities
from penstock.text.tokenizer import Tokenizer

__all__ = ["undrafted"]  # a fixture


def flat_s(num_tokens: int) -> float:
    """Seconds of a step that waits for its layers."""
    return 1.0


class StepTime(NamedTuple):
    """A prediction."""

    seconds: float


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model of the same vocabulary, which knows nothing of the first."""
    folder = tmp_path_factory.mktemp("other")
    save_tiny_llama(folder, num_hidden_layers=1, hidden_size=32, max_position_embeddings=200)
    return folder


@pytest.fixture
def twin(tiny_llama: Path) -> Iterator[DraftModel]:
    draft_model = DraftModel.load(tiny_llama, EngineConfig())
    yield draft_model
    draft_model.close()


@pytest.mark.parametrize(
    ("case", "is_twin"),
    [*((case, True) for case in ("chunked prompts beside", "preemptions", "streamed")), ("together", False)],
)
def test_answers_are_those_without_a_draft_model(
    case: str, is_twin: bool, tiny_llama: Path, other: Path, undrafted: list[Completion]
) -> None:
    draft_model = DraftModel.load(tiny_llama if is_twin else other, EngineConfig())
    config = EngineConfig(**CONFIGS[case])  # type: ignore[arg-type]
    with Engine.load(tiny_llama, config, drafter=Speculation(flat_s, draft_model)) as engine:
        assert exact(engine.generate(ASKED_PROMPTS, ASKED_PARAMS)) == exact(undrafted)
        check_all_is_free(engine)
        assert engine.metrics.draft_tokens
        draft_model._forget()
        blocks = draft_model._blocks
        assert blocks.pool.num_free == blocks.num_blocks, "a sequence has ended, and its blocks are not free"
    draft_model.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_model_itself_guesses_right(temperature: float, tiny_llama: Path, twin: DraftModel) -> None:
    """Its activations have 8 bits here, so that a near tie comes out otherwise. The same noise draws the same
    tokens."""
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=40, ignore_eos=True)
        for seed in range(3)
    ]
    prompts = [[5, 9, 20 + index] * 9 for index in range(3)]
    with Engine.load(tiny_llama, drafter=Speculation(flat_s, twin)) as engine:
        engine.generate(prompts, params)
        assert engine.metrics.accepted_tokens > 80
        assert engine.metrics.num_steps < 16


def test_a_draft_model_with_fewer_tokens(tiny_llama: Path, tmp_path: Path) -> None:
    """The others are padding, and clients may name them all the same."""
    save_tiny_llama(tmp_path, vocab_size=300)
    base = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    asked: list[tuple[list[int], dict[str, object]]] = [
        ([5, 9, 290], {}),
        ([5, 9], {"logit_bias": {290: 100.0}}),
        ([5, 9], {"allowed_token_ids": (20, 21, 290)}),
        ([5, 9], {"allowed_token_ids": (290, 291)}),
        ([5, 9], {"bad_words": ((290,), (20, 291))}),
        ([5, 9], {"prediction": (290, 291, 292) * 4}),
    ]
    prompts = [prompt for prompt, _ in asked]
    params = [SamplingParams(**(vars(base) | changes)) for _, changes in asked]  # type: ignore[arg-type]
    with Engine.load(tmp_path, EngineConfig(speculation="off")) as engine:
        expected = engine.generate(prompts, params)
    draft_model = DraftModel.load(tiny_llama, EngineConfig())
    assert draft_model.model.spec.vocab_size < 290
    with Engine.load(tmp_path, drafter=Speculation(flat_s, draft_model)) as engine:
        draft_model.share_vocabulary(engine.tokenizer, engine.spec.vocab_size)
        assert exact(engine.generate(prompts, params)) == exact(expected)
        assert engine.metrics.draft_tokens
    draft_model.close()


def test_a_long_prompt_of_a_short_answer_is_not_read(
    tiny_llama: Path, twin: DraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading it would take as long as several steps. The same prompt pays where the answer is long."""
    calls, expand = list[int](), twin.expand
    monkeypatch.setattr(twin, "_predict", lambda load: StepTime(0.02 * load.num_tokens))
    monkeypatch.setattr(twin, "expand", lambda places: (calls.append(1), expand(places))[1])
    with Engine.load(tiny_llama, drafter=Speculation(flat_s, twin)) as engine:
        prompt = [5, 9, 20] * 60
        for max_tokens, is_read in ((3, False), (60, True)):
            params = SamplingParams(temperature=1, seed=1, max_tokens=max_tokens, ignore_eos=True)
            engine.generate([prompt], params)
            assert bool(calls) == is_read


def test_prompts_that_are_more_than_tokens_have_no_guesses_of_a_model(tiny_llama: Path, other: Path) -> None:
    """Vectors have the size of the large model."""
    embeds = PromptEmbeds.of(torch.ones(3, 64))
    request = GenerationRequest(
        [5, 9, 20], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), prompt_embeds=embeds
    )
    found = []
    for config in (EngineConfig(speculation="off"), EngineConfig(draft_model=str(other))):
        with Engine.load(tiny_llama, config) as engine:
            if engine.draft_model is not None:
                engine.scheduler._drafter = Speculation(flat_s, engine.draft_model)
            engine.add(request)
            tokens: list[int] = []
            while engine.has_work:
                tokens += [token for output in engine.step() for token in output.token_ids]
            found.append(tokens)
    assert found[0] == found[1] and len(found[0]) == 12


def test_memory_is_not_planned_twice(tiny_llama: Path, other: Path) -> None:
    """A machine that was described before the draft model was loaded."""
    machine = capacities()
    with Engine.load(tiny_llama, EngineConfig(), hardware=machine) as engine:
        alone = engine.plan.host_budget_bytes
    config = EngineConfig(draft_model=str(other))
    with Engine.load(tiny_llama, config, hardware=machine) as engine:
        used = engine.draft_model.plan.host_used_bytes  # type: ignore[union-attr]
        assert alone - used <= engine.plan.host_budget_bytes < alone


def test_a_config_names_it(tiny_llama: Path, other: Path) -> None:
    with Engine.load(tiny_llama, EngineConfig(draft_model=str(other), host_memory_bytes=1 << 28)) as engine:
        used = engine.draft_model.plan.host_used_bytes  # type: ignore[union-attr]
        assert engine.plan.host_budget_bytes == (1 << 28) - used


def test_a_model_without_guesses_has_no_draft_model() -> None:
    for values in ({"draft_model": "other"}, {"draft_model": "other", "draft_with_eagle3": True}):
        with pytest.raises(ConfigError, match="--speculation off can't be used with .*nothing guesses then"):
            EngineConfig(speculation="off", **values)  # type: ignore[arg-type]


def test_what_can_not_draft_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, vocab_size=300)
    save_byte_tokenizer(tmp_path, num_merges=5)
    (tmp_path / "tokenizer.json").write_text(
        (tmp_path / "tokenizer.json")
        .read_text()
        .replace('"a":', '"\\u4e2d":')
        .replace('"a b"', '"\\u4e2d b"')
    )
    for tokenizer in (None, Tokenizer.load(tiny_llama)):
        with pytest.raises(ConfigError, match="another vocabulary: token"):
            Engine.load(tiny_llama, EngineConfig(draft_model=str(tmp_path)), tokenizer=tokenizer)
    with pytest.raises(CapacityError):
        Engine.load(tiny_llama, EngineConfig(draft_model=str(tiny_llama), host_memory_bytes=1 << 20))
