"""The kernels of a card are compared with the reference: once for each card, kept, and loud."""

from __future__ import annotations

import json
import logging
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_cuda import COMPILER, EmulatedLauncher
from pretended_card import PretendedCard, engines, missing, pretend
from tiny_models import build
from torch import Tensor

from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.kernels import choose_kernels, on_a_card
from penstock.kernels.cuda import kept_check, self_check
from penstock.kernels.cuda.kept_check import check_card
from penstock.kernels.cuda.kernels import CudaKernels
from penstock.kernels.cuda.launcher import SIGNATURES, CudaLauncher
from penstock.kernels.int_mm import TorchKernels
from penstock.kernels.reference import ReferenceKernels

HOST = torch.device("cpu")
#: Kernels of the other activations; and one for tensor cores, and one for long contexts on larger cards.
OTHERS = {name for name in SIGNATURES if name.endswith("_1") and name not in ("gemv_1_1",)}
OTHERS |= {"combine_2", "merge_splits", "gemv_1_1"}


class Faulty(EmulatedLauncher):
    """A card on which one kernel writes one wrong number."""

    def __init__(self, name: str) -> None:
        super().__init__(1, finds_races=False)
        self._name = name

    def launch(self, name: str, grid: Any, num_threads: int, *values: object) -> None:
        super().launch(name, grid, num_threads, *values)
        if name == self._name:
            written = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
            written[0 if name == "rope" else -1].view(-1)[0] += 1


@pytest.mark.inner
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_each_kernel_is_checked_and_passes() -> None:
    launcher = EmulatedLauncher(1, finds_races=False)
    assert self_check.mismatches(CudaKernels(launcher, "int16"), HOST, "int16") == []
    assert set(SIGNATURES) - set(launcher.launched) <= OTHERS


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", ["gemv_2_2", "codes_gemv_1_2", "rms_norm", "rope", "attention_64_8"])
def test_a_single_wrong_number_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases of this kernel alone, since all of them take seconds here."""
    words = {"gemv": "2 tokens with INT8, 128", "codes": "1 tokens with INT4 (signed)"}
    word = words.get(name.split("_")[0], name.split("_")[0].replace("rms", "rms_norm of 96"))
    chosen = [case for case in self_check.cases(1) if word in case.name][:3]
    monkeypatch.setattr(self_check, "cases", lambda _: chosen)
    assert self_check.mismatches(CudaKernels(Faulty("none")), HOST, "int16") == []
    found = self_check.mismatches(CudaKernels(Faulty(name)), HOST, "int16")
    assert found and "differ, for example" in found[0]


def test_errors_and_other_shapes_are_mismatches(monkeypatch: pytest.MonkeyPatch) -> None:
    case = self_check.Case("a call", lambda kernels, device: kernels.activation(torch.ones(1, 2), "relu"))
    monkeypatch.setattr(self_check, "cases", lambda _: [case])

    class Broken(TorchKernels):
        def activation(self, *_: Any) -> Tensor:
            raise RuntimeError("an illegal memory access\nmore")

    class Other(TorchKernels):
        def activation(self, *_: Any) -> Tensor:
            return torch.full((1, 3), float("nan"))

    class Nothing(TorchKernels):
        def activation(self, *_: Any) -> Tensor:
            return torch.full((1, 2), float("nan"))

    for kernels, text in (
        (Broken(), "a call: an illegal memory access"),
        (Other(), "shape"),
        (Nothing(), "nan"),
    ):
        (found,) = self_check.mismatches(kernels, HOST, "int16")
        assert text in found


@pytest.fixture
def card() -> Iterator[PretendedCard]:
    if missing() is not None:
        pytest.skip(str(missing()))
    with pretend() as card:
        yield card


def test_fetching_is_checked_with_pinned_memory(card: PretendedCard) -> None:
    """As in service; and with the card's own where none can be pinned."""
    rows = torch.frombuffer(mmap.mmap(-1, 4096), dtype=torch.float32)
    for is_refused in (False, True):
        card.driver.refuses_to_pin = is_refused
        with self_check.seen_by_card(rows, card.device) as (there, address):
            assert (there is rows) == card.driver.is_registered(rows.data_ptr(), 4096) == (not is_refused)
            assert address == there.data_ptr() and card.memory.holds(address) == is_refused
        assert not card.driver.num_registered
    card.driver.refuses_to_pin = False
    kernels = CudaKernels(CudaLauncher(card.device, b"\x7fELF"))
    (fetch,) = (case for case in self_check.cases(1) if case.name == "fetch")
    assert torch.equal(fetch.call(kernels, card.device).cpu(), fetch.call(ReferenceKernels(), HOST))


def test_a_card_is_checked_once(card: PretendedCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(kept_check, "mismatches", lambda *arguments: calls.append(arguments) or ["wrong"])
    launcher: Any = EmulatedLauncher()
    for made, number in (("a", 1), ("a", 1), ("b", 2), ("a", 2)):
        assert check_card(launcher, card.device, "int16", made, tmp_path) == ["wrong"]
        assert len(calls) == number
    monkeypatch.setattr(kept_check, "driver_version", lambda: "another")
    check_card(launcher, card.device, "int16", "a", tmp_path)
    assert len(calls) == 3, "another driver"
    (tmp_path / kept_check.FILE).write_text("damaged")
    check_card(launcher, card.device, "int16", "a", tmp_path)
    check_card(launcher, card.device, "int16", "a", None)
    assert len(calls) == 5
    assert list(json.loads((tmp_path / kept_check.FILE).read_text()).values()) == [["wrong"]]
    properties = torch.cuda.get_device_properties(card.device)
    properties.uuid = "GPU-of-the-same-name"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    check_card(launcher, card.device, "int16", "a", tmp_path)
    assert len(calls) == 6, "another card"


def test_wrong_kernels_do_not_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch's serve, with the right answers, and the log says so loudly; who insists on ours is refused."""
    if missing() is not None:
        pytest.skip(str(missing()))
    build("Llama", tmp_path / "model", num_hidden_layers=2)
    expected = engines.answer(engines.load(tmp_path / "model", "cpu", kernels="reference"), num_prompts=1)
    with engines.card_with_kernels() as card:
        monkeypatch.setattr(on_a_card, "check_card", lambda *_: ["rope: 3 of 4 numbers differ"])
        with pytest.raises(ConfigError, match="rope: 3 of 4.*doctor --card.*--kernels native"):
            choose_kernels(EngineConfig(kernels="native"), card.device)
        with caplog.at_level(logging.ERROR):
            engine = engines.load(tmp_path / "model", max_num_batched_tokens=8)
        assert "compute wrong numbers" in caplog.text and "MUCH SLOWER" in caplog.text
        answers = engines.answer(engine, num_prompts=1)
        assert [each.token_ids for each in answers] == [each.token_ids for each in expected]
        assert not card.driver.num_launches
