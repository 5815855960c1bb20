"""What README.md and docs/ tell a newcomer to type works: examples run on a real server, commands parse."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock_server.commands.command_line import build_parser

from .server_process import ServerProcess

ROOT = Path(__file__).parents[2]
#: The address in the examples.
ADDRESS = "http://127.0.0.1:8000"


def blocks(language: str, *files: str) -> list[str]:
    """Fenced blocks of a language."""
    texts = [(ROOT / file).read_text() for file in files]
    pattern = rf"^```{language}\n(.*?)^```"
    return [block for text in texts for block in re.findall(pattern, text, re.MULTILINE | re.DOTALL)]


PYTHON = blocks("python", "README.md", "docs/start.md")
#: The files whose commands parse.
GUIDES = [
    "README.md",
    "docker/GTX1060.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]
SHELL = "\n".join(blocks("sh", *GUIDES))
COMMANDS = sorted(
    set(
        re.findall(
            r"^(?:\.venv/bin/)?penstock ([^$\n]*?)(?:\s+#.*)?$", SHELL.replace("\\\n", " "), re.MULTILINE
        )
    )
)


def here(text: str, server: ServerProcess) -> str:
    """The example with the server's own address."""
    return text.replace(ADDRESS, server.url)


@pytest.mark.parametrize("example", PYTHON, ids=lambda example: example.splitlines()[0])
def test_python_examples_print_an_answer(
    example: str, server: ServerProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_BASE_URL", server.url)
    exec(compile(here(example, server), "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_first_request_by_curl(server: ServerProcess) -> None:
    script = next(block for block in blocks("sh", "README.md") if block.startswith("curl"))
    answer = subprocess.run(["sh", "-c", here(script, server)], capture_output=True, text=True, check=True)
    assert '"finish_reason":"' in answer.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command: str) -> None:
    """Their flags exist, and so do the commands."""
    build_parser().parse_args(shlex.split(command))


def test_there_are_examples() -> None:
    assert len(PYTHON) >= 4 and len(COMMANDS) >= 60
