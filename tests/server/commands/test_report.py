"""The report of the quantization error, against numpy on the checkpoint's own tensors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import load_file
from test_gguf_types import MIXTURES, make

from penstock.config import EngineConfig
from penstock.model.registry import open_model, read_spec
from penstock.weights.quantization_error import QuantizationError
from penstock_server import cli
from penstock_server.commands.planning.footprints import footprint_at
from penstock_server.commands.report import table


def test_each_tensor_has_its_line(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tiny_llama), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    weights = load_file(tiny_llama / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    exact = weights[name].astype(numpy.float64)
    scale = numpy.abs(exact).max(1, keepdims=True) / 127
    difference = exact - numpy.round(exact / scale) * scale
    expected = numpy.linalg.norm(difference) / numpy.linalg.norm(exact)
    assert rows[name]["relative"] == pytest.approx(expected, rel=1e-3)
    covered = {part for row in rows for part in row.split(", ")}
    assert covered == {name for name, tensor in weights.items() if tensor.ndim == 2}

    assert cli.main(["report", str(tiny_llama)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(rows) + 3 and lines[-1].startswith(f"{len(rows)} of {len(rows)} matrices")
    worst = max(rows.values(), key=lambda row: row["relative"])
    assert worst["name"] in lines[-1] and f"{worst['relative']:.2%}" in lines[-1]


def test_matrices_that_are_int8_already_are_counted() -> None:
    """As in the demo model, whose embedding alone is quantized when it is read."""
    lines = table([QuantizationError("embedding", 0.01, 0.02, 3.0)], 25)
    assert lines[-2].startswith("1 of 26 matrices are quantized; the worst is embedding: 1.00%")
    assert lines[-1] == "25 matrices are INT8 or 4 bits in the checkpoint already, and lose nothing"


def test_nothing_to_report_and_nothing_to_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert table([], 3) == ["The checkpoint is quantized already: nothing is quantized, and nothing is lost."]
    assert cli.main(["report", str(tmp_path / "nothing")]) == 1
    assert "penstock:" in capsys.readouterr().err


def test_a_file_with_several_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The parts of a matrix with several types are counted one by one; a plan knows the types as well."""
    make("Q4_K_M", tmp_path)
    file = str(tmp_path / "model.gguf")
    assert cli.main(["report", file]) == 0
    lines = capsys.readouterr().out.splitlines()
    # Q6_K: v and down of two layers, and the head. Kept: q, k, o, gate with up, and the embedding.
    assert lines[-2].startswith("5 of 14 matrices are quantized")
    assert lines[-1].startswith("9 matrices are INT8 or 4 bits in the checkpoint already")
    store = open_model(tmp_path / "model.gguf").store
    size = footprint_at(tmp_path / "model.gguf", EngineConfig())
    assert sum(size.layer_bytes) == store.tensors.layer_bytes
    plain = read_spec(store.checkpoint.config)
    assert sum(size.layer_bytes) < 0.75 * plain[0].model_tensors(plain[1]).layer_bytes


@pytest.mark.parametrize("kind", ["Q8_0", "IQ3"])
def test_a_plan_tells_bits_and_loss_of_a_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is lost; or the share of the types that are kept, beside one that is rounded."""
    monkeypatch.setitem(MIXTURES, "Q8_0", {"": "Q8_0"})
    make(kind, tmp_path)
    store = open_model(tmp_path / "model.gguf").store
    assert cli.main(["plan", str(tmp_path / "model.gguf")]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("weights: "))
    assert line.endswith("kept without loss") and store.lossless_share == 1
    bits = float(line.partition("in memory ")[2].partition(" ")[0])
    assert abs(bits - 8 * store.facts.num_bytes / store.facts.num_parameters) < 0.06
    make("Q2_K", tmp_path)
    assert cli.main(["plan", str(tmp_path / "model.gguf")]) == 0
    assert re.search(r"; \d\d?% kept without loss, the others rounded", capsys.readouterr().out)
