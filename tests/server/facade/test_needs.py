"""What models need that are not loaded, and what is refused before anything is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tiny_models import build

from penstock.errors import ConfigError
from penstock.memory.hardware import HardwareProfile
from penstock_server.facade import needs
from penstock_server.settings.settings import Settings

GIB = 1 << 30
MACHINE = HardwareProfile(2, 8 * GIB, 4 * GIB, 10.0, 100.0)


def test_a_server_of_several_models_refuses_what_a_plan_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it listens, and not when somebody first asks for the model."""
    build("LFM2", tmp_path)
    settings = [Settings(model=str(tmp_path))]
    monkeypatch.setattr(needs, "profile", lambda *_, **__: MACHINE)
    (found,) = needs.survey(settings, ()).needs
    assert found.architecture == "Lfm2ForCausalLM" and 0 < found.weights.num_bytes < found.resident_bytes
    with pytest.raises(ConfigError, match="max_model_len is 5000; the model was made for"):
        needs.survey([dataclasses.replace(settings[0], max_model_len=5000)], ())
