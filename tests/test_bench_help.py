"""`--help` of each benchmark says what it measures: the whole first paragraph of its file."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = [
    file
    for file in sorted((Path(__file__).parent / "bench").glob("*.py"))
    if "ArgumentParser(" in file.read_text()
]


@pytest.mark.parametrize("file", BENCHMARKS, ids=lambda file: file.stem)
def test_help(file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if "\nimport llama_cpp" in file.read_text():
        pytest.importorskip("llama_cpp", reason="the peer is not a part of an installation")
    monkeypatch.setattr(sys, "argv", [str(file), "--help"])
    monkeypatch.syspath_prepend(str(file.parent))
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(file), run_name="__main__")
    told = "".join(capsys.readouterr().out.split())  # the parser breaks lines, and words with hyphens
    assert not stopped.value.code
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    paragraph = text.split("\n\n")[0]
    assert "".join(paragraph.split()) in told
    assert not paragraph.endswith(":") or "".join(text.split()) in told, "the list behind it is missing"
