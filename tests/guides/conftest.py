"""The guides' own code is scripts of `clients/ray`, which find each other by their folder."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(ROOT / "clients" / "ray"))
    return ROOT / "clients" / "ray"
