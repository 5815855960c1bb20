"""The command line: help without the engine, errors in one line, exit codes."""

from __future__ import annotations

import argparse
import errno
import io
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import CheckpointNotFound, PenstockError
from penstock_server import cli
from penstock_server.commands import terminal
from penstock_server.commands.talking.lines import typed_text
from penstock_server.serving import serve
from penstock_server.serving.listener import bind
from penstock_server.settings.settings import Settings
from warm_python import environment


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PENSTOCK_"):
            monkeypatch.delenv(name)


def test_help_is_grouped_and_waits_for_neither_torch_nor_server() -> None:
    program = (
        "import sys, penstock; from penstock_server import cli\n"
        "try: cli.main(['serve', '--help'])\n"
        "finally: assert not {'fastapi', 'torch'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for heading in ("model:", "engine: memory and arithmetic:", "server:"):
        assert heading in done.stdout


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0), (["--version"], 0), (["generate", "--help-all"], 0), (["nonsense"], 2),
        (["serve"], 2), (["list"], 0), (["list", "--json"], 0), (["rm", "owner/none"], 1),
    ],
)  # fmt: skip
def test_what_needs_no_arithmetic_waits_for_none(words: list[str], code: int, tmp_path: Path) -> None:
    program = (
        "import sys; from penstock_server import cli\n"
        "try: code = cli.main(sys.argv[1:])\n"
        "except SystemExit as leaving: code = leaving.code\n"
        "slow = {'fastapi', 'httpx2', 'numpy', 'tokenizers', 'torch', 'tqdm', 'transformers'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
        "sys.exit(code)"
    )
    command = [sys.executable, "-c", program, *words]
    environ = environment() | {"HF_HOME": str(tmp_path), "PENSTOCK_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode == code, done.stderr
    assert "Error" not in done.stderr


@pytest.mark.parametrize("module", ["penstock", "penstock_server"])
def test_it_can_be_run_as_a_module(module: str) -> None:
    command = [sys.executable, "-m", module, "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("penstock ")


def test_variables_of_other_commands_are_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_CONVERT_TO", "/nowhere")
    monkeypatch.setenv("PENSTOCK_MAX_QUEUED_SEQS", "1")
    assert cli.main(["report", "/no/such/folder"]) == 1
    assert "/no/such/folder is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "m", "--shape", "solar-10.7b"], "leave out MODEL"),
        (
            ["bench", "--offline", "--revision", "x", "--shape", "solar-10.7b"],
            "leave out offline and revision",
        ),
        (["convert", "--verify", "m", "out"], "--verify takes the folder"),
        (["convert", "--verify", "m", "--offline"], "--verify takes the folder"),
        (["convert", "m", "out", "--calibrate", "t", "--calibration-tokens", "-5"], "at least 1"),
        (["doctor", "--report", "x.json"], "add --card"),
        (["doctor", "/somewhere", "--card"], "looks at no folder"),
        (["plan", "demo", "--max-model-len", "5000"], "the model was made for 4096 positions"),
        (["serve"], "no model given"),
        (["serve", "m", "--block-size", "3"], "block_size is 3"),
        (["serve", "m", "--port", "99999"], "port is 99999"),
    ],
)
def test_wrong_settings_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    line = capsys.readouterr().err
    assert line.startswith("penstock: ") and message in line and line.count("\n") == 1


def test_a_wrong_variable_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_POTR", "1")
    assert cli.main(["serve", "m"]) == 2
    assert "PENSTOCK_POTR" in capsys.readouterr().err


def test_a_signal_ends_it_while_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-m", "penstock_server", "serve", "m", "--port", "0"]
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, timeout=300, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def raises(error: BaseException) -> Callable[..., int]:
    def run(*_: Any) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CheckpointNotFound("no such folder"), 1),
        (PenstockError("no such folder"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int) -> None:
    for command in ("serve", "generate", "chat"):
        monkeypatch.setattr(serve, "serve", raises(error))
        monkeypatch.setattr(terminal, "generate", raises(error))
        monkeypatch.setattr(terminal, "chat", raises(error))
        assert cli.main([command, "m", *(["--port", "0"] if command == "serve" else [])]) == code


def test_a_file_that_may_not_be_read_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "generate", raises(PermissionError(13, "Permission denied", "/models/m")))
    assert cli.main(["generate", "m"]) == 1
    assert capsys.readouterr().err == "penstock: /models/m: Permission denied\n"
    monkeypatch.setattr(terminal, "generate", raises(OSError(5, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):  # nothing says of what
        cli.main(["generate", "m"])


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "gbk", "utf-8"])
def test_characters_that_the_terminal_lacks_end_nothing(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """Of models' answers, and of whatever else commands print."""
    for name in ("generate", "chat"):
        written = io.BytesIO()
        text = "caf\u00e9 \u4e2d \U0001f680 \udcff."
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
        monkeypatch.setattr(terminal, name, lambda *_, text=text: print(text) or 0)
        assert cli.main([name, "m"]) == 0
        assert written.getvalue() == (text + "\n").encode(encoding, "replace")


def test_what_is_no_text_becomes_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes in a pipe, and on the command line, where Python has them as lone surrogates."""
    heard = []

    def generate(settings: Settings, options: argparse.Namespace) -> int:
        heard.append(typed_text(options.prompt))
        return 0

    monkeypatch.setattr(terminal, "generate", generate)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9!"), "utf-8"))
    assert cli.main(["generate", "m"]) == 0
    assert cli.main(["generate", "m", "--prompt", "caf\udce9!"]) == 0
    assert heard == ["caf\ufffd!"] * 2
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.main(["generate", "m"]) == 2


class Unwritable(io.RawIOBase):
    """A stdout whose end takes nothing more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.number:
            raise OSError(self.number, os.strerror(self.number))
        return len(data)


def test_the_last_lines_reach_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are still in Python's buffer when the command is done. A disk that is full is told."""
    monkeypatch.setattr(terminal, "generate", lambda *_: print("text") or 0)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    for number, said in ((errno.EPIPE, ""), (errno.ENOSPC, "penstock: the output can't be written: ")):
        raw = Unwritable(number)
        stdout = io.TextIOWrapper(io.BufferedWriter(raw), "utf-8")
        monkeypatch.setattr(stdout, "fileno", lambda: 1, raising=False)
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(["generate", "m"]) == 1
        assert capsys.readouterr().err.startswith(said)
        raw.number = 0  # for the end of the object


@pytest.mark.parametrize("command", ["generate", "fill", "chat"])
@pytest.mark.parametrize(
    ("flag", "value"),
    [("--temperature", "nan"), ("--num-beams", "0"), ("--max-tokens", "-1"), ("--stop", "")],
)
def test_a_wrong_sampling_flag_is_wrong_usage(
    command: str, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = {"generate": ["--prompt", "x"], "fill": ["--text", "____"], "chat": []}[command]
    assert cli.main([command, "there is none", *text, flag, value]) == 2
    assert capsys.readouterr().err.startswith(f"penstock: {flag}: ")


def test_each_command_gets_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, Settings]] = []

    def run_serve(settings: Settings, listener: socket.socket) -> int:
        assert listener.getsockname()[1] == settings.port
        listener.close()
        seen.append(("serve", settings))
        return 0

    monkeypatch.setattr(serve, "serve", run_serve)
    for name in ("generate", "chat"):

        def run(settings: Settings, options: Any, name: str = name) -> int:
            seen.append((f"{name} {options.temperature}", settings))
            return 0

        monkeypatch.setattr(terminal, name, run)
    monkeypatch.setenv("PENSTOCK_THREADS", "3")
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    assert cli.main(["serve", "m", "--port", str(port)]) == 0
    assert cli.main(["generate", "m", "--temperature", "0"]) == 0
    assert cli.main(["chat", "m", "--threads", "4"]) == 0
    assert [name for name, _ in seen] == ["serve", "generate 0.0", "chat None"]
    assert [settings.threads for _, settings in seen] == [3, 3, 4]
    assert seen[0][1].port == port


def test_a_port_in_use_and_wrong_settings_are_told_before_torch_is_imported() -> None:
    program = (
        "import sys; from penstock_server import cli\n"
        "assert cli.main(sys.argv[1:]) == 2 and 'torch' not in sys.modules"
    )
    with bind("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        for arguments, message in ((["--port", port], "in use"), (["--block-size", "5"], "block_size")):
            command = [sys.executable, "-c", program, "serve", "demo", *arguments]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0 and message in done.stderr, done.stderr


def test_every_name_of_the_package_can_be_imported() -> None:
    import penstock

    for name in penstock.__all__:
        value = getattr(penstock, name)
        assert getattr(value, "__name__", name) == name
    with pytest.raises(AttributeError, match="nothing"):
        _ = penstock.nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_another_system_is_named(
    system: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.platform", system)
    assert cli.main(["list"]) == 2
    assert f"runs on Linux, and this is {system}: use WSL2" in capsys.readouterr().err
