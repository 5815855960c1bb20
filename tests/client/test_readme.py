"""The examples of the README run as they are written."""

import re
from pathlib import Path

import pytest

from . import samples
from .fake_server import Answer, Events, Received, Script

README = Path(__file__).parents[2] / "clients" / "python" / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def answer(received: Received) -> Script:
    if received.path == "/v1/models":
        return Answer.json(samples.MODELS)
    if received.path == "/health":
        return Answer.json({"status": "ok"})
    is_chat = received.path == "/v1/chat/completions"
    if received.body["stream"]:
        return Events([samples.chat_stream() if is_chat else samples.completion_stream()])
    return Answer.json(samples.chat() if is_chat else samples.completion())


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example, server, monkeypatch, capsys):
    monkeypatch.setenv("PENSTOCK_BASE_URL", server.url)
    server.fallback = answer
    exec(compile(example, str(README), "exec"), {"__name__": "__main__"})
    assert server.received
    assert capsys.readouterr().out


def test_there_are_examples():
    assert len(EXAMPLES) >= 4
