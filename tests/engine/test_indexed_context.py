"""Models whose attention chooses keys by an indexer. test_families.py and test_invariance.py have GLM-5,
whose layers share a choice, among all models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_convert import Ids
from test_families import MAX_LEN, TOLERANCE, Model, dequantized, oracle_logits
from test_formats_in import edit_config
from tiny_models import VOCAB_SIZE, build

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.errors import ConfigError, InvalidConfig
from penstock.generation.requests.generation_request import SamplingParams
from penstock.goes_with import Feature, refused
from penstock.model.attention import chosen_keys, indexer
from penstock.model.attention.chosen_keys import best
from penstock.model.registry import open_model

LIMIT = 20
TEXT = torch.randint(3, VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(1)).tolist()
FLOAT32 = EngineConfig(kv_dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("indexed") / "model"
    build("DeepSeek V3.2", folder)
    return folder


def test_keys_are_those_that_transformers_chooses(tmp_path: Path) -> None:
    """Also where attention to all keys is something else."""
    expected = oracle_logits(dequantized(build("DeepSeek V3.2", tmp_path / "a"), tmp_path / "a"), [TEXT])
    tolerance = TOLERANCE["float32"] * float(expected.max() - expected.min())
    model = Model(tmp_path / "a", FLOAT32)
    mine = model.all_logits(model.sequences([TEXT]))
    assert float((mine - expected).abs().max()) <= tolerance
    edit_config(tmp_path / "a", index_topk=MAX_LEN)
    model = Model(tmp_path / "a", FLOAT32)
    to_all = model.all_logits(model.sequences([TEXT]))
    assert torch.equal(to_all[:LIMIT], mine[:LIMIT])
    assert float((to_all - expected)[LIMIT:].abs().max()) > 4 * tolerance


def test_parts_of_scores_and_of_tokens_change_no_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(folder, EngineConfig())
    expected = model.all_logits(model.sequences([TEXT]))
    monkeypatch.setattr(chosen_keys, "MOST_NUMBERS", 1000)
    monkeypatch.setattr(indexer, "MOST_NUMBERS", 1000)
    monkeypatch.setattr(indexer, "PIECE", 13)
    assert torch.equal(model.all_logits(model.sequences([TEXT])), expected)


@pytest.mark.parametrize("most", [1, 5, 12])
def test_of_equal_scores_the_earlier_key_is_chosen(most: int) -> None:
    scores = torch.randint(0, 4, (40, 17), generator=torch.Generator().manual_seed(most)).float()
    seen = torch.arange(40) % 6 + 12
    chosen = best(scores, seen, most).tolist()
    for row, count, found in zip(scores.tolist(), seen.tolist(), chosen, strict=True):
        assert found == sorted(sorted(range(count), key=lambda place: -row[place])[:most])


def test_longer_texts_than_the_choice_are_served(folder: Path) -> None:
    """The whole context, with drafts of repeated text, chunks and a prefix that was computed before."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    config = EngineConfig(max_num_batched_tokens=16)
    with Engine.load(folder, replace(config, speculation="off"), tokenizer=Ids()) as engine:
        assert engine.max_model_len == engine.spec.max_position_embeddings > MAX_LEN
        expected = [engine.generate([TEXT[:size]], params)[0].token_ids for size in (60, 25)]
    with Engine.load(folder, config, tokenizer=Ids()) as engine:
        assert [each.token_ids for each in engine.generate([TEXT, TEXT[:25]], params)] == expected
        assert engine.generate([TEXT], params)[0].token_ids == expected[0]
        assert engine.metrics.prefix_cache_hits


def test_a_shared_choice_needs_one_before(tmp_path: Path) -> None:
    build("GLM-5", tmp_path)
    spec = open_model(tmp_path).spec
    assert spec.layers_without_choice == {1}
    (reason,) = refused({Feature.NODES, *spec.features}, spec.architecture)
    assert "the choice is on one machine" in reason
    with pytest.raises(ConfigError, match="latent is not stored as int8"):
        spec.kv_layout("int8")
    edit_config(tmp_path, indexer_types=["shared", "full"])
    with pytest.raises(InvalidConfig, match="full for the first one"):
        open_model(tmp_path)
