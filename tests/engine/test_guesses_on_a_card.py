"""What guesses beside a model on a pretended card: draft models and heads are computed there, within the
budget, and answers stay the same to the last bit."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dflash_folders import save_dflash
from eagle3_folders import save_model, save_speculators
from mtp_folders import save_with_head
from pretended_card import PretendedCard, engines, missing
from test_draft_model import flat_s
from test_engine import exact
from test_engine_on_a_card import check_nothing_is_left
from tiny_models import build

from conftest import save_byte_tokenizer
from penstock.config import EngineConfig
from penstock.drafters.dflash_drafter import DFlashDrafter
from penstock.drafters.draft_model import DraftModel
from penstock.drafters.eagle3_drafter import Eagle3Drafter
from penstock.drafters.eagle3_plan import PlannedEagle3
from penstock.drafters.mtp_drafter import MTPDrafter
from penstock.engine import Completion, Engine
from penstock.errors import CapacityError, ConfigError
from penstock.generation.drafting.speculation import Speculation
from penstock.generation.requests.generation_request import SamplingParams
from penstock.memory.cuda_lane import PIECES_BYTES
from penstock.memory.pages import PAGE
from penstock.memory.planning.plan import CUDA_CONTEXT_BYTES

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
        elif kind == "dflash":
            save_dflash(self.drafter, save_model(self.model), (0, 1, 2))
            self.config, self.kind = {"draft_model": str(self.drafter)}, DFlashDrafter
        else:
            self.drafter.mkdir()
            drafts = ("Llama", {"num_hidden_layers": 1}) if kind == "draft_model" else ("LFM2", {})
            for path, (name, sizes) in ((self.model, ("Llama", {})), (self.drafter, drafts)):
                save_byte_tokenizer(path)
                build(name, path, vocab_size=278, **sizes)
            self.config, self.kind = {"draft_model": str(self.drafter)}, DraftModel

    def load(self, **config: Any) -> Engine:
        """An engine whose drafter guesses whatever it costs."""
        engine = Engine.load(self.model, EngineConfig(**(CONFIG | self.config | config)))
        engine.scheduler._drafter = Speculation(flat_s, engine.draft_model)
        return engine

    def undrafted(self) -> list[Completion]:
        with Engine.load(self.model, EngineConfig(**(CONFIG | {"speculation": "off"}))) as engine:
            return engine.generate(PROMPTS, PARAMS)


@pytest.fixture(
    scope="module",
    params=["mtp", "eagle3", pytest.param("dflash", marks=pytest.mark.slow), "draft_model", "hybrid"],
)
def guessed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Guessed:
    return Guessed(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.inner
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


def test_the_budget_is_shared(guessed: Guessed, card: PretendedCard) -> None:
    """What guesses takes its memory first, the model's plan has the rest, and torch gives both no more."""
    budget = 700 * MIB
    with Engine.load(guessed.model, EngineConfig(**CONFIG, device_memory_bytes=budget)) as engine:
        assert engine.plan.device_budget_bytes == budget
    del engine
    with guessed.load(device_memory_bytes=budget) as engine:
        drafter = engine.draft_model
        assert drafter is not None and drafter.plan.at_home("device") and drafter.num_card_bytes > 0
        assert engine.plan.device_budget_bytes == budget - drafter.num_card_bytes
        limit = budget - CUDA_CONTEXT_BYTES + PIECES_BYTES
        # The limit is a share of the card, which torch rounds.
        assert card.memory.used_bytes < limit and abs(card.memory.limit_bytes - limit) < 4096
    del engine, drafter
    engines.forget_orders()
    check_nothing_is_left(card)
    assert card.memory.limit_bytes == card.memory.total_bytes


@pytest.mark.slow
def test_what_has_no_room_on_the_card(guessed: Guessed, card: PretendedCard) -> None:
    """A draft model and a head in a folder of its own are computed on the processor then, or where the config
    says so. A head that shares matrices with the model is refused."""
    expected = guessed.undrafted()
    if guessed.kind in (MTPDrafter, DFlashDrafter):
        with pytest.raises(ConfigError, match="largest matrices are those of the model"):
            guessed.load(draft_device="cpu")
        with pytest.raises(CapacityError, match="device memory"):
            guessed.load(device_memory_bytes=300 * MIB)
        check_nothing_is_left(card)
        return
    with guessed.load(draft_device="cpu") as engine:
        drafter = engine.draft_model
        assert drafter is not None and drafter.config.device == "cpu" and drafter.num_card_bytes == 0
        assert exact(engine.generate(PROMPTS, PARAMS)) == exact(expected)
        assert engine.metrics.draft_tokens
    del engine, drafter
    check_nothing_is_left(card)


def test_a_draft_model_moves_to_the_processor(card: PretendedCard, tmp_path: Path) -> None:
    """Where the card's budget is too small for it; and where it leaves the model too little, who loads it is
    told what to do."""
    guessed = Guessed("draft_model", tmp_path)
    with guessed.load() as engine:
        assert engine.draft_model is not None
        taken = engine.draft_model.plan.device_used_bytes
    del engine
    config = EngineConfig(**(CONFIG | guessed.config | {"num_resident_layers": None}))
    for shortage, device in ((0, "cuda:0"), (4096, "cpu")):
        drafter = DraftModel.load(guessed.drafter, replace(config, device_memory_bytes=taken - shortage))
        assert drafter.config.device == device
        drafter.close()
    del drafter
    check_nothing_is_left(card)
    with pytest.raises(
        CapacityError, match="The drafter takes .* of GPU memory: compute a draft model with --draft-device"
    ):
        guessed.load(device_memory_bytes=taken)


def test_an_eagle3_head_moves_to_the_processor(card: PretendedCard, tmp_path: Path) -> None:
    """Where the card's budget has no room for the model's hidden states, of which it guesses."""
    guessed = Guessed("eagle3", tmp_path)
    config = EngineConfig(**(CONFIG | guessed.config | {"num_resident_layers": None}))
    with closing(_opened(config)) as planned:
        taken = planned.plan.device_used_bytes
        assert planned.plan.has_gpu and taken <= planned.plan.device_budget_bytes
    for shortage, has_gpu in ((0, True), (PAGE, False)):
        with closing(_opened(replace(config, device_memory_bytes=taken - shortage))) as planned:
            assert planned.plan.has_gpu == has_gpu
    del planned
    check_nothing_is_left(card)


def _opened(config: EngineConfig) -> PlannedEagle3:
    planned = PlannedEagle3.open(config)
    assert planned is not None
    return planned


def test_a_model_without_room_in_ram_is_not_sent_to_the_processor(
    card: PretendedCard, tmp_path: Path
) -> None:
    """The card has what guesses, and RAM is short: the advice names RAM, since what guesses would take more
    of it there."""
    guessed = Guessed("draft_model", tmp_path)
    config = EngineConfig(**(CONFIG | guessed.config))
    drafter = DraftModel.load(guessed.drafter, config)
    taken = drafter.plan.host_used_bytes
    assert drafter.num_card_bytes and taken
    drafter.close()
    del drafter
    with pytest.raises(CapacityError, match="of RAM: leave --draft-model out") as refused:
        guessed.load(host_memory_bytes=taken + PAGE)
    assert refused.value.memory == "host" and "--draft-device" not in str(refused.value)
    assert "Raise --host-memory" in str(refused.value)


def test_upper_planes_of_the_model_itself(card: PretendedCard, tmp_path: Path) -> None:
    """They stay on the card, while lower planes are streamed, and guess with activations in 8 bits."""
    save_byte_tokenizer(tmp_path)
    build("Llama", tmp_path, vocab_size=278, num_hidden_layers=3)
    config = CONFIG | {"weights": "planes", "num_resident_layers": 2}  # of 6 planes 4
    with Engine.load(tmp_path, EngineConfig(**config | {"speculation": "off"})) as engine:
        expected = engine.generate(PROMPTS, PARAMS)
    assert not any(name.startswith("planes") and name[-1] == "1" for name in card.driver.num_launches)
    with Engine.load(tmp_path, EngineConfig(**config, draft_with_planes=True)) as engine:
        homes = [layer.home for layer in engine.plan.layers if not layer.is_lower]
        assert homes == ["device"] * 3 and "host" in engines.homes(engine)
        engine.scheduler._drafter = Speculation(flat_s, engine.draft_model)
        assert exact(engine.generate(PROMPTS, PARAMS)) == exact(expected)
        assert engine.metrics.draft_tokens
    assert any(name.startswith("planes") and name[-1] == "1" for name in card.driver.num_launches)
    del engine
    check_nothing_is_left(card)
