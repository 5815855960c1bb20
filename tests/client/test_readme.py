"""The examples of the README and of the docstrings run as they are written, against a real server."""

import doctest
import re
from pathlib import Path

import pytest

from penstock_client import async_client, client

README = Path(__file__).parents[2] / "clients" / "python" / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def environment(live_server, monkeypatch):
    monkeypatch.setenv("PENSTOCK_BASE_URL", live_server.url)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.splitlines()[-1][:40])
def test_example_of_the_readme(example, capsys):
    exec(compile(example, str(README), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


def test_there_are_examples():
    assert len(EXAMPLES) >= 7


@pytest.mark.parametrize("module", [client, async_client])
def test_examples_of_the_docstrings(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
