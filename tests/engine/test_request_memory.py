"""The memory that a plan leaves to requests."""

from __future__ import annotations

import pytest

from penstock.config import EngineConfig
from penstock.memory.hardware import HardwareProfile
from penstock.memory.planning.budgets import Budgets

GIB = 1 << 30


@pytest.mark.parametrize(("for_requests", "expected"), [(None, 18), (GIB // 2, 18), (GIB, 18), (3 * GIB, 16)])
def test_an_automatic_budget_leaves_room(for_requests: int | None, expected: int) -> None:
    """A tenth of 20 GiB is spare; half of it may be for requests."""
    hardware = HardwareProfile(4, 32 * GIB, 20 * GIB, 0.0, 0.0)
    budgets = Budgets(hardware, EngineConfig(request_bytes=for_requests))
    assert budgets.host == expected * GIB and not budgets.warnings()


def test_a_budget_that_leaves_none_is_said() -> None:
    hardware = HardwareProfile(4, 32 * GIB, 20 * GIB, 0.0, 0.0)
    for for_requests, is_said in ((2 * GIB, False), (3 * GIB, True)):
        config = EngineConfig(host_memory_bytes=18 * GIB, request_bytes=for_requests)
        assert bool(Budgets(hardware, config).warnings()) == is_said
