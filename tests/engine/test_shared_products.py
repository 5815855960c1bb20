"""A card and the processor that share products: the bits are those of one that computes alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_card import PretendedCard, engines, missing
from pretended_card.streams import Stream
from tiny_models import build
from torch import Tensor

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.errors import ComputationError, ConfigError, StepFailed
from penstock.kernels import Matrix, PlanesTensor, choose_kernels
from penstock.kernels.cpu import NativeKernels
from penstock.kernels.shared.crossing import Crossing
from penstock.kernels.shared.shared_kernels import SharedKernels
from penstock.kernels.shared.split_matrix import SplitMatrix
from penstock.memory.cuda_handover import CudaHandover
from penstock.memory.hardware import DeviceProfile, HardwareProfile, capacities
from penstock.memory.lane import find_lane
from penstock.weights.checkpoints.int4_form import Int4Form
from penstock.weights.formats.int4_format import Int4
from penstock.weights.formats.planes_format import LowerPlane, UpperPlane
from penstock.weights.formats.weight_format import Int8, WeightFormat
from penstock.weights.split.shared_rows import SharedRows

GIB = 1 << 30
needs_card = pytest.mark.skipif(missing() is not None, reason=str(missing()))


class ThreadHandover:
    """The processor as its own card's companion: work on another thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._results: list[tuple[Tensor, Future[Tensor]]] = []

    def begin(
        self,
        x: Tensor,
        out_features: int,
        compute: Callable[[Tensor], Tensor],
        product: object = None,
        fetch: object = None,
        y: Tensor | None = None,
    ) -> Tensor:
        y = torch.empty(len(x), out_features) if y is None else y
        y.fill_(float("nan"))
        self._results.append((y, self._thread.submit(compute, x)))
        return y

    def join(self) -> None:
        for y, result in self._results:
            y.copy_(result.result())
        self._results.clear()


FORMATS: dict[str, WeightFormat] = {
    "INT8": Int8(),
    **{f"INT8, groups of {size}": Int8(size) for size in (32, 64, 128)},
    "planes": UpperPlane(),
    "planes, groups of 32": UpperPlane(32),
    **{f"INT4, groups of {size}": Int4(Int4Form(size)) for size in (32, 128)},
    "zero points": Int4(Int4Form(64, minima="zero_points", codebook="unsigned")),
    "blocks with minima": Int4(Int4Form(32, "F16", 8, "numbers", "unsigned")),
    "table of 16": Int4(Int4Form(32, codebook="mxfp4")),
}


def random_matrix(weight_format: WeightFormat, shape: tuple[int, int], seed: int = 3) -> Matrix:
    """Of planes both."""
    generator = torch.Generator().manual_seed(seed)
    matrix = random_operand(weight_format, shape, generator)
    if isinstance(matrix, PlanesTensor):
        lower = random_operand(LowerPlane(), shape, generator)
        assert isinstance(lower, Tensor)
        matrix = matrix.with_lower(lower)
    assert not isinstance(matrix, Tensor)
    return matrix


def random_operand(
    weight_format: WeightFormat, shape: tuple[int, int], generator: torch.Generator
) -> Matrix | Tensor:
    arrays = [
        each.view(torch.zeros(each.num_bytes, dtype=torch.uint8)) for each in weight_format.components(shape)
    ]
    weight_format.fill_random(arrays, generator)
    return weight_format.operand(arrays)


@pytest.mark.parametrize("name", FORMATS)
def test_a_split_product_is_the_whole_one(name: str) -> None:
    """Every split into kept, streamed and processor's channels, for numbers of tokens that take each of the
    kernels' paths."""
    matrix, bias = random_matrix(FORMATS[name], (80, 256)), torch.randn(80)
    kernels = choose_kernels(EngineConfig())
    shared = SharedKernels(kernels, choose_kernels(EngineConfig()), ThreadHandover())
    for num_tokens in (1, 2, 5, 16, 33, 80):
        x = torch.randn(num_tokens, 256) * torch.logspace(-3, 3, 256)
        whole = kernels.linear(x, matrix, bias)
        for kept, border in [(0, row) for row in range(0, 81)] + [(16, 48), (16, 80), (80, 80), (32, 32)]:
            parts = [matrix.rows(*ends) for ends in ((0, kept), (kept, border)) if ends[0] < ends[1]]
            split = SplitMatrix(tuple(parts), matrix.rows(border, 80) if border < 80 else None)
            assert torch.equal(shared.linear(x, split, bias), whole), (num_tokens, kept, border)


def test_rows_of_a_split_matrix_are_rows_of_the_whole() -> None:
    matrix = random_matrix(Int8(), (64, 32))
    split = SplitMatrix((matrix.rows(0, 16), matrix.rows(16, 40)), matrix.rows(40, 64))
    for start, stop in ((0, 64), (8, 20), (20, 50), (41, 64), (0, 16)):
        assert torch.equal(split.rows(start, stop).dequantize(), matrix.rows(start, stop).dequantize())


# Whole engines on a pretended card.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    build("Llama", folder, num_hidden_layers=4)
    return folder


def machine(processor_gops: float) -> HardwareProfile:
    """A link so slow, beside this processor, that both have something to do."""
    card = DeviceProfile("a card", (6, 1), 6 * GIB, 6 * GIB, 100.0, 0.001, 1000.0, GIB)
    return replace(capacities(), memory_read_gbps=40.0, int8_gops=processor_gops, device=card)


def load(folder: Path, processor_gops: float = 0.1, **config: object) -> Engine:
    config = {"num_resident_layers": 2, "max_num_batched_tokens": 40} | config
    return engines.load(folder, hardware=machine(processor_gops), **config)


@pytest.mark.inner
@needs_card
@pytest.mark.parametrize("by_flags", [True, False])
@pytest.mark.parametrize(
    "quantized",
    [{}, {"group_size": 32}, {"weights": "int4", "group_size": 32}, {"activations": "int8"}]
    + [{"weights": "planes"}, {"weights": "planes", "group_size": 32}],
)
def test_answers_are_those_of_the_card_alone(
    quantized: dict[str, object],
    by_flags: bool,
    checkpoint: Path,
    card: PretendedCard,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the last bit of each log-probability, although the share changes with the tokens of a step. Where
    streams have no values to write and to wait for, functions of the host hand products over."""
    card.driver.fake_stream_values(by_flags)
    crossed, begin = list[bool](), Crossing.begin
    monkeypatch.setattr(Crossing, "begin", lambda *args: crossed.append(begin(*args)) or crossed[-1])
    alone = load(checkpoint, share_products="off", **quantized)
    assert alone.plan.kept_share is None
    expected = engines.answer(alone)
    engine = load(checkpoint, **quantized)
    kernels = engine.model.executor.family.kernels
    assert engine.plan.kept_share == 0.5 and engines.homes(engine) == {"device", "host"}
    card.host_waits.clear()
    assert engines.answer(engine) == expected
    assert card.host_waits == ["a copy"] * engine.metrics.num_steps, "sharing makes nobody wait"
    traffic = engine.metrics.links["host to device"]
    assert 0 < traffic.num_bytes < engine.plan.streamed_bytes * engine.metrics.num_steps
    assert isinstance(kernels, SharedKernels) and kernels.num_shared >= 4 * engine.metrics.num_steps
    assert crossed == [True] * (kernels.num_shared if by_flags else 0)
    del engine, alone, kernels
    assert not card.races.found
    assert card.driver.num_registered == card.memory.used_bytes == 0


def crossing_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Crossing, "end", lambda self: self._results)


def join_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaHandover, "join", lambda self: None)


def work_does_not_wait_for_the_card(patch: pytest.MonkeyPatch) -> None:
    wait = Stream.wait_event
    patch.setattr(Stream, "wait_event", lambda self, event: wait(self, event) if self.is_default else None)


def rows_are_taken_for_there_that_did_not_come(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SharedRows, "brought", lambda self, key: 1.0)


@needs_card
@pytest.mark.parametrize(
    "fault",
    [
        crossing_does_not_wait,
        join_does_not_wait,
        work_does_not_wait_for_the_card,
        rows_are_taken_for_there_that_did_not_come,
    ],
)
def test_faults_of_the_handover_are_caught(
    fault: Callable[[pytest.MonkeyPatch], None],
    checkpoint: Path,
    card: PretendedCard,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By an error or a wrong answer."""
    expected = engines.answer(load(checkpoint, share_products="off"), num_prompts=1)
    card.driver.fake_stream_values(fault is crossing_does_not_wait)
    fault(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, ComputationError)):
        assert engines.answer(load(checkpoint), num_prompts=1) == expected


@needs_card
def test_an_error_of_the_processor_ends_the_step(
    checkpoint: Path, card: PretendedCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step's requests alone, and no number that was not computed becomes a token."""
    with load(checkpoint) as engine:
        linear = NativeKernels.linear

        def fail(*arguments: object) -> Tensor:
            raise MemoryError("no room for a product")

        monkeypatch.setattr(NativeKernels, "linear", fail)
        kernels: Any = engine.model.executor.family.kernels
        monkeypatch.setattr(kernels, "_handed", lambda weight: None)  # compiled calls don't fail
        with pytest.raises(StepFailed, match="no room for a product"):
            engine.generate([[5, 9, 3]], engines.PARAMS)
        monkeypatch.setattr(NativeKernels, "linear", linear)
        assert engine.generate([[5, 9, 3]], engines.PARAMS)


@needs_card
def test_a_result_that_nobody_takes_keeps_its_memory(
    card: PretendedCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor may still write the results of a step that was given up. A card's allocator would lend
    their memory at once."""
    lane = find_lane("cuda")
    handover = lane.handover()
    monkeypatch.setattr(handover, "_queue", lambda *_: None)  # the pretended card's queue keeps tensors
    result = weakref.ref(handover.begin(torch.ones(1, 4, device=lane.torch_device), 4, lambda rows: rows))
    assert result() is not None
    handover.join()
    assert result() is None
    lane.close()


@needs_card
def test_what_a_queued_call_reads_outlives_a_failure(
    card: PretendedCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two pieces can't be queued. The driver may still call the first one's product."""
    lane = find_lane("cuda")
    handover = lane.handover()
    weight = random_matrix(Int8(), (64, 64))
    product = NativeKernels(16).handed(weight)
    records = list[weakref.ref[object]]()

    class Watched:
        function = product.function

        def record(self, x: Tensor, y: Tensor) -> object:
            if records:
                raise MemoryError("no room for a record")
            record = product.record(x, y)
            records.append(weakref.ref(record))
            return record

    handover._buffer = handover._buffer[: 4 * (64 + 64)]
    x = torch.ones(2, 64, device=lane.torch_device)
    with pytest.raises(MemoryError):
        handover.begin(x, 64, lambda rows: rows, Watched())
    assert records[0]() is not None
    handover.begin(x[:1], 64, lambda rows: rows)
    handover.join()
    torch.cuda.synchronize()
    handover.begin(x[:1], 64, lambda rows: rows)
    assert records[0]() is None
    handover.join()
    torch.cuda.synchronize()
    lane.close()


@needs_card
def test_when_products_are_shared(checkpoint: Path, card: PretendedCard) -> None:
    """Where rates are known, layers are missing on the card, RAM has them, and the processor helps."""
    little = engines.little_host_memory(checkpoint, num_layers=2)
    for config, shares in (
        ({}, True),
        ({"share_products": "off"}, False),
        ({"num_resident_layers": 4}, False),
        ({"processor_gops": 1e-6}, False),
        ({"host_memory_bytes": little}, False),
    ):
        with load(checkpoint, **config) as engine:
            assert (engine.plan.kept_share is not None) == shares, config
            assert any("share each product" in note for note in engine.plan.notes) == shares
    with engines.load(checkpoint, num_resident_layers=2) as engine:
        assert engine.plan.kept_share is None, "rates are not known"
    with pytest.raises(ConfigError, match="share_products"):
        EngineConfig(share_products="never")  # type: ignore[arg-type]
