"""Progress where the user looks, and what the model's folder says of sampling."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from penstock.engine import Engine
from penstock.errors import CheckpointNotFound, CorruptFile
from penstock_server.loading import LoadProgress, load_engine
from penstock_server.settings import Settings


class Loaded:
    def __init__(self, folder: Path) -> None:
        self.folder = folder


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What Engine.load was called with; it reports two layers."""
    seen: dict[str, Any] = {}

    def load(model: str, config: Any, *, report_progress: Any, **rest: Any) -> Loaded:
        seen.update(model=model, config=config, **rest)
        for num_loaded in range(3):
            report_progress(num_loaded, 2)
        return Loaded(tmp_path)

    monkeypatch.setattr(Engine, "load", load)
    return seen


def test_engine_gets_the_settings(seen: dict[str, Any]) -> None:
    reports: list[tuple[int, int]] = []
    settings = Settings(model="m", offline=True, revision="v1", max_num_seqs=3)
    load_engine(settings, lambda loaded, total: reports.append((loaded, total)))
    assert (seen["model"], seen["offline"], seen["revision"]) == ("m", True, "v1")
    assert seen["config"].max_num_seqs == 3
    assert reports == [(0, 2), (1, 2), (2, 2)]


def test_defaults_come_from_generation_config(seen: dict[str, Any], tmp_path: Path) -> None:
    assert load_engine(Settings(model="m"))[1] == {}
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": 0.6, "top_k": 20, "eos_token_id": 2}')
    assert load_engine(Settings(model="m"))[1] == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_generation_config_is_told(
    seen: dict[str, Any], tmp_path: Path, text: str
) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CorruptFile, match="generation_config"):
        load_engine(Settings(model="m"))


def test_errors_of_loading_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise CheckpointNotFound("nothing there")

    monkeypatch.setattr(Engine, "load", load)
    with pytest.raises(CheckpointNotFound):
        load_engine(Settings(model="m"))


def test_a_log_gets_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    progress = LoadProgress("loading m")
    with caplog.at_level(logging.INFO):
        for num_loaded in range(81):
            progress(num_loaded, 80)
    progress.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"loading m: {num_loaded} of 80 layers" for num_loaded in (0, 20, 40, 60, 80)
    ]


def test_a_terminal_gets_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress = LoadProgress("loading m")
    progress(1, 4)
    progress(4, 4)
    progress.close()
    assert "loading m" in capsys.readouterr().err
