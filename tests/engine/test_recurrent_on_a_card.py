"""Models with recurrent states on a pretended card: the processor's tokens, wherever layers lie, and the same
bits with guesses as without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from drafters import Forest, Oracle
from pretended_card import PretendedCard, engines, missing
from test_convert import Ids
from tiny_models import DISTINCT, RECURRENT, build, in_circles

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.generation.requests.generation_request import SamplingParams

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


#: The pretended card lacks operations of torch with which DeepSeek V4 chooses its keys.
ON_A_CARD = [each for each in DISTINCT if each in RECURRENT and each != "DeepSeek V4"]


@pytest.mark.parametrize("name", in_circles(ON_A_CARD, ["LFM2"]))
def test_layers_may_lie_anywhere(name: str, tmp_path: Path, card: PretendedCard) -> None:
    made, folder = tmp_path / "made", tmp_path / "model"
    made.mkdir()
    build(name, made)
    engines.convert_for_streaming(made, folder)
    expected = [each.token_ids for each in engines.answer(engines.load(folder, "cpu", kernels="native"))]
    found = []
    for num_resident in (0, None):
        engine = engines.load(folder, num_resident_layers=num_resident)
        assert engine.plan.state_bytes > 0
        assert engines.homes(engine) == ({"device"} if num_resident is None else {"host"})
        answers = engines.answer(engine)
        assert [each.token_ids for each in answers] == expected
        found.append(answers)
    assert found[0] == found[1], "to the last bit"
    assert not card.races.found


@pytest.mark.slow  # test_guesses_on_a_card.py has a hybrid in the inner circle
@pytest.mark.parametrize("name", ["LFM2", "Bamba", "Qwen3-Next"])
def test_guesses_change_no_bit(name: str, tmp_path: Path, card: PretendedCard) -> None:
    """Right and wrong ones, in trees: what was right is replayed on the card."""
    build(name, tmp_path)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=14, ignore_eos=True, logprobs=2)
    prompts = [[5, 9, 3, 7] * 4, [7] * 9]
    config = EngineConfig(device="cuda", num_resident_layers=1, **engines.SIZES)  # type: ignore[arg-type]
    with Engine.load(tmp_path, replace(config, speculation="off"), tokenizer=Ids()) as engine:
        expected = engine.generate(prompts, params)
    answers = {(3, *prompt): done.token_ids for prompt, done in zip(prompts, expected, strict=True)}
    for drafter in (Oracle(answers, 4, vocab_size=160), Forest(Oracle(answers, 4, 2, vocab_size=160))):
        with Engine.load(tmp_path, config, tokenizer=Ids(), drafter=drafter) as engine:
            assert engine.generate(prompts, params) == expected
            assert 0 < engine.metrics.accepted_tokens <= engine.metrics.draft_tokens
    assert not card.races.found
