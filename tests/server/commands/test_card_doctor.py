"""The first minute on a card, on a pretended one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from pretended_card import engines, missing

from penstock.kernels.cuda import self_check
from penstock_server import cli
from penstock_server.commands import card_doctor, card_trial

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them take seconds on a pretended card; test_card_check.py has them."""
    chosen = [case for case in self_check.cases(1) if case.name in ("rope", "rms_norm of 96")]
    monkeypatch.setattr(self_check, "cases", lambda _: chosen)
    monkeypatch.setattr(card_doctor, "cases", lambda _: chosen)
    monkeypatch.setattr(card_doctor.nvrtc, "compile_kernels", lambda *_: engines.IMAGE)
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
    monkeypatch.setattr(card_trial, "CONFIG", card_trial.CONFIG | small)
    monkeypatch.setattr(card_trial, "PROMPTS", [[5, 9, 3]])


@pytest.mark.slow
@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize(("device", "num_cards"), [((), 1), (("--device", "cuda:1"), 2)])
def test_a_card_that_works(
    device: tuple[str, ...],
    num_cards: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second one of two, too, and then nothing is done on the first one."""
    monkeypatch.setattr(card_doctor, "_trial_in_a_process", card_trial.trial)
    rates = {"memory_gbps": 150.0, "host_to_device_gbps": 12.0, "int8_gops": 4900.0}
    monkeypatch.setattr(card_doctor, "device_rates", lambda *_: rates)
    file = tmp_path / "card.json"
    with engines.card_with_kernels(number=num_cards - 1, num_cards=num_cards) as card:
        arguments = ["--card", "--report", str(file), "--cache-dir", str(tmp_path / "cache"), *device]
        code = cli.main(["doctor", *arguments])
        assert not card.races.found and not card.strayed and card.driver.num_registered == 0
    text, report = capsys.readouterr().out, json.loads(file.read_text())
    assert code == 0, text
    assert "ok kernels    4 calls" in text and "nothing is wrong" in text
    assert report["machine"]["card"] == "Pretended GTX 1060" and report["rates"]["memory_gbps"] == 150.0
    assert report["rates"]["to the processor and back, us"] > 0 < report["rates"]["a launch, us"]
    assert list(report["model"].values()) == ["ok"] * 6 and report["kernels"]["mismatches"] == []
    assert not list((tmp_path / "cache").glob("experts/*")), "the trial's models are gone"


@pytest.mark.usefixtures("few_cases")
def test_a_card_that_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part tells what is wrong, and the others go on."""

    def no_rates(*_: object) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(card_doctor, "device_rates", no_rates)
    monkeypatch.setattr(card_doctor, "mismatches", lambda *_: ["rope: 1 of 2 numbers differ"])
    with engines.card_with_kernels():
        code = card_doctor.run_card_doctor(
            tmp_path, tmp_path / "card.json", lambda device, _: {"streamed": "prompt 0: other"}
        )
    text = capsys.readouterr().out
    assert code == 1 and "please send it in" in text
    for line in (
        "!  kernels    int8: rope: 1 of 2 numbers differ",
        "!  rates      RuntimeError: an illegal memory access",
        "!  model      streamed: prompt 0: other",
    ):
        assert line in text
    assert len(json.loads((tmp_path / "card.json").read_text())["kernels"]["mismatches"]) == 2


def test_the_trial_is_a_process_whose_launches_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[1:] == ["-m", "penstock_server.commands.card_trial", "cuda:1", "cache"]
        assert env["CUDA_LAUNCH_BLOCKING"] == "1"
        return subprocess.CompletedProcess(command, *results.pop())

    results = [(0, 'log\n{"streamed": "ok"}\n', ""), (-11, "", "trace\nSegmentation fault")]
    monkeypatch.setattr(subprocess, "run", run)
    assert "code -11: Segmentation fault" in card_doctor._trial_in_a_process("cuda:1", Path("cache"))["error"]
    assert card_doctor._trial_in_a_process("cuda:1", Path("cache")) == {"streamed": "ok"}


def test_no_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert cli.main(["doctor", "--card", "--report", str(tmp_path / "card.json")]) == 1
    assert "has no CUDA" in capsys.readouterr().out and not list(tmp_path.iterdir())
