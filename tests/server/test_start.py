"""Processes of commands: interrupted while they import, refused while a thread still imports, and unheard.
The command itself is a small module in its place, so that nothing takes seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


def run(program: str, **streams: int) -> subprocess.CompletedProcess[bytes]:
    """`penstock`, with `program` as penstock_server.cli."""
    begin = (
        "import sys, types\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'penstock_server.cli':\n"
        "            from importlib.machinery import ModuleSpec\n"
        "            return ModuleSpec(name, self)\n"
        "    def create_module(self, spec): return None\n"
        f"    def exec_module(self, module): exec({program!r}, module.__dict__)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from penstock_server.start import main\n"
        "sys.exit(main())\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.run([sys.executable, "-c", begin], timeout=300, **pipes)  # type: ignore[call-overload,no-any-return]


def test_ctrl_c_while_it_imports_is_quiet() -> None:
    done = run(f"import os, time\nos.kill(os.getpid(), {int(signal.SIGINT)})\ntime.sleep(600)")
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_a_command_that_failed_waits_for_no_thread() -> None:
    """As the one that makes a tokenizer, for which it imports transformers."""
    done = run(
        "import sys, threading\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "def main():\n"
        "    ThreadPoolExecutor(1).submit(threading.Event().wait)\n"
        "    print('what was said before')\n"
        "    print('penstock: refused', file=sys.stderr)\n"
        "    return 1\n"
    )
    assert (done.returncode, done.stdout) == (1, b"what was said before\n")
    assert done.stderr == b"penstock: refused\n"


@pytest.mark.parametrize(("code", "expected"), [("0", 0), ("'2'", 1), ("2", 2), ("None", 0)])
def test_the_parsers_own_exit_codes(code: str, expected: int) -> None:
    assert run(f"import sys\ndef main(): sys.exit({code})").returncode == expected


def test_an_error_that_nobody_reads() -> None:
    """`penstock ... 2>&1 | head -0`."""
    reading, writing = os.pipe()
    os.close(reading)
    program = "import sys\ndef main():\n    print('penstock: refused', file=sys.stderr, flush=True)\n"
    try:
        done = run(program, stdout=writing, stderr=writing)
    finally:
        os.close(writing)
    assert done.returncode == 1


def test_the_version_is_that_of_the_package() -> None:
    import penstock_server

    assert penstock_server.__version__[0].isdigit()
    with pytest.raises(AttributeError, match="no attribute 'versoin'"):
        penstock_server.versoin  # noqa: B018


def test_every_way_to_begin_is_this_one() -> None:
    root = Path(__file__).parents[2]
    for path in ("engine/penstock/__main__.py", "server/penstock_server/__main__.py"):
        assert "from penstock_server.start import main" in (root / path).read_text()
    assert 'penstock = "penstock_server.start:main"' in (root / "pyproject.toml").read_text()
