"""Free memory and cores, read from invented files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.errors import CapacityError
from penstock.memory.hardware import (
    DiskProfile,
    Measure,
    ProductRates,
    free_memory_bytes,
    hardware_profile,
    num_physical_cores,
)
from penstock.memory.pools import MemoryPool
from penstock.memory.rates import BLOCKS, DEPTHS, measure_disk, memory_read_gbps


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


def test_the_least_limit_on_the_way_up_counts_and_page_cache_is_free(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "cgroup"
    own.write_text("0::/slice/unit\n")
    for folder, limit, usage in (("slice/unit", 9000, 1000), ("slice", 5000, 4000), ("", 9999, 0)):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "memory.max").write_text(str(limit))
        (root / folder / "memory.current").write_text(str(usage))
    assert free_memory_bytes(meminfo(tmp_path, 1000), root, own) == 1000
    (root / "slice" / "memory.stat").write_text("anon 5\ninactive_file 2500\n")
    assert free_memory_bytes(meminfo(tmp_path, 1000), root, own) == 3500
    own.write_text("0::/a/path/of/the/host\n")  # a container sees its own cgroup as the root
    assert free_memory_bytes(meminfo(tmp_path, 1000), root, own) == 9999


class Measured:
    """Counts what was measured."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def memory(self, num_threads: int) -> float:
        self.calls.append("memory")
        return 40.0

    def products(self, num_threads: int) -> ProductRates:
        self.calls.append("products")
        return (2, 45.0), (512, 1.0)

    def disk(self, folder: Path) -> DiskProfile:
        self.calls.append("disk")
        return DiskProfile(2.5, 4 << 20, 4, True)

    @property
    def measure(self) -> Measure:
        return Measure("native 1", self.memory, self.products, self.disk)


def test_rates_are_measured_once(tmp_path: Path) -> None:
    measured, cache = Measured(), tmp_path / "new" / "hardware.json"
    first = hardware_profile(tmp_path, measured.measure, cache)
    assert measured.calls == ["products", "memory", "disk"]
    second = hardware_profile(tmp_path, measured.measure, cache)
    assert len(measured.calls) == 3
    assert first.products == second.products == ((2, 45.0), (512, 1.0))
    # A product read faster than the sum.
    assert (first.memory_read_gbps, first.int8_gops, first.disk) == (45.0, 1024.0, second.disk)
    assert second.num_cores == num_physical_cores() and 0 < second.free_ram_bytes <= second.ram_bytes
    assert [path.name for path in cache.parent.iterdir()] == ["hardware.json"]
    hardware_profile(tmp_path, measured.measure, cache, is_forced=True)
    assert len(measured.calls) == 6
    hardware_profile(None, measured.measure)  # nowhere to keep it
    assert measured.calls[6:] == ["products", "memory"]
    del measured.calls[:]
    # As where a compiler was installed, or a new edition.
    hardware_profile(tmp_path, replace(measured.measure, kernels="native 2"), cache)
    hardware_profile(tmp_path, measured.measure, cache)
    assert measured.calls == ["products", "memory"]


def test_a_moment_that_others_took_does_not_count(tmp_path: Path) -> None:
    measure = replace(Measured().measure, products=lambda _: ((2, 30.0), (4, 15.0), (8, 22.0), (16, 9.0)))
    for _ in range(2):  # measured, and from the cache
        profile = hardware_profile(None, measure, tmp_path / "hardware.json")
        assert profile.products == ((2, 30.0), (4, 22.0), (8, 22.0), (16, 9.0))


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"format_version": 0, "rates": {}}', '{"format_version": 2, "rates": {"disk 1": 3}}'],
)
def test_a_broken_cache_is_measured_again(tmp_path: Path, content: str) -> None:
    cache, measured = tmp_path / "hardware.json", Measured()
    cache.write_text(content)
    hardware_profile(tmp_path, measured.measure, cache)
    assert measured.calls == ["products", "memory", "disk"]
    hardware_profile(tmp_path, measured.measure, cache)
    assert len(measured.calls) == 3


def test_the_disk_is_measured_by_reading_it(tmp_path: Path) -> None:
    """Without a model there, a file of its own, which it removes."""
    found = measure_disk(tmp_path, rounds=1, trial_bytes=1 << 20)
    assert found.read_gbps > 0 and found.block_bytes in BLOCKS and found.depth in DEPTHS
    assert not list(tmp_path.iterdir())
    (tmp_path / "model.safetensors").write_bytes(bytes(2 << 20))
    measure_disk(tmp_path, rounds=1, trial_bytes=1 << 20)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_memory_is_measured_and_torch_left_as_it_was() -> None:
    before = torch.get_num_threads()
    assert memory_read_gbps(2, num_bytes=1 << 20, rounds=1) > 0
    assert torch.get_num_threads() == before


def test_there_is_at_least_one_core() -> None:
    assert num_physical_cores() >= 1


def test_a_pool_refuses_to_grow() -> None:
    prepared: list[int] = []
    pool = MemoryPool("test", 640, prepare=lambda piece: prepared.append(piece.nbytes))
    first = pool.allocate("a", 384)
    assert first.nbytes == 384 and not first.any()
    with pytest.raises(CapacityError, match="b needs 320 bytes.*test budget of 640 has 256 left"):
        pool.allocate("b", 320)
    second = pool.allocate("b", 256)
    second.fill_(1)
    assert pool.used_bytes == 640 and prepared == [384, 256]
    assert not first.any(), "pieces overlap"
    with pytest.raises(ValueError, match="before"):
        pool.allocate("a", 0)
    with pytest.raises(ValueError, match="whole units"):
        pool.allocate("c", 1)
