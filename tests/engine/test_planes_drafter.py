"""The upper planes of a model's own weights guess, and no answer depends on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_draft_model import flat_s
from test_drafts import ASKED_PARAMS, ASKED_PROMPTS, CONFIGS, SOME_CONFIGS, check_all_is_free, undrafted
from test_engine import exact

from conftest import save_tiny_llama
from penstock.config import EngineConfig
from penstock.drafters.planes_drafter import PlanesDrafter, check_planes, guess_share, pass_s
from penstock.engine import Completion, Engine
from penstock.errors import CapacityError, ConfigError
from penstock.generation.drafting.asking import Place
from penstock.generation.drafting.speculation import Speculation
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.memory.planning.step_work import StepLoad

__all__ = ["undrafted"]  # a fixture


def with_planes(folder: Path, **config: Any) -> Engine:
    engine = Engine.load(folder, EngineConfig(weights="planes", draft_with_planes=True, **config))
    assert isinstance(engine.draft_model, PlanesDrafter)
    engine.scheduler._drafter = Speculation(flat_s, engine.draft_model)
    return engine


def planes_of(engine: Engine) -> PlanesDrafter:
    assert isinstance(engine.draft_model, PlanesDrafter)
    return engine.draft_model


@pytest.mark.inner
@pytest.mark.parametrize("case", [*SOME_CONFIGS, "without prefix cache"])
def test_answers_are_those_without_guesses(case: str, tiny_llama: Path, undrafted: list[Completion]) -> None:
    config = CONFIGS[case]
    if case == "streamed":
        config = {"num_resident_layers": 3}  # the upper planes of all layers, and a lower one
    with with_planes(tiny_llama, **config) as engine:
        for _ in range(2):  # and from what the cache has
            assert exact(engine.generate(ASKED_PROMPTS, ASKED_PARAMS)) == exact(undrafted)
            check_all_is_free(engine)
        assert engine.metrics.draft_tokens


def test_a_step_that_is_cancelled_behind_guesses_leaves_exact_keys(tiny_llama: Path) -> None:
    """Two requests share the blocks of a prompt, and one computes its last token again, in the same block."""
    prompt, params = [7] * 32, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    with Engine.load(tiny_llama) as engine:
        expected = exact(engine.generate([[*prompt, 5, 6]], params))
    with with_planes(tiny_llama) as engine:
        engine.add(GenerationRequest([*prompt, 5], params, "first"))
        engine.step()
        for _ in range(3):
            engine.add(GenerationRequest(prompt, params, "second"))
            assert engine.step(aborted={"first", "second"}) == []
            engine.abort("second")
        engine.abort("first")
        assert exact(engine.generate([[*prompt, 5, 6]], params)) == expected
        check_all_is_free(engine)


def test_guesses_are_those_of_the_model_in_four_bits(tiny_llama: Path) -> None:
    """They read the exact keys and values of the text: of a prompt of one token there are none, so that the
    model that has 8 in all lower planes gives the same distribution, with activations in 8 bits."""
    with with_planes(tiny_llama, activations="int8") as engine:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        found: list[list[tuple[int, float]]] = []
        drafter = planes_of(engine)
        engine.generate([[5, 9]], params)  # all units were acquired
        propose = engine.scheduler._drafter.propose

        def ask(sequences: Any, num_tokens: int, room: int) -> Any:
            sequences = list(sequences)
            if sequences[0].num_tokens == 1:
                assert drafter.start(sequences) == sequences
                found.append(drafter.expand([Place(sequences[0])])[0])
                drafter.finish()
            return propose(sequences, num_tokens, room)

        engine.scheduler._drafter.propose = ask  # type: ignore[method-assign]
        engine.generate([[11]], params)
        for unit in engine.model.store.units:
            if unit.plane == "lower":
                buffer = engine.streamer.tiers.nearest.settled(unit)
                assert buffer is not None
                buffer.fill_(0x88)
        engine.scheduler._drafter.propose = propose  # type: ignore[method-assign]
        (in_four_bits,) = engine.generate(
            [[11]], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=4)
        )
        tops = in_four_bits.logprobs[0].top
    assert [token for token, _ in found[0]] == [token for token, _ in tops]


@pytest.mark.parametrize("multiplies_bytes", [True, False])
def test_what_a_pass_takes(multiplies_bytes: bool) -> None:
    """Beyond its reading, the arithmetic of 8-bit guesses, which is half of a step's where bytes are
    multiplied. Upper planes are half of the bytes, and a step of one token reads for 0.2 s."""
    layer = SimpleNamespace(num_bytes=100, is_resident=True, is_lower=False)
    plan: Any = SimpleNamespace(
        layers=[layer, SimpleNamespace(num_bytes=100, is_resident=True, is_lower=True)], kept_share=None
    )

    def predict(load: StepLoad) -> Any:
        assert load.is_alone
        terms = {"memory": 0.2, "arithmetic": 0.1 * load.num_tokens}
        return SimpleNamespace(terms=terms, products_s=max(terms.values()))

    share = guess_share(2, multiplies_bytes)
    assert pass_s(plan, predict, share, 1) == pytest.approx(0.1)
    assert pass_s(plan, predict, share, 9) == pytest.approx(0.1 + (0.4 if multiplies_bytes else 0.8))
    # A card keeps half of the lower planes, and what is shared comes with its upper ones, which it has.
    plan.layers, plan.kept_share = [SimpleNamespace(num_bytes=150, is_resident=True, is_lower=False)], 0.5
    plan.layers.append(SimpleNamespace(num_bytes=100, is_resident=False, is_lower=True))
    assert pass_s(plan, predict, share, 1) == pytest.approx(0.2 * 100 / 300)


def test_what_can_not_be_had_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--weights planes"):
        Engine.load(tiny_llama, EngineConfig(draft_with_planes=True))
    save_tiny_llama(tmp_path)
    with pytest.raises(CapacityError, match="some are streamed"):
        Engine.load(tmp_path, EngineConfig(weights="planes", draft_with_planes=True, num_resident_layers=1))
    with Engine.load(tmp_path, EngineConfig(weights="planes", num_resident_layers=1)) as engine:
        for has_gpu, advice in ((False, "Raise --host-memory"), (True, "Raise --device-memory")):
            with pytest.raises(CapacityError, match=advice):
                check_planes(engine.model, replace(engine.plan, has_gpu=has_gpu))
    with pytest.raises(ConfigError, match="--mtp on .* method planes"):
        EngineConfig(draft_with_planes=True, mtp="on")
