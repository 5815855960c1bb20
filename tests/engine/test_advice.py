"""The sampling parameters that requests get which don't say otherwise, of folders and of GGUF files."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from penstock.loader.advice import read_advice

gguf: Any = pytest.importorskip("gguf", reason="the extra gguf has the package")

#: llama-server --help: --temp, --top-k, --top-p, --min-p.
LLAMA_CPP = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


def gguf_file(path: Path, **sampling: float) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in sampling.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"general.sampling.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("sampling", "advice"),
    [
        ({}, LLAMA_CPP),
        ({"temp": 0.6, "top_k": 20}, LLAMA_CPP | {"temperature": 0.6, "top_k": 20}),
        ({"top_p": 0.8, "min_p": 0.0}, LLAMA_CPP | {"top_p": 0.8, "min_p": 0.0}),
        ({"penalty_repeat": 1.05}, LLAMA_CPP | {"repetition_penalty": 1.05}),
    ],
)
def test_of_a_gguf_file(tmp_path: Path, sampling: dict[str, float], advice: dict[str, float]) -> None:
    assert read_advice(gguf_file(tmp_path / "model.gguf", **sampling)) == advice


def test_a_value_that_no_request_may_have_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = read_advice(gguf_file(tmp_path / "model.gguf", temp=-1.0, top_p=0.5))
    assert found == LLAMA_CPP | {"top_p": 0.5} and "model.gguf: temperature" in caplog.text


def test_of_a_folder(tmp_path: Path) -> None:
    assert read_advice(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "do_sample": False}))
    assert read_advice(tmp_path) == {"temperature": 0.7}
