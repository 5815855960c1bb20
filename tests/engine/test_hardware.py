"""Free memory and cores, read from invented files."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import CapacityError
from penstock.memory import kept_rates, machine_rates, rates
from penstock.memory.hardware import (
    CROSSING_S,
    DeviceProfile,
    DiskProfile,
    ProductRates,
    free_memory_bytes,
    num_physical_cores,
)
from penstock.memory.machine_rates import Measure, hardware_profile, kept_shares
from penstock.memory.other_work import Moment
from penstock.memory.pools import MemoryPool
from penstock.memory.rates import (
    BLOCKS,
    DEPTHS,
    Reader,
    is_measurable,
    measure_disk,
    memory_read_gbps,
    pieces_at,
)


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


V2_STAT = """anon 100
file 900
shmem 50
file_mapped 0
file_dirty 30
file_writeback 20
inactive_anon 70
active_anon 30
inactive_file 400
active_file 300
unevictable 150
slab_reclaimable 60
slab_unreclaimable 40
"""
#: The lines without total_ are the cgroup's own, and leave those inside it out.
V1_STAT = """cache 90
dirty 1
writeback 1
inactive_file 4
active_file 3
total_cache 900
total_shmem 50
total_dirty 30
total_writeback 20
total_inactive_anon 70
total_active_anon 30
total_inactive_file 400
total_active_file 300
total_unevictable 150
"""


@pytest.mark.parametrize(
    ("folder", "names", "stat", "free"),
    [
        # 2000 - (1200 - (400 + 300 - 30 - 20) - 60), and v1 counts no slab.
        (".", ("memory.max", "memory.current"), V2_STAT, 1510),
        ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), V1_STAT, 1450),
    ],
)
def test_what_the_kernel_takes_back_is_free(
    tmp_path: Path, folder: str, names: tuple[str, str], stat: str, free: int
) -> None:
    """Page cache that was read twice, too; but neither pages that have to be written, nor shared memory, nor
    locked pages."""
    (tmp_path / folder).mkdir(exist_ok=True)
    for name, content in zip((*names, "memory.stat"), ("2000", "1200", stat), strict=True):
        (tmp_path / folder / name).write_text(content)
    assert free_memory_bytes(meminfo(tmp_path, 1000), tmp_path, tmp_path / "own") == free


def test_pages_that_must_be_written_first_are_not_free(tmp_path: Path) -> None:
    """More of them than of clean ones, since counts of the kernel are a little late."""
    for name, content in (
        ("memory.max", "2000"),
        ("memory.current", "1200"),
        ("memory.stat", "inactive_file 100\nactive_file 0\nfile_dirty 90\nfile_writeback 40\n"),
    ):
        (tmp_path / name).write_text(content)
    assert free_memory_bytes(meminfo(tmp_path, 1000), tmp_path, tmp_path / "own") == 800


def test_a_cgroup_is_slowed_down_beyond_its_high_mark(tmp_path: Path) -> None:
    for name, content in (("memory.max", "max"), ("memory.high", "1000"), ("memory.current", "300")):
        (tmp_path / name).write_text(content)
    own = tmp_path / "own"
    assert free_memory_bytes(meminfo(tmp_path, 1000), tmp_path, own) == 700
    (tmp_path / "memory.max").write_text("900")
    assert free_memory_bytes(meminfo(tmp_path, 1000), tmp_path, own) == 600


def test_a_controller_that_shares_its_hierarchy_is_found(tmp_path: Path) -> None:
    own, inner = tmp_path / "own", tmp_path / "memory" / "unit"
    own.write_text("3:cpu,cpuacct:/other\n2:hugetlb,memory:/unit\n0::/\n")
    inner.mkdir(parents=True)
    (inner / "memory.limit_in_bytes").write_text("5000")
    (inner / "memory.usage_in_bytes").write_text("1000")
    assert free_memory_bytes(meminfo(tmp_path, 1000), tmp_path, own) == 4000


def beside(share: float) -> Callable[[], Moment]:
    """A clock: a second from look to look, in which other work takes `share` of the cores."""
    busy_s = share * num_physical_cores()
    return (Moment(float(second), second * busy_s, 0.0) for second in itertools.count()).__next__


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
        return Measure("native 1", self.memory, self.products, self.disk, now=beside(0.0))


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


def test_kept_rates_say_since_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest rate counts, and rates that were just measured are not kept ones."""
    cache = tmp_path / "hardware.json"
    monkeypatch.setattr("time.time", lambda: 1000.0)
    assert hardware_profile(None, IDLE, cache).kept_since_s is None
    monkeypatch.setattr("time.time", lambda: 2000.0)
    assert hardware_profile(tmp_path, IDLE, cache).kept_since_s == 1000.0
    assert hardware_profile(tmp_path, IDLE, cache, is_forced=True).kept_since_s is None
    assert hardware_profile(None, IDLE, cache).kept_since_s == 1000.0  # no rate was better
    hardware_profile(None, BUSY, cache, is_forced=True, keeps_better=False)
    assert hardware_profile(None, IDLE, cache).kept_since_s == 2000.0
    # A file of an earlier Penstock does not say when: the time at which it was written counts.
    kept_rates.write(cache, kept_rates.read(cache))
    os.utime(cache, (1500.0, 1500.0))
    assert hardware_profile(tmp_path, IDLE, cache).kept_since_s == 1500.0


def disk_key(folder: Path) -> str:
    return f"disk {os.stat(folder).st_dev}"


def test_what_is_known_of_a_disk_counts_where_it_is_not_measured(tmp_path: Path) -> None:
    measured, cache = Measured(), tmp_path / "hardware.json"
    silent = replace(measured.measure, disk=None)
    assert hardware_profile(tmp_path, silent, cache).disk is None
    known = hardware_profile(tmp_path, measured.measure, cache).disk
    assert known is not None and hardware_profile(tmp_path, silent, cache).disk == known
    assert hardware_profile(None, silent, cache).disk is None


#: What a machine gave when it was idle, and while another program had both cores.
IDLE = Measure(
    "k",
    lambda _: 46.0,
    lambda _: ((2, 40.0), (512, 0.83)),
    lambda _: DiskProfile(2.4, 4, 4, True),
    now=beside(0.02),
)
BUSY = Measure(
    "k",
    lambda _: 44.0,
    lambda _: ((2, 41.0), (512, 0.33)),
    lambda _: DiskProfile(0.9, 1, 2, True),
    now=beside(0.6),
)


def test_a_busy_moment_does_not_replace_what_the_machine_can_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A bench under load tells of that moment, with a warning; plans go on with what was better."""
    cache = tmp_path / "hardware.json"
    idle = hardware_profile(tmp_path, IDLE, cache)
    assert not caplog.text
    busy = hardware_profile(tmp_path, BUSY, cache, is_forced=True)
    assert (busy.int8_gops, busy.disk) == (2 * 512 * 0.33, DiskProfile(0.9, 1, 2, True))
    (warning,) = caplog.messages
    assert (
        "337.9 GOPS of INT8 instead of 849.9" in warning and "0.9 GB/s (read_gbps) instead of 2.4" in warning
    )
    assert "memory" not in warning.split(";")[0] and "penstock hardware --remeasure" in warning
    kept = hardware_profile(tmp_path, BUSY, cache)
    assert (kept.int8_gops, kept.disk, kept.memory_read_gbps) == (idle.int8_gops, idle.disk, 46.0)
    assert kept.products == ((2, 41.0), (512, 0.83))  # the better of each
    assert len(caplog.messages) == 1


def test_a_machine_that_became_slower_can_be_measured_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "hardware.json"
    hardware_profile(tmp_path, IDLE, cache)
    forced = hardware_profile(tmp_path, BUSY, cache, is_forced=True, keeps_better=False)
    assert "the new rates are kept, as asked for" in caplog.text and "Other work took 60%" in caplog.text
    assert hardware_profile(tmp_path, IDLE, cache).int8_gops == forced.int8_gops == 2 * 512 * 0.33
    # A better measurement replaces it at once, and small differences are not worth a word.
    del caplog.records[:]
    hardware_profile(tmp_path, IDLE, cache, is_forced=True)
    slightly = replace(IDLE, disk=lambda _: DiskProfile(2.0, 4, 4, True))
    hardware_profile(tmp_path, slightly, cache, is_forced=True)
    assert hardware_profile(tmp_path, BUSY, cache).disk == DiskProfile(2.4, 4, 4, True) and not caplog.records


def test_rates_remember_a_busy_hour(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every profile with such rates says so, until the rates are measured on a quiet machine."""
    cache = tmp_path / "hardware.json"
    for _ in range(2):  # measured, and from the cache
        busy = hardware_profile(tmp_path, BUSY, cache)
        assert busy.others_share == pytest.approx(0.6)
        assert "other work took 60% of the cores" in busy.notes[0] and "hardware --remeasure" in busy.notes[0]
    assert kept_shares(cache, tmp_path, "k") == [pytest.approx(0.6)] * 2
    assert hardware_profile(None, IDLE, cache, is_forced=True).notes == []
    half = hardware_profile(tmp_path, IDLE, cache)
    assert half.notes and half.int8_gops == 2 * 512 * 0.83, "the disk's rate is still that of the busy hour"
    hardware_profile(tmp_path, IDLE, cache, is_forced=True)
    hardware_profile(tmp_path, BUSY, cache, is_forced=True)  # as `penstock bench` in a busy hour
    quiet = hardware_profile(tmp_path, BUSY, cache)
    assert quiet.notes == [] and quiet.others_share == pytest.approx(0.02)
    assert kept_shares(cache, tmp_path, "another") == [pytest.approx(0.02)]
    del caplog.records[:]
    same = replace(IDLE, now=beside(0.6))  # `penstock hardware --remeasure`, with the same rates
    assert hardware_profile(tmp_path, same, cache, is_forced=True, keeps_better=False).notes
    assert "the new rates are kept, as asked for. Other work took 60%" in caplog.text
    assert hardware_profile(tmp_path, IDLE, cache).notes


def test_a_file_that_does_not_know_other_work(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As one of an earlier Penstock: its rates serve, and only a quiet measurement makes them known."""
    cache = tmp_path / "hardware.json"
    hardware_profile(None, IDLE, cache)
    for share in (None, "much", 7, True):
        content = json.loads(cache.read_text())
        content["others_share"] = dict.fromkeys(content["rates"], share)
        cache.write_text(json.dumps(content))
        assert hardware_profile(None, BUSY, cache).others_share is None
    del content["others_share"]
    cache.write_text(json.dumps(content))
    old = hardware_profile(None, BUSY, cache)
    assert (old.int8_gops, old.others_share, old.notes) == (2 * 512 * 0.83, None, [])
    hardware_profile(None, BUSY, cache, is_forced=True)
    assert hardware_profile(None, IDLE, cache).others_share is None
    hardware_profile(None, IDLE, cache, is_forced=True)
    assert hardware_profile(None, BUSY, cache).others_share == pytest.approx(0.02)


def test_a_disk_that_is_read_in_another_way_is_another_disk() -> None:
    """As where a file system does not take direct reads any more."""
    direct, cached = (
        vars(DiskProfile(rate, 4, 4, is_direct)) for rate, is_direct in ((2.4, True), (1.0, False))
    )
    assert kept_rates.better(direct, cached) == cached and not kept_rates.far_below(direct, cached)


CARD = DeviceProfile("card", (6, 1), 1, 1, 0.0, 0.0, 0.0, 1)


def test_the_way_from_a_card_and_back_is_measured_once(tmp_path: Path) -> None:
    """A file of an earlier Penstock does not have it: then this alone is measured."""
    cache, rates = (
        tmp_path / "hardware.json",
        {"memory_gbps": 3.0, "host_to_device_gbps": 2.0, "int8_gops": 1.0},
    )
    before = replace(IDLE, device=lambda: rates)
    profile = hardware_profile(None, before, cache, device=CARD)
    assert profile.device is not None and profile.device.crossing_s == 0.0
    assert profile.lane.crossing_s == CROSSING_S, "assumed"
    times = [30e-6, 50e-6, 20e-6]
    measure = Measure("k", no_rate, no_rate, no_rate, device=no_rate, crossing_s=times.pop)
    for _ in range(2):
        profile = hardware_profile(None, measure, cache, device=CARD)
        assert profile.device == replace(CARD, **rates, crossing_s=20e-6) and profile.lane.crossing_s == 20e-6
    assert times == [30e-6, 50e-6] and replace(profile, device=None).lane.crossing_s == 0.0
    for _ in range(2):  # of two measurements, the faster one is kept
        hardware_profile(None, replace(before, crossing_s=times.pop), cache, is_forced=True, device=CARD)
    assert hardware_profile(None, measure, cache, device=CARD).lane.crossing_s == 20e-6


def test_a_launch_is_measured_once(tmp_path: Path) -> None:
    cache = tmp_path / "hardware.json"
    rates = {"memory_gbps": 3.0, "host_to_device_gbps": 2.0, "int8_gops": 1.0}
    times = [9e-6, 5e-6, 7e-6]
    measure = replace(IDLE, device=lambda: rates, launch_s=times.pop)
    for _ in range(2):
        assert hardware_profile(None, measure, cache, device=CARD).lane.launch_s == 7e-6
    for _ in range(2):
        hardware_profile(None, measure, cache, is_forced=True, device=CARD)
    assert not times and hardware_profile(None, measure, cache, device=CARD).lane.launch_s == 5e-6
    assert kept_rates.far_below({"launch_s": 5e-6}, {"launch_s": 9e-6}) == ["9 us for a launch instead of 5"]


def test_a_card_whose_crossing_fails_serves_with_the_assumed_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> float:
        raise RuntimeError("cuLaunchHostFunc: not supported")

    rates = {"memory_gbps": 100.0, "host_to_device_gbps": 10.0, "int8_gops": 1000.0}
    measure = replace(IDLE, device=lambda: rates, crossing_s=refuse)
    profile = hardware_profile(None, measure, tmp_path / "rates.json", device=CARD)
    assert profile.lane.crossing_s == CROSSING_S and "cuLaunchHostFunc: not supported" in caplog.text


def no_rate(*_: object) -> Any:
    raise AssertionError("a rate that is kept is not measured")


def test_a_way_back_that_takes_longer_is_told() -> None:
    fast, slow = {"crossing_s": 30e-6}, {"crossing_s": 50e-6}
    assert kept_rates.far_below(fast, slow) == ["50 us to the processor and back instead of 30"]
    assert not kept_rates.far_below(slow, fast) and not kept_rates.far_below(fast, {"crossing_s": 35e-6})


def test_measuring_anew_forgets_no_other_disk(tmp_path: Path) -> None:
    cache = tmp_path / "hardware.json"
    hardware_profile(tmp_path, IDLE, cache)
    others = kept_rates.read(cache)
    others["disk 999999"] = others[disk_key(tmp_path)] | {"read_gbps": 7.0}
    kept_rates.write(cache, others)
    hardware_profile(None, IDLE, cache, is_forced=True)
    hardware_profile(tmp_path, BUSY, cache, is_forced=True, keeps_better=False)
    assert kept_rates.read(cache)["disk 999999"]["read_gbps"] == 7.0


def test_weights_in_many_small_files_are_enough_to_measure_a_disk(tmp_path: Path) -> None:
    """One file per layer, none of them as large as what is read at a time."""
    for index in range(7):
        (tmp_path / f"model-layer-{index:05d}.safetensors").write_bytes(bytes((400 << 10) + index))
    assert is_measurable(tmp_path, 1 << 20) and not is_measurable(tmp_path, 2 << 20)
    before = sorted(tmp_path.iterdir())
    assert measure_disk(tmp_path, rounds=1, trial_bytes=1 << 20).read_gbps > 0
    assert sorted(tmp_path.iterdir()) == before


def test_pieces_go_on_in_the_next_file() -> None:
    a, b, c = (Path(name) for name in "abc")
    files = [(a, 8192), (b, 4096), (c, 12288)]
    assert pieces_at(files, 0, 4096) == [(a, 0, 4096)]
    assert pieces_at(files, 4096, 12288) == [(a, 4096, 4096), (b, 0, 4096), (c, 0, 4096)]
    assert pieces_at(files, 12288, 12288) == [(c, 0, 12288)]


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


def test_memory_is_measured_by_the_fastest_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(rates.time, "perf_counter", lambda: now[0])

    def reader(seconds: float) -> Reader:
        return lambda buffer: now.__setitem__(0, now[0] + seconds)

    readers = [reader(2e-3), reader(5e-4), reader(1e-3)]
    assert memory_read_gbps(2, readers, num_bytes=1 << 20, rounds=3) == pytest.approx((1 << 20) / 5e5)


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
    with pytest.raises(ValueError, match="allocated already"):
        pool.allocate("a", 0)
    with pytest.raises(ValueError, match="not a multiple of 64"):
        pool.allocate("c", 1)


def test_the_disk_of_kv_spill_is_measured_where_it_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its folder need not be there yet."""
    measured, cache, spill = Measured(), tmp_path / "rates.json", tmp_path / "spill" / "kv"
    assert hardware_profile(tmp_path, measured.measure, cache, spill_folder=spill).spill_disk is None
    assert measured.calls.count("disk") == 1
    (tmp_path / "spill").mkdir()
    monkeypatch.setattr(machine_rates, "disk_key", lambda folder: f"disk {int(folder == tmp_path / 'spill')}")
    for _ in range(2):
        found = hardware_profile(tmp_path, measured.measure, cache, spill_folder=spill)
        assert found.spill_disk == DiskProfile(2.5, 4 << 20, 4, True)
    assert measured.calls.count("disk") == 3, "one of the weights by its new name, and one of --kv-spill"
    assert hardware_profile(tmp_path, measured.measure, cache).spill_disk is None

    def measure(folder: Path) -> DiskProfile:
        if folder == tmp_path:
            return measured.disk(folder)
        raise PermissionError("not yours")

    refused = replace(measured.measure, disk=measure)
    found = hardware_profile(tmp_path, refused, is_forced=True, spill_folder=spill)
    assert found.disk is not None and found.spill_disk is None and "not yours" in caplog.text
