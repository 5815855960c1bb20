"""The streamer against its plain twin (everything resident) and against a reader that tells what it did."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_store import open_store
from torch import Tensor
from units import host_streamer, layer_bytes, layer_key, read_layer

from penstock.errors import CorruptFile
from penstock.kernels import QuantizedTensor
from penstock.kernels.sublayers.mixture_layer import ExpertsForRun
from penstock.memory.host_lane import HostLane, HostLink
from penstock.memory.pages import PAGE, round_up
from penstock.memory.planning.plan import TierPlan
from penstock.memory.pools import MemoryPool
from penstock.spec import DECODER, UnitKey
from penstock.weights.expert_table import ExpertRun, ExpertTable
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.streamer import LayerStreamer
from penstock.weights.tensors import ModelTensors, Stack, TensorSpec, decoder_only
from penstock.weights.tiers.arrivals import MAX_READS
from penstock.weights.tiers.cyclic_tier import CyclicTier
from penstock.weights.tiers.readers import StoreReader
from penstock.weights.tiers.use_counts import UseCounts


def same(mine: LayerWeights, expected: LayerWeights) -> bool:
    other = dict(expected.items())
    return all(
        torch.equal(tensor.qweight, other[name].qweight) and torch.equal(tensor.scale, other[name].scale)
        if isinstance(tensor, QuantizedTensor)
        else torch.equal(tensor, other[name])
        for name, tensor in mine.items()
    )


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("resident", [(), (1,), (0, 2), (0, 1, 2)])
def test_streamed_layers_equal_resident_ones(
    tiny_llama: Path, resident: tuple[int, ...], num_slots: int
) -> None:
    store = open_store(tiny_llama)
    streamer = host_streamer(store.tensors, StoreReader(store), resident, num_slots)
    for _ in range(3):
        for index, weights in enumerate(streamer.layers()):
            assert same(weights, read_layer(store, index))
    streamer.close()
    num_streamed = 3 - len(resident)
    one_layer = round_up(layer_bytes(store))
    assert streamer.tiers.pool.used_bytes == one_layer * (len(resident) + min(num_slots, num_streamed))
    assert (streamer.tiers.streamed_bytes > 0) == (num_streamed > 0)


def layers_of(num_layers: int) -> ModelTensors:
    """Layers of different sizes that hold their own index."""
    layers = tuple((TensorSpec("x", (4 + index,), ("x",)),) for index in range(num_layers))
    return ModelTensors((), decoder_only(layers), ())


class FakeReader:
    """Reads when it is told to, or at once; remembers the order and sees misuse of buffers."""

    def __init__(self, is_eager: bool = True) -> None:
        self.is_eager = is_eager
        self.order: list[int] = []
        self.pending: list[tuple[int, Tensor, Future[int]]] = []
        self.failing: set[int] = set()
        self.most_pending = 0
        self.lock = threading.Lock()

    def submit(self, key: UnitKey, buffer: Tensor) -> Future[int]:
        future: Future[int] = Future()
        index = key.layer
        self.order.append(index)
        assert all(buffer.data_ptr() != other.data_ptr() for _, other, _ in self.pending), "two readers"
        self.pending.append((index, buffer, future))
        self.most_pending = max(self.most_pending, len(self.pending))
        if self.is_eager:
            self.finish()
        return future

    def finish(self) -> None:
        """Complete the oldest read."""
        index, buffer, future = self.pending.pop(0)
        if index in self.failing:
            future.set_exception(CorruptFile(f"layer {index}"))
        else:
            buffer.view(torch.float32)[:] = index
            future.set_result(buffer.numel())

    def close(self) -> None:
        assert not self.pending


def stream(num_layers: int, resident: set[int], num_slots: int, reader: FakeReader) -> LayerStreamer:
    return host_streamer(layers_of(num_layers), reader, resident, num_slots)


def sweep(streamer: LayerStreamer, until: int | None = None, most: int = 1) -> Iterator[int]:
    index = 0
    for run in streamer.runs(DECODER, most):
        assert 1 <= len(run) <= most
        values = [weights.vector("x") for weights in run]
        for place, each in enumerate(values, index):
            assert (each == place).all()
            yield place
            # All of a run stay, as long as nobody asks for the next one.
            assert all((other == own).all() for own, other in enumerate(values, index)), (
                "overwritten while lent"
            )
            if place == until:
                return
        index += len(run)


def test_layers_that_stay_come_together() -> None:
    """Once they are there: at first they come one by one."""
    streamer = stream(9, {0, 1, 2, 4, 5, 6, 7}, 1, FakeReader())
    lengths = [[len(run) for run in streamer.runs(DECODER, most)] for most in (8, 8, 3, 1)]
    streamer.close()
    assert lengths == [[1] * 9, [3, 1, 4, 1], [3, 1, 3, 1, 1], [1] * 9]


@pytest.mark.parametrize(
    ("kinds", "most", "expected"),
    [
        ("ddmmmm", 16, [2, 4]),
        ("ddmmmm", 3, [2, 3, 1]),
        ("mmdmm", 16, [2, 1, 2]),
        ("mmmdd", 16, [3, 2]),
        ("dmdmdm", 16, [1, 5]),
        ("mdmd", 16, [4]),
        ("ddd", 16, [3]),
    ],
)
def test_layers_with_experts_come_apart_from_others(kinds: str, most: int, expected: list[int]) -> None:
    """m: with experts. d: without."""
    streamer = stream(len(kinds), set(range(len(kinds))), 1, FakeReader())
    key = UnitKey(DECODER, 0, None)
    run = ExpertRun(ExpertTable(1), lambda: ExpertsForRun(0), lambda asked: None, key)
    for weights, kind in zip(streamer.layers(), kinds, strict=True):
        weights.expert_run = run if kind == "m" else None
    assert [len(each) for each in streamer.runs(DECODER, most)] == expected
    streamer.close()


@settings(deadline=None)
@given(
    num_layers=st.integers(1, 9),
    data=st.data(),
    num_slots=st.integers(1, 4),
    sweeps=st.lists(st.integers(0, 9), min_size=1, max_size=5),
)
def test_any_sweeps_see_their_layers(
    num_layers: int, data: st.DataObject, num_slots: int, sweeps: list[int]
) -> None:
    """Whole sweeps and those that end early, in any order, with any set of resident layers."""
    resident = data.draw(st.sets(st.integers(0, num_layers - 1)))
    reader = FakeReader()
    streamer = stream(num_layers, resident, num_slots, reader)
    for until in sweeps:
        expected = min(until, num_layers - 1) + 1
        most = data.draw(st.integers(1, 9))
        assert list(sweep(streamer, until, most)) == list(range(expected))
    for index in resident:
        assert reader.order.count(index) == 1
    streamer.close()


def test_reads_in_the_order_of_need_and_on_into_the_next_sweep() -> None:
    reader = FakeReader()
    streamer = stream(6, {0, 3}, 2, reader)
    list(sweep(streamer))
    list(sweep(streamer))
    # Before the first sweep: what has a place. Then one layer for each slot that becomes free, and after
    # the last sweep the first two of the next.
    assert reader.order == [0, 1, 2, 3, *(4, 5, 1, 2), *(4, 5, 1, 2)]


def test_never_asks_for_more_than_a_few_layers_at_a_time() -> None:
    reader = FakeReader(is_eager=False)
    streamer = stream(8, set(range(8)), 0, reader)
    assert reader.order == [0, 1]
    while reader.pending:
        reader.finish()
    assert reader.order == list(range(8)) and reader.most_pending == MAX_READS
    assert list(sweep(streamer)) == list(range(8))


def test_one_slot_overlaps_nothing() -> None:
    """The plain twin: a layer is asked for when the one before it is done."""
    reader = FakeReader()
    streamer = stream(4, set(), 1, reader)
    for index in sweep(streamer):
        assert reader.order == list(range(index + 1))


@given(
    num_once=st.integers(1, 5),
    num_others=st.integers(1, 5),
    num_slots=st.integers(2, 4),
    resident=st.sets(st.integers(0, 9)),
    encodes=st.lists(st.booleans(), max_size=5),
)
def test_an_encoders_sweep_reads_ahead_whatever_was_read_before(
    num_once: int, num_others: int, num_slots: int, resident: set[int], encodes: list[bool]
) -> None:
    """A step may sweep the first units, and goes on to the others. Every unit but the last of the slots' is
    on its way before its turn."""
    keys = [layer_key(index) for index in range(num_once + num_others)]
    kept = frozenset(key for key in keys if key.layer in resident)
    reader = FakeReader()
    tier = CyclicTier(
        dict.fromkeys(keys, PAGE),
        reader,
        MemoryPool("weights", PAGE * (len(keys) + num_slots)),
        kept,
        num_slots,
        num_once=num_once,
    )
    for is_encoding in [True, *encodes]:
        for index in range(0 if is_encoding else num_once, len(keys)):
            arrival = tier.acquire(keys[index])
            assert (arrival.buffer.view(torch.float32) == index).all()
            there = {key.layer for key, each in tier.arrivals.units.items()}
            order = [*range(index, len(keys)), *range(num_once, index)]
            upcoming = [each for each in order if keys[each] not in kept][:num_slots]
            # A resident unit that is in use takes no slot; what it does not free is freed a unit later.
            if keys[index] not in kept:
                assert there >= set(upcoming)
            tier.release(keys[index])
        reader.order.clear()
    tier.close()


def test_a_sweep_after_one_that_ended_early_does_not_wait_for_ever() -> None:
    reader = FakeReader()
    streamer = stream(6, set(), 3, reader)
    assert list(sweep(streamer, until=2)) == [0, 1, 2]
    assert list(sweep(streamer)) == list(range(6))


def test_a_sweep_that_was_given_up_takes_nothing_back() -> None:
    """It is closed late, when the next sweep is under way with the same layers."""
    streamer = stream(5, set(), 2, FakeReader())
    old = streamer.layers()
    next(old)
    new = sweep(streamer)
    assert next(new) == 0
    old.close()
    assert list(new) == [1, 2, 3, 4]
    assert list(sweep(streamer)) == [0, 1, 2, 3, 4]
    arrivals = streamer.tiers.nearest.arrivals
    assert len(arrivals.free_slots) + len(arrivals.units) == 2
    streamer.close()


def test_closing_asks_for_nothing_more() -> None:
    """Layers and experts share a reader, and wait for what they asked it for: while the experts close it, no
    end of a layer's read may ask for the next layer."""
    experts = ((TensorSpec("w", (4,), ("w",)),),)
    layers = layers_of(4).stacks[0].layers
    tensors = ModelTensors((), (Stack(DECODER, layers, (experts,) * 4),), ())

    class Reader(FakeReader):
        def close(self) -> None:
            while self.pending:
                self.finish()

    reader = Reader(is_eager=False)
    streamer = LayerStreamer(tensors, reader, HostLane(), (TierPlan(frozenset(), 4, 4),), UseCounts(1))
    reader.finish()
    assert reader.order == [0, 1, 2], "two at a time"
    streamer.close()
    assert reader.order == [0, 1, 2] and not reader.pending


def test_a_failed_read_ends_the_sweep_and_is_tried_again() -> None:
    reader = FakeReader()
    reader.failing = {2, 3}
    streamer = stream(5, {3}, 2, reader)
    with pytest.raises(CorruptFile, match="layer 2"):
        list(sweep(streamer))
    reader.failing = {3}
    with pytest.raises(CorruptFile, match="layer 3"):
        list(sweep(streamer))
    reader.failing = set()
    assert list(sweep(streamer)) == list(range(5))


def test_many_reads_that_fail_at_once_are_told_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    """More than calls may be nested. A future logs the errors of those it calls."""

    class Gone:
        def submit(self, key: UnitKey, buffer: Tensor) -> Future[int]:
            raise OSError("the disk is gone")

        def close(self) -> None: ...

    num_layers = 2 * sys.getrecursionlimit()
    sizes = {layer_key(index): PAGE for index in range(num_layers)}
    pool = MemoryPool("weights", num_layers * PAGE)
    tier = CyclicTier(sizes, Gone(), pool, frozenset(sizes), 0)
    assert len(tier.arrivals.units) == num_layers and not caplog.records
    with pytest.raises(OSError, match="gone"):
        tier.acquire(layer_key(num_layers - 1))
    tier.close()


class RecordingLink(HostLink):
    """Remembers which buffers are in use."""

    def __init__(self) -> None:
        super().__init__()
        self.in_use: list[int] = []

    def acquire(self, target: Tensor, waited_s: float) -> None:
        self.in_use.append(target.data_ptr())

    def release(self, target: Tensor) -> None:
        self.in_use.remove(target.data_ptr())


def mixture(num_slots: int) -> tuple[LayerStreamer, RecordingLink]:
    """Two layers with four experts each."""
    experts = tuple((TensorSpec("x", (4,), ("x",)),) for _ in range(4))
    layers = layers_of(2).stacks[0].layers
    lane = HostLane()
    lane.link = link = RecordingLink()
    tensors = ModelTensors((), (Stack(DECODER, layers, (experts,) * 2),), ())
    plan = TierPlan(frozenset(), 1, num_slots)
    return LayerStreamer(tensors, FakeReader(), lane, (plan,), UseCounts(2)), link


def test_an_expert_that_a_layer_leaves_early_is_released() -> None:
    """Else the next copy into its slot would not wait for what the layer has launched."""
    streamer, link = mixture(2)
    with contextlib.closing(streamer.layers()) as layers:
        for weights in layers:
            for _ in weights.experts([0, 1, 2]):
                break
            assert len(link.in_use) == 1, "the layer alone"
    assert not link.in_use
    streamer.close()


def test_experts_of_a_step_that_was_given_up_are_taken_back() -> None:
    """The traceback of an interrupted step keeps the layer's frame, and with it an expert. Two such steps
    would leave no slot."""
    streamer, link = mixture(2)
    kept = []
    for number in range(4):
        layers = streamer.layers()
        experts = next(layers).experts([number])
        assert next(experts)[0] == number
        kept += [layers, experts]
    assert len(link.in_use) == 2, "of the last step alone"
    while kept:
        kept.pop(0).close()
    assert not link.in_use
    streamer.close()


def test_progress_counts_resident_layers() -> None:
    seen: list[tuple[int, int]] = []
    streamer = stream(5, {0, 2, 4}, 1, FakeReader())
    streamer.tiers.wait_until_loaded(lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_waits_for_a_slow_read() -> None:
    reader = FakeReader(is_eager=False)
    streamer = stream(3, set(), 2, reader)
    timer = threading.Timer(0.05, reader.finish)
    timer.start()
    assert next(sweep(streamer)) == 0
    assert streamer.lane.link.stall_s > 0
    assert streamer.tiers.streamed_bytes == PAGE
    while reader.pending:
        reader.finish()


def test_streamed_layers_need_a_slot() -> None:
    with pytest.raises(ValueError, match="staging slot"):
        stream(3, {0}, 0, FakeReader())


def test_interrupted_while_it_waits_a_place_stays_taken_until_it_is_written() -> None:
    """Ctrl-C in a script that goes on: what is being read into a slot must not meet a layer in use."""

    class Interrupted(Future[int]):
        """Waiting for it is interrupted once."""

        is_first = True

        def result(self, timeout: float | None = None) -> int:
            if self.is_first and not self.done():
                self.is_first = False
                raise KeyboardInterrupt
            return super().result(timeout)

    class SlowReader:
        def __init__(self) -> None:
            self.buffers: dict[int, tuple[Tensor, Future[int]]] = {}

        def submit(self, key: UnitKey, buffer: Tensor) -> Future[int]:
            index = key.layer
            future: Future[int] = Interrupted() if index == 0 else Future()
            self.buffers[index] = buffer, future
            return future

        def arrive(self, index: int) -> None:
            buffer, future = self.buffers[index]
            buffer[:] = index
            future.set_result(buffer.numel())

        def close(self) -> None: ...

    reader = SlowReader()
    tier = CyclicTier(
        {layer_key(0): PAGE, layer_key(1): PAGE}, reader, MemoryPool("weights", PAGE), frozenset(), 1
    )
    with pytest.raises(KeyboardInterrupt):
        tier.acquire(layer_key(0))
    assert list(reader.buffers) == [0], "the only slot was given away while layer 0 is being written to it"
    reader.arrive(0)
    assert (tier.acquire(layer_key(0)).buffer == 0).all()
    tier.release(layer_key(0))
    reader.arrive(1)
    assert (tier.acquire(layer_key(1)).buffer == 1).all()
