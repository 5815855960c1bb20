"""The engine's life as the server sees it."""

from __future__ import annotations

from typing import Any

import pytest

from fakes import FakeAsyncEngine
from penstock import EngineStatus
from penstock.errors import EngineDead
from penstock_server.facade.engine import ServedEngine


def test_without_an_engine_nothing_is_known(engine: FakeAsyncEngine) -> None:
    fake: Any = engine
    served = ServedEngine(fake)
    engine.status = EngineStatus("loading", 1, 4)
    assert not served.is_ready and served.status.loaded_layers == 1
    with pytest.raises(EngineDead):
        served.loaded  # noqa: B018
