"""Error-compensated rounding against a plain twin, and what it is for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB_SIZE, build
from torch import Tensor
from units import read_layer

from penstock import calibrate
from penstock.calibrate import Calibration
from penstock.calibration.listening_kernels import ListeningKernels
from penstock.config import EngineConfig, WeightBits
from penstock.errors import ConfigError
from penstock.kernels import Int4Tensor, Matrix, QuantizedTensor, choose_kernels, use_processor
from penstock.model.registry import open_model
from penstock.unquantized import UnquantizedModel
from penstock.weights.conversion import torch_threads
from penstock.weights.conversion.convert import convert
from penstock.weights.conversion.gptq import DAMPING, compensate_int4, compensate_int8, plan_turns
from penstock.weights.quantize import quantize
from penstock.weights.quantize_int4 import quantize_int4
from penstock.weights.store import WeightStore

FORMS: list[tuple[WeightBits, int]] = [("int8", 0), ("int8", 64), ("int4", 32), ("int4", 64)]


def correlated_inputs(width: int, generator: torch.Generator) -> Tensor:
    """Many inputs that a few hidden causes explain."""
    causes = torch.randn(2000, width // 4, generator=generator)
    mixing = torch.randn(width // 4, width, generator=generator)
    return causes @ mixing + 0.1 * torch.randn(2000, width, generator=generator)


def rounded(weight: Tensor, bits: WeightBits, group_size: int) -> Matrix:
    return quantize_int4(weight, group_size) if bits == "int4" else quantize(weight, group_size)


def compensated(weight: Tensor, hessian: Tensor, bits: WeightBits, group_size: int = 0) -> Matrix:
    out = rounded(torch.zeros_like(weight), bits, group_size)
    if isinstance(out, Int4Tensor):
        compensate_int4(weight, plan_turns(hessian, torch.zeros_like(hessian)), out)
    else:
        assert isinstance(out, QuantizedTensor)
        compensate_int8(weight, plan_turns(hessian, torch.zeros_like(hessian)), out)
    return out


def compensated_plainly(weight: Tensor, hessian: Tensor, scale: Tensor) -> Tensor:
    """Algorithm 1 without its tricks: the inverse of what is left, made anew for each column. Columns with
    the largest inputs come first."""
    left, damped = weight.double().clone(), hessian.double().clone()
    damped += DAMPING * hessian.double().diagonal().mean() * torch.eye(len(hessian))
    integers = torch.zeros(weight.shape)
    waiting = sorted(range(len(hessian)), key=lambda column: -float(hessian[column, column]))
    while waiting:
        column = waiting[0]
        inverse = torch.linalg.inv(damped[waiting][:, waiting])
        integers[:, column] = (left[:, column].float() / scale).round().clamp(-127, 127)
        error = (left[:, column] - integers[:, column] * scale) / inverse[0, 0]
        left[:, waiting] -= torch.outer(error, inverse[0])
        waiting.pop(0)
    return integers


def test_it_is_the_algorithm_of_the_paper() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = correlated_inputs(40, generator), torch.randn(24, 40, generator=generator)
    found = compensated(weight, x.t() @ x, "int8")
    assert isinstance(found, QuantizedTensor)
    expected = compensated_plainly(weight, x.t() @ x, quantize(weight).scale)
    # Float32 against float64: a column may come to lie on the other side of a half.
    assert (found.qweight.float() != expected).float().mean() < 0.01
    assert torch.equal(found.scale, quantize(weight).scale)


@pytest.mark.parametrize(("bits", "group_size"), FORMS)
def test_independent_inputs_are_rounded_plainly(bits: WeightBits, group_size: int) -> None:
    weight = torch.randn(16, 192)
    found = compensated(weight, torch.diag(torch.rand(192) + 0.5), bits, group_size)
    assert torch.equal(found.dequantize(), rounded(weight, bits, group_size).dequantize())


@pytest.mark.parametrize(("bits", "group_size"), FORMS)
def test_outputs_come_closer(bits: WeightBits, group_size: int) -> None:
    """More than one block of columns; inputs that are never there, and a large one, among them."""
    generator = torch.Generator().manual_seed(1)
    x, weight = correlated_inputs(320, generator), torch.randn(64, 320, generator=generator)
    x[:, 7] = 0
    x[:, 300] *= 20
    exact = x.double() @ weight.double().t()

    def error(matrix: Matrix) -> float:
        return float((x.double() @ matrix.dequantize().double().t() - exact).norm() / exact.norm())

    assert error(compensated(weight, x.t() @ x, bits, group_size)) < 0.6 * error(
        rounded(weight, bits, group_size)
    )


def test_matrices_make_up_for_inputs_that_have_drifted() -> None:
    """As far as the drift follows from the inputs."""
    generator = torch.Generator().manual_seed(2)
    x, weight = correlated_inputs(64, generator), torch.randn(32, 64, generator=generator)
    wanted = x + x @ torch.randn(64, 64, generator=generator) * 0.02
    hessian, drift = x.t() @ x, (wanted - x).t() @ x
    errors = []
    for known in (drift, torch.zeros_like(drift)):
        out = quantize(torch.zeros_like(weight))
        compensate_int8(weight, plan_turns(hessian, known), out)
        errors.append(float((x @ out.dequantize().t() - wanted @ weight.t()).norm()))
    assert errors[0] < 0.2 * errors[1]


def test_a_hessian_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="infinite"):
        plan_turns(torch.full((4, 4), torch.inf), torch.zeros(4, 4))


TEXT = torch.randint(VOCAB_SIZE, (2000,), generator=torch.Generator().manual_seed(4)).tolist()


def calibrated(
    folder: Path, group_size: int | None = None, bits: WeightBits = "int8"
) -> tuple[WeightStore, Calibration]:
    opened = open_model(folder, group_size=group_size, weights=bits)
    use_processor(EngineConfig(), 2)
    kernels = choose_kernels(EngineConfig())
    return opened.store, Calibration(opened, kernels, TEXT, len(TEXT))


@pytest.mark.parametrize(
    ("kind", "bits", "group_size"),
    [
        ("Llama", "int8", None), ("Llama", "int8", 32), ("Llama", "int4", 32), ("GPT-2", "int4", 32),
        ("Phi-3", "int8", None), ("BLOOM", "int8", 32), ("Gemma 2", "int4", 32),
    ],
)  # fmt: skip
def test_layers_are_compensated_by_what_they_see(
    kind: str, bits: WeightBits, group_size: int | None, tmp_path: Path
) -> None:
    """The integers of a layer are those that its own inputs call for, computed apart."""
    build(kind, tmp_path / "source")
    store, calibration = calibrated(tmp_path / "source", group_size, bits)
    convert(store, tmp_path / "out", rounding=calibration)
    found = open_model(tmp_path / "out").store
    plain = open_model(tmp_path / "source", group_size=group_size, weights=bits).store
    for index in range(plain.num_layers):
        mine, theirs = read_layer(found, index), read_layer(plain, index)
        for name, tensor in theirs.items():
            if isinstance(tensor, Tensor):
                assert torch.equal(tensor, mine.vector(name))
                continue
            # Neighbours of what plain rounding gives.
            lost = (mine.matrix(name).dequantize() - tensor.dequantize()).norm()
            share = float(lost / tensor.dequantize().norm())
            assert 0 < share < (0.02 if bits == "int8" else 0.3), (index, name)


@pytest.mark.parametrize(
    ("kind", "bits", "group_size"),
    [("Qwen2-MoE", "int8", None), ("gpt-oss", "int4", 32)],
)
def test_experts_are_compensated_by_their_own_rows(
    kind: str, bits: WeightBits, group_size: int | None, tmp_path: Path
) -> None:
    """The exact path through stand-ins of experts is transformers' model; each expert's integers are
    neighbours of what plain rounding gives."""
    build(kind, tmp_path / "source", num_hidden_layers=2)
    store, calibration = calibrated(tmp_path / "source", group_size, bits)
    convert(store, tmp_path / "out", rounding=calibration)
    theirs = UnquantizedModel(open_model(tmp_path / "source")).forward(calibration._text.ids).hidden[-1]
    mine = torch.cat(calibration._text.exact).view(theirs.shape)
    assert float((mine - theirs).norm() / theirs.norm()) < 1e-3
    found = open_model(tmp_path / "out").store
    plain = open_model(tmp_path / "source", group_size=group_size, weights=bits).store
    shares = []
    for key in (key for key in plain.units if key.expert is not None):
        units = [each.read_unit(key, torch.empty(plain.units[key].num_bytes, dtype=torch.uint8))
                 for each in (found, plain)]  # fmt: skip
        for name in ("gate_up", "down"):
            own, rounded = (unit.matrix(name).dequantize() for unit in units)
            shares.append(float((own - rounded).norm() / rounded.norm()))
    assert sorted(shares)[len(shares) // 2] > 0 and max(shares) < (0.02 if bits == "int8" else 0.3)


def test_chunks_of_rows_are_compensated_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("Llama", tmp_path / "source", num_hidden_layers=1)
    found = []
    for name, elements in (("whole", 1 << 22), ("chunks", 64 * 40)):
        monkeypatch.setattr("penstock.calibrate.CHUNK_ELEMENTS", elements)
        store, calibration = calibrated(tmp_path / "source", bits="int4", group_size=32)
        convert(store, tmp_path / name, rounding=calibration)
        found.append(read_layer(open_model(tmp_path / name).store, 0))
    for name, matrix in found[0].items():
        if isinstance(matrix, Int4Tensor):
            lost = (matrix.dequantize() - found[1].matrix(name).dequantize()).norm()
            assert lost <= 0.02 * matrix.dequantize().norm(), "a product's last bit may turn a code"


def test_threads_of_torch_meet_where_it_is_worth_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside busy processes, each meeting of threads takes milliseconds. A small model has none."""
    monkeypatch.setattr(torch_threads, "num_physical_cores", lambda: 3)
    build("Llama", tmp_path / "source", num_hidden_layers=1)
    seen = []
    for of, name in ((ListeningKernels, "linear"), (calibrate, "plan_turns"), (calibrate, "compensate_int8")):
        heard = getattr(of, name)

        def noted(*values: object, call: Callable[..., object] = heard) -> object:
            seen.append(torch.get_num_threads())
            return call(*values)

        monkeypatch.setattr(of, name, noted)
    with torch_threads.torch_threads(2):
        store, calibration = calibrated(tmp_path / "source")
        convert(store, tmp_path / "out", rounding=calibration)
        assert seen and set(seen) == {1} and torch.get_num_threads() == 2
        with torch_threads.threads_for(2.0 * 1024 * 4096 * 4096):
            assert torch.get_num_threads() == 3
        for width, number in ((512, 2), (4096, 3)):
            with torch_threads.threads_to_factorize(width):
                assert torch.get_num_threads() == number


def test_a_text_that_is_too_short_or_a_model_in_int8(tmp_path: Path) -> None:
    build("Llama", tmp_path / "source")
    opened, kernels = open_model(tmp_path / "source"), choose_kernels(EngineConfig())
    with pytest.raises(ConfigError, match="100 tokens"):
        Calibration(opened, kernels, TEXT[:100], 1000)
    convert(opened.store, tmp_path / "int8")
    with pytest.raises(ConfigError, match="quantized already"):
        Calibration(open_model(tmp_path / "int8"), kernels, TEXT, 1000)


def test_each_sequence_begins_as_prompts_do(tmp_path: Path) -> None:
    """The names of roundings tell apart the tokens by which they were made."""
    build("Llama", tmp_path / "source")
    opened, kernels = open_model(tmp_path / "source"), choose_kernels(EngineConfig())
    length = opened.spec.max_position_embeddings
    texts = [TEXT[start : start + length - 1] for start in range(0, 3 * (length - 1), length - 1)]
    written = [token for text in texts for token in (0, *text)]
    found = Calibration(opened, kernels, TEXT, len(written) - 3, prefix=(0,))
    assert found.name == Calibration(opened, kernels, written, len(written)).name
    assert found.name != Calibration(opened, kernels, TEXT, len(written)).name


@pytest.mark.parametrize("kind", ["Llama", "Mixtral"])
def test_a_calibrated_conversion_goes_on_where_it_was_stopped(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And tensors are large enough for several threads."""
    monkeypatch.setattr("penstock.weights.tensor_quantizer.CHUNK_BYTES", 1000)
    build(kind, tmp_path / "source", num_hidden_layers=2)
    folders = [tmp_path / "whole", tmp_path / "stopped"]
    store, calibration = calibrated(tmp_path / "source")
    convert(store, folders[0], rounding=calibration)

    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise Stop

    store, calibration = calibrated(tmp_path / "source")
    with pytest.raises(Stop):
        convert(store, folders[1], stop, calibration)
    with pytest.raises(ConfigError, match="in another way"):
        convert(store, folders[1])
    store, calibration = calibrated(tmp_path / "source")
    report = convert(store, folders[1], rounding=calibration)
    assert 0 < report.num_resumed < report.num_files
    for path in folders[0].glob("*.safetensors"):
        assert path.read_bytes() == (folders[1] / path.name).read_bytes(), path.name
