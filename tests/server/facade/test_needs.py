"""What several models take: looked at as a plan looks at one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import build

from penstock.errors import ConfigError
from penstock.memory.hardware import DeviceProfile, HardwareProfile
from penstock_server.facade import needs
from penstock_server.settings.settings import Settings


def test_a_model_that_no_kernels_of_the_card_compute_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `penstock plan` refuses it, before a request waits for it. The processor serves it."""
    build("LFM2", tmp_path / "hybrid")
    each = [Settings(model=str(tmp_path / "hybrid"))]
    machine = HardwareProfile(4, 16 << 30, 16 << 30, 30.0, 500.0)
    card = DeviceProfile("a card", (6, 1), 6 << 30, 6 << 30, 154.0, 12.0, 4900.0, 6 << 30)
    monkeypatch.setattr(needs, "profile", lambda *_, **__: machine)
    assert needs.survey(each, ()).needs[0].weight_bytes > 0
    monkeypatch.setattr(needs, "profile", lambda *_, **__: replace(machine, device=card))
    with pytest.raises(ConfigError, match="don't compute layers with recurrent states"):
        needs.survey(each, ())
