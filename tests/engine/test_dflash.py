"""DFlash heads: a block is what the formula says, and answers stay the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from dflash_folders import BLOCK, MASK, PlainDFlash, save_dflash
from eagle3_folders import save_model
from safetensors.torch import load_file, save_file
from test_draft_model import flat_s
from test_drafts import ASKED_PARAMS, ASKED_PROMPTS, check_all_is_free
from test_engine import exact
from test_families import dequantized
from test_mtp import MEASURED, PARAMS
from tiny_models import build
from torch import Tensor

from conftest import save_byte_tokenizer
from penstock.config import EngineConfig
from penstock.drafters.dflash_drafter import DFlashDrafter
from penstock.drafters.dflash_plan import PlannedDFlash, check_target, read_dflash
from penstock.engine import Completion, Engine
from penstock.errors import CapacityError, ConfigError, InvalidConfig, UnsupportedModel
from penstock.generation.drafting.asking import Place
from penstock.generation.drafting.expectation import assumed_dflash, expected
from penstock.generation.drafting.speculation import Speculation
from penstock.memory.pages import PAGE
from penstock.model.heads.dflash import DFlash
from penstock.model.registry import open_model
from penstock.weights.checkpoints.formats import read_config


class Pair(NamedTuple):
    model: Path
    head: Path
    plain: PlainDFlash

    def load(self, **config: Any) -> tuple[Engine, DFlashDrafter]:
        """The engine and its drafter, which guesses whatever it costs."""
        engine = Engine.load(self.model, EngineConfig(draft_model=str(self.head), device="cpu", **config))
        assert isinstance(engine.draft_model, DFlashDrafter)
        engine.scheduler._drafter = Speculation(flat_s, engine.draft_model)
        return engine, engine.draft_model


def make(factory: pytest.TempPathFactory, kind: str) -> Pair:
    folder, head = factory.mktemp("model"), factory.mktemp("head") / "dflash"
    if kind == "dense":
        return Pair(folder, head, save_dflash(head, save_model(folder), (0, 1, 2)))
    save_byte_tokenizer(folder)
    hybrid = dequantized(build("Qwen3.5", folder, vocab_size=278), folder)
    return Pair(folder, head, save_dflash(head, hybrid, (0, 2)))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make(tmp_path_factory, "dense")


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make(tmp_path_factory, request.param)


@pytest.fixture(scope="module")
def undrafted(pair: Pair) -> list[Completion]:
    with Engine.load(pair.model, EngineConfig(enable_prefix_caching=False, speculation="off")) as engine:
        return engine.generate(ASKED_PROMPTS, ASKED_PARAMS)


#: A text, the place from which the head knows it, the block's likeliest tokens and their logits.
Heard = list[tuple[list[int], int, Tensor, Tensor]]


def heard_of(drafter: DFlashDrafter, monkeypatch: pytest.MonkeyPatch) -> Heard:
    """What a head computes from now on."""
    heard, guess = Heard(), drafter._guess

    def record(twins: list[Any]) -> None:
        guess(twins)
        for twin in twins:
            sequence = twin.sequence()
            block = drafter._guessed[sequence.sequence_id]
            heard.append((list(sequence.token_ids), twin.first - 1, block.tokens, block.logits))

    monkeypatch.setattr(drafter, "_guess", record)
    return heard


def check_formula(heard: Heard, plain: PlainDFlash) -> None:
    for text, first, tokens, logits in heard:
        expected = plain.logits(text, first)
        size = 5e-3 * (expected.max() - expected.min())
        assert (logits - expected.gather(1, tokens)).abs().max() <= size
        assert (logits - expected.topk(tokens.shape[1]).values).abs().max() <= size


def test_a_block_is_what_the_formula_says(dense: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the head knows a text from its middle. Guesses at a depth are the block's at that depth."""
    engine, drafter = dense.load(kv_dtype="float32")
    with engine:
        heard, depths = heard_of(drafter, monkeypatch), set[int]()
        expand = drafter.expand

        def watch(places: list[Place]) -> list[list[tuple[int, float]]]:
            answers = expand(places)
            for place, answer in zip(places, answers, strict=True):
                branch = drafter._twins[place.sequence.sequence_id].branches.get(place.node)
                if branch is not None:
                    depth = branch.text.num_tokens - place.sequence.num_tokens
                    block = drafter._guessed[place.sequence.sequence_id]
                    assert [token for token, _ in answer] == block.tokens[depth, : len(answer)].tolist()
                    depths.add(depth)
            return answers

        monkeypatch.setattr(drafter, "expand", watch)
        engine.generate([[5, 9, 20] * 5, [7, 8, 31] * 9], PARAMS)
        engine.generate([[7, 8, 31] * 9 + [5] * 10], PARAMS)  # of which the cache has a part
        assert depths == set(range(BLOCK - 1))
        assert {first for _, first, _, _ in heard} > {0} and len(heard) > 10
        check_formula(heard, dense.plain)


@pytest.mark.slow
def test_a_hybrid_has_the_formulas_blocks(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, drafter = pair.load(kv_dtype="float32")
    with engine:
        heard = heard_of(drafter, monkeypatch)
        engine.generate([[5, 9, 20] * 5, [7, 8, 31] * 9], PARAMS)
        assert heard
        check_formula(heard, pair.plain)


CASES: dict[str, dict[str, Any]] = {
    "together": {},
    "chunked prompts beside": {"max_num_batched_tokens": 40},
    "two at a time": {"max_num_seqs": 2},
    "streamed": {"num_resident_layers": 1},
    "preemptions": {"num_kv_tokens": 192, "max_model_len": 190},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_without_a_head(case: str, pair: Pair, undrafted: list[Completion]) -> None:
    """Greedy and drawn, with grammars and penalties."""
    engine, drafter = pair.load(**CASES[case])
    with engine:
        for _ in range(2):
            assert exact(engine.generate(ASKED_PROMPTS, ASKED_PARAMS)) == exact(undrafted)
            check_all_is_free(engine)
        assert engine.metrics.draft_tokens
        assert (engine.metrics.num_preemptions > 0) == (case == "preemptions")
        drafter._take_in()
        drafter._forget()
        assert drafter._blocks.pool.num_free == drafter._blocks.num_blocks


@pytest.mark.slow
def test_a_head_has_its_memory_within_the_budget(dense: Pair) -> None:
    config = EngineConfig(device="cpu", draft_model=str(dense.head))
    with Engine.load(dense.model, EngineConfig(device="cpu"), hardware=MEASURED) as engine:
        alone = engine.plan.host_budget_bytes
    with Engine.load(dense.model, config, hardware=MEASURED) as engine:
        assert engine.draft_model is not None
        assert alone - engine.draft_model.num_bytes <= engine.plan.host_budget_bytes < alone
    config = replace(config, num_kv_tokens=512)
    planned = PlannedDFlash.open(config)
    assert planned is not None
    taken = planned.plan.host_used_bytes
    planned.close()
    planned = PlannedDFlash.open(replace(config, host_memory_bytes=taken))
    assert planned is not None and planned.plan.host_used_bytes == taken
    planned.close()
    with pytest.raises(CapacityError, match=r"of host memory, and would not stay.*--host-memory"):
        PlannedDFlash.open(replace(config, host_memory_bytes=taken - PAGE))


@pytest.mark.slow
def test_one_pass_is_the_price_of_all_levels() -> None:
    """A pass takes half a step's time, which its first guess alone would hardly be worth."""
    config = EngineConfig(max_guesses=15)
    found = expected(assumed_dflash(lambda num: 0.5 * num, 15), 1, lambda num: 1.0, config)
    assert found.drafting_s == 0.5 and found.num_levels > 3 and found.num_gained > 3


@pytest.mark.slow
def test_heads_of_other_models_are_refused(dense: Pair, tiny_llama: Path, tmp_path: Path) -> None:
    asked = EngineConfig(draft_model=str(dense.head), device="cpu")
    with pytest.raises(UnsupportedModel, match="made for 4; the model has 3"):
        Engine.load(tiny_llama, asked)
    head, opened = read_dflash(read_config(dense.head)), open_model(dense.model)
    others: list[dict[str, Any]] = [{"vocab_size": 300}, {"hidden_size": 128}]
    for numbers in others:
        with pytest.raises(ConfigError, match="made for another model"):
            check_target("head", head, replace(opened.spec, **numbers))
    with pytest.raises(UnsupportedModel, match="layers 0, 1, 2"):
        check_target("head", head, replace(opened.spec, num_layers=5))
    opened.store.close()
    with pytest.raises(UnsupportedModel, match="a DFlash head, which guesses for another model"):
        open_model(dense.head)
    with pytest.raises(ConfigError, match="no EAGLE-3 head"):
        Engine.load(dense.model, replace(asked, draft_with_eagle3=True))

    def changed(change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> EngineConfig:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(dense.head, folder)
        told = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        change(told, tensors)
        (folder / "config.json").write_text(json.dumps(told))
        save_file(tensors, folder / "model.safetensors")
        return replace(asked, draft_model=str(folder))

    second = "layers.0.attention_conv.base_kernel"
    with pytest.raises(UnsupportedModel, match=f"{second} is a tensor of a DFlash 2 head"):
        kernel = torch.zeros(2, 2, 64)
        Engine.load(dense.model, changed(lambda told, tensors: tensors.update({second: kernel})))
    with pytest.raises(InvalidConfig, match="block_size"):
        Engine.load(dense.model, changed(lambda told, tensors: told.update(block_size=1)))
    with pytest.raises(InvalidConfig, match="mask_token_id"):
        Engine.load(dense.model, changed(lambda told, tensors: told["dflash_config"].pop("mask_token_id")))
    with pytest.raises(UnsupportedModel, match="layers 0, 1, 9"):
        Engine.load(
            dense.model,
            changed(lambda told, tensors: told["dflash_config"].update(target_layer_ids=[0, 1, 9])),
        )


@pytest.mark.slow
def test_layers_that_are_read_without_a_word() -> None:
    base = {
        "architectures": ["DFlashDraftModel"], "hidden_size": 64, "num_attention_heads": 4,
        "num_hidden_layers": 5, "intermediate_size": 96, "vocab_size": 300, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 100, "block_size": 16, "dflash_config": {"mask_token_id": MASK},
    }  # fmt: skip
    assert DFlash.read_spec(base).layers_of(36) == (1, 9, 17, 25, 33)  # as in Qwen3-8B-DFlash-b16
    assert DFlash.read_spec(base | {"num_hidden_layers": 1}).layers_of(36) == (18,)
