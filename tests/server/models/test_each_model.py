"""From settings to models: several words, and folders of models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock_server.models.each_model import each_model
from penstock_server.settings.settings import Settings
from penstock_server.settings.speculative_config import SpeculativeConfig

MTP = SpeculativeConfig.parse('{"method": "mtp"}')


def names(**settings: Any) -> list[str]:
    return [each.model_names[0] for each in each_model(Settings(**settings))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b", "owner/a"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for name in ("c.gguf", "mmproj-c.gguf", "d-00001-of-00002.gguf", "d-00002-of-00002.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    return tmp_path


def test_a_folder_of_models(folder: Path) -> None:
    assert names(model=str(folder)) == ["b", "c", "d-00001-of-00002", "owner/a"]
    assert names(models=(str(folder / "b"), "org/other")) == ["b", "org/other"]


def test_a_gguf_file_beside_models_is_one_of_them(folder: Path) -> None:
    (folder / "d-00001-of-00002.gguf").unlink()
    assert names(model=str(folder)) == ["b", "c", "owner/a"]


def test_folders_that_may_not_be_read_are_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk's lost+found is root's."""
    for name in ("lost+found", "owner/secret"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text("{}")
    denied = {folder / "lost+found", folder / "owner/secret"}
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path not in denied and real(path, mode))
    assert names(model=str(folder)) == ["b", "c", "d-00001-of-00002", "owner/a"]


def test_guesses_out_of_texts_are_for_all_models() -> None:
    config = SpeculativeConfig.parse('{"method": "ngram"}')
    assert names(models=("a", "b"), speculative_config=config) == ["a", "b"]


def test_a_model_is_no_folder_of_models(folder: Path) -> None:
    assert names(model=str(folder / "b")) == ["b"]
    assert names(model=str(folder / "empty")) == ["empty"], "opening it tells what is missing"
    assert names(model="org/name") == ["org/name"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"models": ("a", "a")}, "two of the models have the name 'a'"),
        ({"models": ("a", "b"), "served_model_name": ("c",)}, "--served-model-name is about one model"),
        ({"models": ("a", "b"), "draft_model": "c"}, "--draft-model is about one"),
        ({"models": ("a", "b"), "speculative_config": MTP}, "--speculative-config is about one"),
        ({"models": ("a", "b"), "nodes": 2}, "--nodes .* several models.*name one"),
        ({"models": ("a", "b"), "pin": ("c",)}, "--pin c.*these are a, b"),
        ({"models": ("a", "b"), "model": "c"}, "leave one of the two out"),
        ({"model": "a", "pin": ("a",)}, "--pin is for one of several"),
    ],
)
def test_what_contradicts_itself(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        each_model(Settings(**settings))
