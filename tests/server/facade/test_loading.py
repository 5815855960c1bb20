"""The settings reach the engine, and the progress the user."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import measure
from penstock.engine import Engine
from penstock.errors import CheckpointNotFound, EngineDead
from penstock.kernel_tuning import KernelTuning
from penstock.memory.hardware import DiskProfile, capacities
from penstock_server.commands.planning.plan_report import profile
from penstock_server.facade import loading, machine
from penstock_server.facade.loading import LoadProgress, load_engine
from penstock_server.settings.settings import Settings


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What Engine.load was called with; it reports two layers."""
    seen: dict[str, Any] = {}

    def find(model: str, revision: str | None, offline: bool, allow_pickle: bool) -> Path:
        seen.update(model=model, revision=revision, offline=offline)
        return tmp_path

    def load(folder: Path, config: Any, *, report_progress: Any, **rest: Any) -> None:
        seen.update(folder=folder, config=config, **rest)
        for num_loaded in range(3):
            report_progress(num_loaded, 2)

    monkeypatch.setattr(loading, "find_model", find)
    monkeypatch.setattr(Engine, "load", load)
    return seen


def test_engine_gets_the_settings(seen: dict[str, Any], tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    settings = Settings(
        model="m", offline=True, revision="v1", max_num_seqs=3, cache_dir=tmp_path / "nothing known"
    )
    load_engine(settings, lambda loaded, total: reports.append((loaded, total)))
    assert (seen["model"], seen["offline"], seen["revision"]) == ("m", True, "v1")
    assert seen["folder"].is_dir() and seen["config"].max_num_seqs == 3
    assert seen["hardware"].memory_read_gbps > 0 and seen["hardware"].disk is None  # nothing there to read
    assert reports == [(0, 2), (1, 2), (2, 2)]


def test_the_disk_is_the_one_that_plans_know(
    seen: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a folder whose files are too small to measure the disk with, as `penstock plan` has it."""
    (tmp_path / "model-layer-00000.safetensors").write_bytes(bytes(5000))
    disk = DiskProfile(1.5, 4 << 20, 4, True)
    settings = Settings(model="m", cache_dir=tmp_path / "cache", kernel_tuning=KernelTuning())
    monkeypatch.setattr(measure, "measure_disk", lambda _: disk)
    assert profile(settings, tmp_path).disk == disk
    monkeypatch.setattr(measure, "measure_disk", None)
    load_engine(settings)
    assert seen["hardware"].disk == disk


def test_rates_of_a_busy_machine_are_handed_on(
    seen: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    busy = replace(capacities(), others_share=0.43)
    load_engine(Settings(model="m"), hardware=busy)
    assert seen["hardware"] == busy
    assert "took 43%" not in caplog.text, "the plan's lines tell it, and once is enough"


def test_loading_ends_if_its_progress_is_refused(seen: dict[str, Any]) -> None:
    def report(num_loaded: int, num_total: int) -> None:
        if num_loaded == 1:
            raise EngineDead("stop")

    with pytest.raises(EngineDead):
        load_engine(Settings(model="m", kernel_tuning=KernelTuning()), report)


def test_errors_of_loading_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(*_: Any) -> None:
        raise CheckpointNotFound("nothing there")

    monkeypatch.setattr(loading, "find_model", find)
    with pytest.raises(CheckpointNotFound):
        load_engine(Settings(model="m"))


def test_a_cache_that_may_not_be_read_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service often has the home folder of somebody else."""

    def stat(path: Any, **_: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    measured = capacities()
    with monkeypatch.context() as denied:
        denied.setattr(os, "stat", stat)
        assert loading.find_converted(tmp_path, "owner/name") is None
        denied.setattr(machine, "measure_hardware", lambda *_: measured)
        assert profile(Settings(model="m", cache_dir=tmp_path), None) is measured


def test_a_log_gets_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    progress = LoadProgress("loading m")
    with caplog.at_level(logging.INFO):
        progress(0, 80)  # a leader waits for its workers, and says so now and then
        progress(0, 80)
        for num_loaded in range(81):
            progress(num_loaded, 80)
    progress.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"loading m: {num_loaded} of 80 layers" for num_loaded in (0, 20, 40, 60, 80)
    ]


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress = LoadProgress("loading m")
    progress(1, 4)
    progress(4, 4)
    progress.close()
    assert "loading m" in capsys.readouterr().err


@pytest.mark.inner
def test_convert_first_and_only_once(tiny_llama: Path, tmp_path: Path) -> None:
    settings = Settings(model=str(tiny_llama), convert_to=tmp_path / "out", resident_layers=1)
    with load_engine(settings) as engine:
        assert all(engine.model.store.contiguous_unit(key) for key in engine.model.store.units)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.safetensors")}
    with load_engine(settings):
        pass
    assert before == {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.safetensors")}


def test_streaming_what_must_be_quantized_is_said_loudly(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with load_engine(Settings(model=str(tiny_llama), resident_layers=1)):
        assert "2 of 3 layers" in caplog.text and "penstock convert" in caplog.text
    caplog.clear()
    with load_engine(Settings(model=str(tiny_llama))):
        assert "penstock convert" not in caplog.text
