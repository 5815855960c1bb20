"""The report of the quantization error, against numpy on the checkpoint's own tensors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import load_file

from penstock.weights.quantization_error import QuantizationError
from penstock_server import cli
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
    assert lines[-1] == "25 matrices are quantized in the checkpoint already, and lose nothing"


def test_nothing_to_report_and_nothing_to_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert table([], 3) == ["The checkpoint is quantized already: nothing is rounded, and nothing is lost."]
    assert cli.main(["report", str(tmp_path / "nothing")]) == 1
    assert "penstock:" in capsys.readouterr().err
