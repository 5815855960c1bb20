"""Layers in memory equal what the checkpoint holds, quantized; and loading stays within its memory."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sparse_models import write_sparse_llama
from units import layer_bytes, read_layer

from penstock.errors import ConfigError, UnsupportedModel, WrongTensor
from penstock.kernels import QuantizedTensor
from penstock.kernels.cpu_builds import compiled_builds
from penstock.kernels.row_quantizer import NativeRowQuantizer
from penstock.model.registry import find_family, open_model
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.formats.weight_format import FLOAT32, INT8, WeightFormat
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.quantization_error import QuantizationError, quantization_errors
from penstock.weights.quantize import RowQuantizer, quantize
from penstock.weights.store import WeightStore
from penstock.weights.tensors import TensorSpec, UnitLayout
from warm_python import run_warm


def open_store(folder: Path) -> WeightStore:
    checkpoint = Checkpoint.open(folder)
    family = find_family(checkpoint.config)
    return WeightStore(checkpoint, family.model_tensors(family.read_spec(checkpoint.config)))


@settings(deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 200),
    seed=st.integers(0, 2**31),
    power=st.integers(-30, 30),
)
def test_quantized_weights_are_within_half_a_step(rows: int, columns: int, seed: int, power: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 10.0**power
    weight[seed % rows] = 0
    qweight, scale = quantize(weight)
    assert qweight.dtype == torch.int8 and int(qweight.min()) >= -127
    error = (weight.double() - qweight.double() * scale.double()[:, None]).abs()
    assert bool((error <= 0.50001 * scale.double()[:, None]).all())
    largest = qweight.abs().amax(1)
    assert bool(((largest == 127) | (scale == 0)).all()), "the scale wastes range"


def plainly_quantized(weight: torch.Tensor) -> QuantizedTensor:
    """The definition: one row after the other, a new tensor for each step."""
    rows, scales = [], []
    for row in weight.float():
        scale = row.abs().max() / 127
        scale = scale if scale >= 2.0**-126 else torch.tensor(0.0)  # the smallest normal float32
        rows.append(torch.round(row / scale) if scale > 0 else torch.zeros_like(row))
        scales.append(scale)
    return QuantizedTensor(torch.stack(rows).to(torch.int8), torch.stack(scales))


@pytest.mark.parametrize("build", [None, *compiled_builds()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_chunks_are_quantized_as_if_each_row_were_alone(dtype: torch.dtype, build: str | None) -> None:
    """In the same memory one after the other, the last one shorter."""
    weight = torch.randn(23, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight[4] = 0
    if dtype != torch.float16:
        weight[5] *= 1e-42  # subnormal: nothing
        weight[6] *= 1e-36
    expected, mine = plainly_quantized(weight), quantize(torch.zeros_like(weight))
    quantizer = RowQuantizer() if build is None else NativeRowQuantizer(build)
    lost, of = 0.0, 0.0
    for rows, *out in zip(*(tensor.split(10) for tensor in (weight, *mine)), strict=True):
        quantizer.quantize(rows, QuantizedTensor(*out))
        sums = quantizer.loss(QuantizedTensor(*out))
        lost, of = lost + sums[0], of + sums[1]
    for found in (mine, quantize(weight)):
        assert torch.equal(found.qweight, expected.qweight) and torch.equal(found.scale, expected.scale)
    exact = weight.float().double()
    difference = exact - expected.qweight.double() * expected.scale.double()[:, None]
    assert lost == pytest.approx(float(difference.square().sum()), rel=1e-4)
    assert of == pytest.approx(float(exact.square().sum()), rel=1e-5)
    weight[7, 3] = torch.inf
    with pytest.raises(ValueError, match="infinite"):
        quantizer.quantize(weight[:10], QuantizedTensor(mine.qweight[:10], mine.scale[:10]))


def test_the_disk_is_asked_for_each_row_once_and_before_its_turn(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advised: list[range] = []
    late: list[int] = []

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        advised.append(range(offset, offset + length))

    def preadv(descriptor: int, buffers: list[memoryview], offset: int, real: Any = os.preadv) -> int:
        if not any(offset in wanted for wanted in advised):
            late.append(offset)
        return int(real(descriptor, buffers, offset))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr("penstock.weights.tensor_quantizer.CHUNK_BYTES", 1000)
    monkeypatch.setattr("penstock.weights.tensor_quantizer.AHEAD", 2)
    store = open_store(tiny_llama)
    read_layer(store, 1)
    entries = [entry for entry in store.checkpoint.entries.values() if ".layers.1." in entry.name]
    matrices = [entry for entry in entries if len(entry.shape) == 2]
    for entry in matrices:
        inside = [
            wanted for wanted in advised if entry.offset <= wanted.start < entry.offset + entry.num_bytes
        ]
        assert sum(map(len, inside)) == entry.num_bytes and len(inside) > 1
    assert sorted(late) == sorted(entry.offset for entry in entries if len(entry.shape) == 1)


@pytest.mark.parametrize("chunk", [1, 3 * 64, 1 << 22])
def test_the_error_report_is_the_error(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.weights.quantization_error.CHUNK_ELEMENTS", chunk)
    weight = torch.randn(8, 64)
    weight[3, 5] = 100.0
    report = QuantizationError.of("w", weight, quantize(weight))
    difference = (weight - quantize(weight).dequantize()).double()
    assert report.relative == pytest.approx(float(difference.norm() / weight.double().norm()), rel=1e-6)
    assert report.worst_channel == pytest.approx(
        float(max(difference[i].norm() / weight[i].double().norm() for i in range(8))), rel=1e-6
    )
    assert report.outlier_ratio == pytest.approx(100 / float(weight[3].square().mean().sqrt()), rel=1e-4)


def test_each_tensor_has_its_report(tiny_llama: Path) -> None:
    reports = {report.name: report for report in quantization_errors(open_store(tiny_llama))}
    assert len(reports) == 2 + 3 * 4
    assert all(0 < report.relative < 0.02 for report in reports.values())
    assert "model.layers.0.self_attn.q_proj.weight, model.layers.0.self_attn.k_proj.weight" in next(
        name for name in reports if "q_proj" in name
    )


def test_fused_matrices_hold_their_parts_in_order(tiny_llama: Path) -> None:
    tensors = load_file(tiny_llama / "model.safetensors")
    weights = read_layer(open_store(tiny_llama), 1)
    prefix = "model.layers.1."
    for name, parts in {
        "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "down": ["mlp.down_proj"],
    }.items():
        expected = quantize(torch.cat([tensors[f"{prefix}{part}.weight"] for part in parts]))
        mine = weights.matrix(name)
        assert torch.equal(mine.qweight, expected.qweight) and torch.equal(mine.scale, expected.scale)
    assert torch.equal(weights.vector("input_norm"), tensors[prefix + "input_layernorm.weight"])


def test_reading_in_small_pieces_changes_nothing(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_layer(open_store(tiny_llama), 0).matrix("down")
    monkeypatch.setattr("penstock.weights.tensor_quantizer.CHUNK_BYTES", 1000)
    pieces = read_layer(open_store(tiny_llama), 0).matrix("down")
    assert torch.equal(whole.qweight, pieces.qweight) and torch.equal(whole.scale, pieces.scale)


def test_several_threads_compute_the_same(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.weights.tensor_quantizer.CHUNK_BYTES", 1000)
    found = []
    for num_threads in (1, 3):
        store = open_store(tiny_llama)
        layer = store.tensors.layers[1]
        buffer = torch.zeros(layer_bytes(store, 1), dtype=torch.uint8)
        errors = store.read_with_errors(layer, buffer, num_threads)
        found.append((buffer, errors, store.bytes_read))
    assert torch.equal(found[0][0], found[1][0]) and found[0][2] == found[1][2]
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-6)
    matrices = [name for tensor in layer if tensor.is_matrix for name in tensor.parts]
    assert sorted(found[1][1]) == sorted(matrices)


def quantized_copy(source: Path, folder: Path) -> Path:
    """The same model as a compressed-tensors INT8 checkpoint."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name], scale = quantize(tensors[name])
        tensors[name + "_scale"] = scale[:, None]
    save_file(tensors, folder / "model.safetensors")
    scheme = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_int8_checkpoints_are_taken_as_they_are(tiny_llama: Path, tmp_path: Path) -> None:
    folder = quantized_copy(tiny_llama, tmp_path / "int8")
    mine, expected = open_store(folder), open_store(tiny_llama)
    for index in range(3):
        assert same(read_layer(mine, index), read_layer(expected, index))
    for scheme, error in (
        ({"strategy": "group", "group_size": 32}, WrongTensor),  # which the scales are not
        ({"strategy": "group", "group_size": 48}, UnsupportedModel),
        ({"strategy": "tensor"}, UnsupportedModel),
    ):
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"]["config_groups"]["group_0"]["weights"] |= scheme
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(error):
            open_store(folder)


def test_a_group_size_is_honoured_or_refused(tiny_llama: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny_llama / "model.safetensors")
    layer = read_layer(open_model(tiny_llama, group_size=32).store, 0)
    expected = quantize(tensors["model.layers.0.self_attn.o_proj.weight"], 32)
    assert layer.matrix("o").scale.shape == (64, 2)
    assert torch.equal(layer.matrix("o").scale, expected.scale)
    assert torch.equal(layer.matrix("o").qweight, expected.qweight)
    not_whole = "down_proj.*96 inputs.*whole groups of 64: choose --group-size 32, or leave out --"
    with pytest.raises(ConfigError, match=not_whole + "group-size"):
        open_model(tiny_llama, group_size=64)
    with pytest.raises(ConfigError, match=not_whole + "weights int4"):
        open_model(tiny_llama, weights="int4")
    int8 = quantized_copy(tiny_llama, tmp_path / "int8")
    with pytest.raises(ConfigError, match="INT8 already, with scales per output channel"):
        open_model(int8, group_size=32)


def same(mine: LayerWeights, expected: LayerWeights) -> bool:
    other = dict(expected.items())
    return all(
        torch.equal(tensor.qweight, other[name].qweight) and torch.equal(tensor.scale, other[name].scale)
        if isinstance(tensor, QuantizedTensor)
        else torch.equal(tensor, other[name])
        for name, tensor in mine.items()
    )


@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 50), st.integers(1, 50), st.sampled_from([INT8, FLOAT32])), max_size=8
    )
)
def test_layouts_have_neither_gap_nor_overlap(shapes: list[tuple[int, int, WeightFormat]]) -> None:
    tensors = tuple(
        TensorSpec(str(index), (rows, columns), ("x",), kind)
        for index, (rows, columns, kind) in enumerate(shapes)
    )
    layout = UnitLayout.of(tensors)
    floats, integers = [], []
    for slot in layout.slots:
        size = slot.tensor.num_elements
        if slot.tensor.is_matrix:
            scale, qweight = slot.offsets
            integers.append((qweight, qweight + size))
            floats.append((scale, scale + 4 * slot.tensor.shape[0]))
        else:
            (offset,) = slot.offsets
            floats.append((offset, offset + 4 * size))
    ranges = floats + integers  # in this order, each in the order of the tensors
    assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges)][: len(ranges)]
    assert layout.num_bytes == (ranges[-1][1] if ranges else 0)


SWEEPS_UNDER_A_LIMIT = """
import json, os, resource, sys
from pathlib import Path
import torch
from penstock.model.registry import find_family, open_model
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.store import WeightStore
from penstock.weights.tiers.readers import StoreReader
from penstock.memory.host_lane import HostLane
from penstock.memory.planning.plan import TierPlan
from penstock.weights.streamer import LayerStreamer

torch.set_num_threads(1)

def used_bytes(name):
    line = next(l for l in open("/proc/self/status") if l.startswith(name))
    return int(line.split()[1]) * 1024

def sweep(num_resident, num_slots):
    checkpoint = Checkpoint.open(Path(sys.argv[1]))
    family = find_family(checkpoint.config)
    store = WeightStore(checkpoint, family.model_tensors(family.read_spec(checkpoint.config)))
    reader = StoreReader(store)
    # Let torch allocate what it keeps, and the reader's thread have its stack.
    torch.ones(512, 512) @ torch.ones(512, 512)
    reader._thread.submit(lambda: torch.ones(512, 512) @ torch.ones(512, 512)).result()
    layer = next(iter(store.units.values())).num_bytes
    # Memory of this process that is not files: what it has, the resident layers, staging, and a layer more.
    limit = used_bytes("VmData") + (num_resident + num_slots + 1) * layer
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    before = used_bytes("VmRSS")
    plan = TierPlan(frozenset(range(num_resident)), num_slots)
    streamer = LayerStreamer(store.tensors, reader, HostLane(), (plan,))
    for weights in streamer.layers():
        assert not weights.matrix("down").qweight[-1].any()
    total = sum(entry.num_bytes for entry in checkpoint.entries.values())
    print(json.dumps({"layer": layer, "checkpoint": total, "rss": used_bytes("VmHWM") - before}), flush=True)

for case in json.loads(sys.argv[2]):
    child = os.fork()  # a start takes seconds
    if child == 0:
        sweep(*case)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, case
"""


@pytest.mark.inner
def test_a_checkpoint_much_larger_than_its_memory(tmp_path: Path) -> None:
    """0.6 GB of bfloat16 in one file, swept with room for the resident layers, staging and one more (19 MB
    each). The kernel enforces the limit; the peak of resident memory is compared as well."""
    write_sparse_llama(tmp_path, num_layers=16, hidden_size=1024, intermediate_size=5120)
    cases = ((0, 1), (1, 2), (8, 1))
    run = run_warm("-c", SWEEPS_UNDER_A_LIMIT, str(tmp_path), json.dumps(cases))
    assert run.returncode == 0, run.stderr[-2000:]
    for (num_resident, num_slots), line in zip(cases, run.stdout.splitlines(), strict=True):
        result = json.loads(line)
        assert result["checkpoint"] > 30 * result["layer"]
        assert result["rss"] <= (num_resident + num_slots + 1) * result["layer"]
