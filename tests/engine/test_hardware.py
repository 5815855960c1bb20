"""Free memory and cores, read from invented files."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import CapacityError
from penstock.memory.hardware import free_memory_bytes, num_physical_cores
from penstock.memory.pools import MemoryPool


def meminfo(folder: Path, available_kib: int) -> Path:
    path = folder / "meminfo"
    path.write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\n")
    return path


def test_without_a_limit_it_is_what_the_system_has(tmp_path: Path) -> None:
    assert free_memory_bytes(meminfo(tmp_path, 1000), tmp_path) == 1000 * 1024


@pytest.mark.parametrize(
    ("limit", "usage"),
    [
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ],
)
def test_a_cgroup_limit_counts_what_is_left_of_it(tmp_path: Path, limit: str, usage: str) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text("5000\n")
    (tmp_path / usage).write_text("1500\n")
    assert free_memory_bytes(meminfo(tmp_path, 1000), tmp_path) == 3500
    (tmp_path / usage).write_text("6000\n")
    assert free_memory_bytes(meminfo(tmp_path, 1000), tmp_path) == 0
    (tmp_path / limit).write_text("max\n")
    assert free_memory_bytes(meminfo(tmp_path, 1000), tmp_path) == 1000 * 1024


def test_there_is_at_least_one_core() -> None:
    assert num_physical_cores() >= 1


def test_a_pool_refuses_to_grow() -> None:
    pool = MemoryPool("test", 100)
    assert pool.allocate("a", 60).nbytes == 60
    with pytest.raises(CapacityError, match="b needs 41 bytes.*test budget of 100 has 40 left"):
        pool.allocate("b", 41)
    pool.allocate("b", 40)
    assert pool.used_bytes == 100
