"""Disk -> host -> device, in virtual time: what lies in a buffer is what it should be, however layers are
placed, and a step takes what its bytes and rates say. No GPU is needed: streamer, tiers and readers are
the real ones, the device ends where the driver's calls would begin."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from fake_device import FakeMachine
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import CapacityError, CorruptFile
from penstock.memory.pages import PAGE
from penstock.memory.planning.plan import TierPlan, resident_layers
from penstock.weights.streamer import LayerStreamer
from penstock.weights.tensors import ModelTensors, TensorSpec, decoder_only


def stream(
    machine: FakeMachine,
    num_layers: int,
    resident: set[int] | frozenset[int],
    pinned: set[int] | frozenset[int],
    num_slots: int = 2,
    num_host_slots: int = 2,
) -> LayerStreamer:
    """Layers of one page that hold their own index."""
    layers = ((TensorSpec("x", (PAGE // 4,), ("x",)),),) * num_layers
    plans = TierPlan(frozenset(pinned), num_host_slots), TierPlan(frozenset(resident), num_slots)
    return LayerStreamer(ModelTensors((), decoder_only(layers), ()), machine, machine, plans)


def sweep(
    streamer: LayerStreamer, machine: FakeMachine, layer_s: float = 0.0, until: int | None = None
) -> Iterator[int]:
    for index, weights in enumerate(streamer.layers()):
        values = weights.vector("x")
        assert (values == index).all()
        machine.compute(layer_s)
        yield index
        assert (values == index).all(), "overwritten while it was lent"
        if index == until:
            return


@settings(deadline=None)
@given(
    num_layers=st.integers(1, 8),
    data=st.data(),
    num_slots=st.integers(1, 3),
    num_host_slots=st.integers(1, 3),
    sweeps=st.lists(st.integers(0, 8), min_size=1, max_size=4),
)
def test_any_placement_and_any_sweeps(
    num_layers: int, data: st.DataObject, num_slots: int, num_host_slots: int, sweeps: list[int]
) -> None:
    layers = set(range(num_layers))
    resident = data.draw(st.sets(st.sampled_from(sorted(layers))))
    pinned = data.draw(st.sets(st.sampled_from(sorted(layers - resident)))) if layers - resident else set()
    machine = FakeMachine()
    streamer = stream(machine, num_layers, resident, pinned, num_slots, num_host_slots)
    for until in sweeps:
        expected = min(until, num_layers - 1) + 1
        assert list(sweep(streamer, machine, until=until)) == list(range(expected))
    streamer.close()
    if layers <= resident | pinned:
        assert machine.num_disk_reads <= num_layers, "a layer that stays in memory was read twice"


def step_seconds(streamer: LayerStreamer, machine: FakeMachine, layer_s: float) -> float:
    """Of a step in the steady state."""
    for _ in range(2):
        list(sweep(streamer, machine, layer_s))
    before = machine.compute_time
    for _ in range(3):
        list(sweep(streamer, machine, layer_s))
    return (machine.compute_time - before) / 3


@pytest.mark.parametrize("layer_s", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("num_resident", [0, 8, 16, 20])
def test_a_step_from_pinned_memory_takes_as_long_as_copying_or_computing(
    layer_s: float, num_resident: int
) -> None:
    """Whichever is longer; one layer takes one second to copy."""
    machine = FakeMachine(disk_rate=1e3 * PAGE, link_rate=PAGE)
    resident = resident_layers(24, num_resident)
    streamer = stream(machine, 24, resident, frozenset(range(24)) - resident)
    floor = max(24 - num_resident, 24 * layer_s)
    assert step_seconds(streamer, machine, layer_s) == pytest.approx(floor, rel=0.05)
    streamer.close()


def test_one_slot_overlaps_nothing() -> None:
    """The plain twin."""
    machine = FakeMachine(disk_rate=1e3 * PAGE, link_rate=PAGE)
    streamer = stream(machine, 10, set(), set(range(10)), num_slots=1)
    assert step_seconds(streamer, machine, 0.5) == pytest.approx(10 * 1.5)
    streamer.close()


@pytest.mark.parametrize("disk_s, link_s", [(1.0, 0.5), (0.5, 1.0), (1.0, 0.1)])
def test_both_links_run_at_once(disk_s: float, link_s: float) -> None:
    """Seconds per layer on each; the slower one decides."""
    machine = FakeMachine(disk_rate=PAGE / disk_s, link_rate=PAGE / link_s)
    streamer = stream(machine, 12, set(), set())
    floor = 12 * max(disk_s, link_s)
    assert step_seconds(streamer, machine, 0.05) == pytest.approx(floor, rel=0.05)
    assert streamer.tiers.traffic["disk"].num_bytes >= 5 * 12 * PAGE
    streamer.close()


def test_layers_from_disk_and_from_pinned_memory() -> None:
    """A third of the layers comes from disk: it delivers those while the link copies the others."""
    machine = FakeMachine(disk_rate=PAGE / 2.0, link_rate=PAGE)
    on_disk = set(range(0, 12, 3))
    streamer = stream(machine, 12, set(), set(range(12)) - on_disk, num_host_slots=3)
    assert step_seconds(streamer, machine, 0.1) == pytest.approx(12, rel=0.1)
    streamer.close()


def test_stalls_are_what_computing_waits_for() -> None:
    machine = FakeMachine(disk_rate=1e3 * PAGE, link_rate=PAGE)
    streamer = stream(machine, 10, set(), set(range(10)))
    list(sweep(streamer, machine, 0.25))
    before = streamer.lane.link.stall_s
    list(sweep(streamer, machine, 0.25))
    assert streamer.lane.link.stall_s - before == pytest.approx(10 * 0.75, rel=0.1)
    streamer.close()


def test_pools_are_exact_and_pinned() -> None:
    machine = FakeMachine()
    streamer = stream(machine, 10, {0, 5}, {1, 2, 3}, num_slots=2, num_host_slots=2)
    assert streamer.tiers.pool.used_bytes == streamer.tiers.pool.budget_bytes == 4 * PAGE
    assert machine.pinned_bytes == 5 * PAGE
    streamer.close()


def test_a_failed_read_reaches_the_sweep_and_is_tried_again() -> None:
    machine = FakeMachine()
    machine.failing = {4}
    streamer = stream(machine, 6, {0}, {1, 2})
    with pytest.raises(CorruptFile, match="layer 4"):
        list(sweep(streamer, machine))
    machine.failing = set()
    assert list(sweep(streamer, machine)) == list(range(6))
    streamer.close()


def test_loading_reports_layers_of_both_tiers() -> None:
    machine = FakeMachine()
    streamer = stream(machine, 6, {0, 3}, {1, 2, 4})
    seen: list[tuple[int, int]] = []
    streamer.tiers.wait_until_loaded(lambda done, total: seen.append((done, total)))
    assert seen == [(count, 5) for count in range(1, 6)]
    streamer.close()


def test_a_device_that_fails_is_told_and_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether queueing a copy fails, or waiting for one."""
    for name in ("copy", "wait_copied"):
        machine = FakeMachine()
        streamer = stream(machine, 6, resident=set(), pinned=set())
        streamer.tiers.wait_until_loaded()
        assert list(sweep(streamer, machine)) == list(range(6))

        def fail(*_: object) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(machine, name, fail)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="illegal"):
                for _ in range(2):
                    list(sweep(streamer, machine))
        streamer.close()


def test_a_card_that_is_too_small_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FakeMachine()

    def refuse(num_bytes: int) -> None:
        raise CapacityError("no room")

    monkeypatch.setattr(machine.memories[1], "allocate", refuse)
    with pytest.raises(CapacityError):
        stream(machine, 6, resident={1}, pinned={2, 3})
    assert machine.pinned_bytes == 0 and machine.num_disk_reads == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "penstock-link"]
