"""The examples of the README and of the docstrings run as they are written, against a real server."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock_client._sync import client

README = Path(__file__).parents[2] / "clients" / "python" / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def environment(live_server, monkeypatch):
    monkeypatch.setenv("PENSTOCK_BASE_URL", live_server.url)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.splitlines()[-1][:40])
def test_example_of_the_readme(example, capsys):
    exec(compile(example, str(README), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


def test_types_of_the_examples(tmp_path):
    """mypy --strict, as users run it."""
    for number, example in enumerate(EXAMPLES):
        (tmp_path / f"example_{number}.py").write_text(example)
    package = README.parent / "penstock_client"
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir",
               str(tmp_path / "cache"), *map(str, tmp_path.glob("*.py"))]  # fmt: skip
    environment = os.environ | {"MYPYPATH": str(package.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_examples():
    assert len(EXAMPLES) >= 7


def test_examples_of_the_docstrings():
    result = doctest.testmod(client)
    assert result.attempted and not result.failed
