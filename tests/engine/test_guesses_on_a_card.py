"""What guesses beside a model on a pretended card: draft models and heads are computed there, within the
budget, and answers stay the same to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from eagle3_folders import save_model, save_speculators
from mtp_folders import save_with_head
from pretended_card import PretendedCard, engines, missing
from test_draft_model import flat_s
from test_engine import exact
from test_engine_on_a_card import check_nothing_is_left
from tiny_models import build

from conftest import save_byte_tokenizer
from penstock.config import EngineConfig
from penstock.drafters.draft_model import DraftModel
from penstock.drafters.eagle3_drafter import Eagle3Drafter
from penstock.drafters.mtp_drafter import MTPDrafter
from penstock.engine import Completion, Engine
from penstock.generation.drafting.speculation import Speculation
from penstock.generation.requests.generation_request import SamplingParams

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

MIB = 1 << 20
PROMPTS = [[5, 9, 3] * 3, [7] * 6]
PARAMS = [
    SamplingParams(temperature=temperature, seed=7, max_tokens=6, ignore_eos=True, logprobs=2)
    for temperature in (0.0, 0.8)
]
CONFIG: dict[str, Any] = {
    "device": "cuda", "num_kv_tokens": 512, "max_num_seqs": 4, "max_num_batched_tokens": 40,
    "max_model_len": 64, "num_threads": 1, "num_resident_layers": 1, "allow_pickle": True,
    "enable_prefix_caching": False,
}  # fmt: skip


@pytest.fixture
def card() -> Iterator[PretendedCard]:
    with engines.card_with_kernels() as card:
        yield card


class Guessed:
    """A model's folder, what guesses for it, and which kind of drafter that is."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.model, self.drafter = folder / "model", folder / "drafter"
        self.model.mkdir()
        if kind == "mtp":
            save_with_head("GLM-4.5", self.model)
            self.config, self.kind = {"mtp": "on"}, MTPDrafter
        elif kind == "eagle3":
            save_speculators(self.drafter, save_model(self.model))
            self.config, self.kind = {"draft_model": str(self.drafter)}, Eagle3Drafter
        else:
            self.drafter.mkdir()
            for path, sizes in ((self.model, {}), (self.drafter, {"num_hidden_layers": 1})):
                save_byte_tokenizer(path)
                build("Llama", path, vocab_size=278, **sizes)
            self.config, self.kind = {"draft_model": str(self.drafter)}, DraftModel

    def load(self, **config: Any) -> Engine:
        """An engine whose drafter guesses whatever it costs."""
        engine = Engine.load(self.model, EngineConfig(**(CONFIG | self.config | config)))
        engine.scheduler._drafter = Speculation(flat_s, engine.draft_model)
        return engine

    def undrafted(self) -> list[Completion]:
        with Engine.load(self.model, EngineConfig(**(CONFIG | {"speculation": "off"}))) as engine:
            return engine.generate(PROMPTS, PARAMS)


@pytest.fixture(scope="module", params=["mtp", "eagle3", "draft_model"])
def guessed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Guessed:
    return Guessed(request.param, tmp_path_factory.mktemp(request.param))


def test_answers_are_those_without_guesses(guessed: Guessed, card: PretendedCard) -> None:
    expected = guessed.undrafted()
    with guessed.load() as engine:
        drafter = engine.draft_model
        assert isinstance(drafter, guessed.kind) and drafter.config.device == "cuda:0"
        assert exact(engine.generate(PROMPTS, PARAMS)) == exact(expected)
        assert engine.metrics.draft_tokens
    del engine, drafter
    engines.forget_orders()
    check_nothing_is_left(card)
