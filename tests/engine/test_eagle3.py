"""EAGLE-3 heads: they compute what the formula says, and answers stay the same."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from eagle3_folders import EAGLE_IDS, PlainEagle3, save_model, save_sglangs, save_speculators
from test_draft_model import flat_s
from test_drafts import ASKED_PARAMS, ASKED_PROMPTS, check_all_is_free
from test_engine import exact
from test_mtp import CASES, MEASURED, PARAMS, Heard

from penstock.config import EngineConfig
from penstock.drafters.eagle3_drafter import Eagle3Drafter
from penstock.drafters.eagle3_plan import PlannedEagle3, check_target, read_eagle3
from penstock.engine import Completion, Engine
from penstock.errors import CapacityError, ConfigError, UnsupportedModel
from penstock.generation.drafting.speculation import Speculation
from penstock.memory.pages import PAGE
from penstock.model.heads.eagle3 import ABSENT, Eagle3
from penstock.model.known_families import is_eagle3
from penstock.model.registry import open_model
from penstock.weights.checkpoints.formats import read_config


class Pair(NamedTuple):
    model: Path
    head: Path
    plain: PlainEagle3

    def load(self, **config: Any) -> tuple[Engine, Eagle3Drafter]:
        """The engine and its drafter, which guesses whatever it costs."""
        asked = {"draft_model": str(self.head), "allow_pickle": True, "device": "cpu"} | config
        engine = Engine.load(self.model, EngineConfig(**asked))
        assert isinstance(engine.draft_model, Eagle3Drafter)
        engine.scheduler._drafter = Speculation(flat_s, engine.draft_model)
        return engine, engine.draft_model


@pytest.fixture(scope="module", params=["SGLang's", "speculators"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("model")
    head = tmp_path_factory.mktemp("head") / "eagle3"
    save = save_sglangs if request.param == "SGLang's" else save_speculators
    return Pair(folder, head, save(head, save_model(folder)))


@pytest.fixture(scope="module")
def undrafted(pair: Pair) -> list[Completion]:
    with Engine.load(pair.model, EngineConfig(enable_prefix_caching=False, speculation="off")) as engine:
        return engine.generate(ASKED_PROMPTS, ASKED_PARAMS)


@pytest.mark.inner
def test_a_head_computes_its_formula(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each place, behind guesses too, and where the head's rows begin amid a text. Tokens that the head's
    vocabulary lacks are never guessed."""
    prompts = [[5, 9, 20] * 5, [7, 8, 30 + 1] * 9]
    engine, drafter = pair.load(kv_dtype="float32")
    with engine:
        heard = Heard(drafter, monkeypatch)
        engine.generate(prompts, PARAMS)
        engine.generate([prompts[1] + [5] * 10], PARAMS)  # of which the cache has a part
        assert {num for _, num, _, _ in heard} >= {0, 1, 2} and {first for _, _, first, _ in heard} > {1}
        for text, num_guesses, first, row in heard:
            expected = pair.plain.logits(text, num_guesses, first)
            found = row[pair.plain.tokens]
            # A guess behind guesses is computed from states that were rounded several times.
            assert (found - expected).abs().max() <= 5e-3 * (expected.max() - expected.min())
            assert (row == ABSENT).sum() == len(row) - len(found)


@pytest.mark.inner
@pytest.mark.parametrize(
    ("pair", "case"),
    [*(("SGLang's", case) for case in CASES), ("speculators", "streamed")],
    indirect=["pair"],
)
def test_answers_are_those_without_a_head(case: str, pair: Pair, undrafted: list[Completion]) -> None:
    engine, drafter = pair.load(**CASES[case])
    with engine:
        for _ in range(2):
            assert exact(engine.generate(ASKED_PROMPTS, ASKED_PARAMS)) == exact(undrafted)
            check_all_is_free(engine)
        assert engine.metrics.draft_tokens
        drafter._take_in()
        drafter._forget()
        assert drafter._blocks.pool.num_free == drafter._blocks.num_blocks


def test_a_head_has_its_memory_within_the_budget(pair: Pair) -> None:
    """And the model has what is left."""
    config = EngineConfig(device="cpu", allow_pickle=True)
    with Engine.load(pair.model, config, hardware=MEASURED) as engine:
        alone = engine.plan.host_budget_bytes
    config = EngineConfig(device="cpu", allow_pickle=True, draft_model=str(pair.head))
    with Engine.load(pair.model, config, hardware=MEASURED) as engine:
        assert engine.draft_model is not None
        assert alone - engine.draft_model.num_bytes <= engine.plan.host_budget_bytes < alone
        engine.generate([[5, 9, 20] * 5], PARAMS)
        assert engine.metrics.draft_tokens
    config = replace(config, num_kv_tokens=512)
    planned = PlannedEagle3.open(config)
    assert planned is not None
    taken = planned.plan.host_used_bytes
    planned.close()
    planned = PlannedEagle3.open(replace(config, host_memory_bytes=taken))
    assert planned is not None and planned.plan.host_used_bytes == taken
    planned.close()
    with pytest.raises(CapacityError, match=r"of host memory, and would not stay.*--host-memory"):
        PlannedEagle3.open(replace(config, host_memory_bytes=taken - PAGE))  # states have no room
    small = EngineConfig(
        device="cpu", allow_pickle=True, draft_model=str(pair.head), host_memory_bytes=1 << 16
    )
    with pytest.raises(CapacityError):
        Engine.load(pair.model, small)


def test_layers_are_read_as_each_program_counts_them() -> None:
    """vLLM counts the layers that were computed, SGLang names the layer; without a word both take the second,
    the middle and the fourth from the end."""
    base = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64, "num_attention_heads": 4,
        "num_hidden_layers": 1, "intermediate_size": 96, "vocab_size": 300, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 100,
    }  # fmt: skip
    assert Eagle3.read_spec(base).layers_of(32) == (1, 15, 28)
    vllms = base | {EAGLE_IDS: [2, 16, 29]}
    sglangs = base | {"eagle_config": {EAGLE_IDS: [1, 15, 28]}}
    assert Eagle3.read_spec(vllms).layers_of(32) == Eagle3.read_spec(sglangs).layers_of(40) == (1, 15, 28)
    with pytest.raises(UnsupportedModel, match="the model has 20"):
        Eagle3.read_spec(sglangs).layers_of(20)
    with pytest.raises(UnsupportedModel, match="norm_before_fc"):
        Eagle3.read_spec(base | {"norm_before_fc": True})
    assert is_eagle3(base) and not is_eagle3(base | {"architectures": ["LlamaForCausalLM"]})
    assert is_eagle3({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 100})


def test_what_can_not_be_had_is_refused(pair: Pair, tiny_llama: Path, tmp_path: Path) -> None:
    asked = {"draft_model": str(pair.head), "allow_pickle": True, "device": "cpu"}
    with pytest.raises(UnsupportedModel, match="after layers 0, 2, 3.* the model has 3"):
        Engine.load(tiny_llama, EngineConfig(**asked))  # type: ignore[arg-type]
    head = read_eagle3(read_config(pair.head))
    opened = open_model(pair.model)
    for numbers in ({"vocab_size": 300}, {"hidden_size": 128}):
        with pytest.raises(ConfigError, match="made for another model"):
            check_target("head", head, replace(opened.spec, **numbers))
    opened.store.close()
    with pytest.raises(UnsupportedModel, match="EAGLE-3 head, which guesses for another model"):
        open_model(pair.head, allow_pickle=True)
    with pytest.raises(ConfigError, match="no EAGLE-3 head"):
        config = EngineConfig(draft_model=str(tiny_llama), draft_with_eagle3=True)
        Engine.load(pair.model, config)
    with pytest.raises(ConfigError, match="name it"):
        EngineConfig(draft_with_eagle3=True)
    broken = tmp_path / "broken"
    shutil.copytree(pair.head, broken)
    told = json.loads((broken / "config.json").read_text())
    told.pop("eagle_config", None)
    (broken / "config.json").write_text(json.dumps(told | {EAGLE_IDS: [1, 2, 30]}))
    with pytest.raises(UnsupportedModel, match="after layers 0, 1, 29"):
        Engine.load(pair.model, EngineConfig(**asked | {"draft_model": str(broken)}))  # type: ignore[arg-type]
