"""Detours are found, and what loads nothing is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from import_graph import ImportGraph


@pytest.fixture
def graph(tmp_path: Path) -> ImportGraph:
    files = {
        "a/__init__.py": '_HOMES = {"Late": "a.heavy"}\n',
        "a/heavy.py": "import torch.nn\n",
        "a/middle.py": "try:\n    from a import heavy\nexcept ImportError:\n    pass\n",
        "a/by_detour.py": "import a.middle\n",
        "a/by_name.py": "from a import Late\n",
        "a/lazy.py": "def f():\n    import torch\n",
        "a/typed.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n",
        "a/part/__init__.py": "import a.middle\n",
        "a/part/leaf.py": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    return ImportGraph(tmp_path / "a")


@pytest.mark.parametrize(
    ("module", "way"),
    [
        ("a.heavy", ["a.heavy", "torch"]),
        ("a.by_detour", ["a.by_detour", "a.middle", "a.heavy", "torch"]),
        ("a.by_name", ["a.by_name", "a.heavy", "torch"]),
        ("a.part.leaf", ["a.part.leaf", "a.part", "a.middle", "a.heavy", "torch"]),
        ("a.lazy", []),
        ("a.typed", []),
        ("a", []),
    ],
)
def test_ways_to_torch(graph: ImportGraph, module: str, way: list[str]) -> None:
    assert graph.way(module, "torch") == way
