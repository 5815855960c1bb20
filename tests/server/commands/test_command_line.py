"""Commands and flags: which there are, and what is said of others."""

from __future__ import annotations

import contextlib

import pytest

from penstock.memory.planning.cards import CARDS
from penstock.memory.planning.processors import PROCESSORS
from penstock.model.known_shapes import SHAPES
from penstock_server.commands.command_line import build_parser


@pytest.mark.parametrize(
    ("arguments", "message", "command"),
    [
        ([], "required: COMMAND", "penstock"),
        (["fly"], "invalid choice: 'fly'", "penstock"),
        (["serve", "m", "--port", "x"], "--port: 'x' is no whole number", "penstock serve"),
        (["serve", "m", "--port"], "--port: expected one argument", "penstock serve"),
        (["serve", "m", "--device", "tpu"], "invalid choice: 'tpu'", "penstock serve"),
        (["chat", "m", "--host", "x"], "unrecognized arguments: --host x\n", "penstock chat"),
        (["chat", "m", "--max-token=8"], "--max-token=8; did you mean --max-tokens?", "penstock chat"),
        # Half a flag is no flag.
        (["serve", "m", "--max-num-seq", "8"], "did you mean --max-num-seqs?", "penstock serve"),
        (["batch", "in"], "required: OUT", "penstock batch"),
    ],
)
def test_wrong_usage_is_an_error_and_a_hint(
    arguments: list[str], message: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("penstock: ") and message in error
    assert error.endswith(f"\n`{command} --help` lists what there is\n") and error.count("\n") == 2


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("plan", [*SHAPES, *(card.name for card in CARDS), *(each.name for each in PROCESSORS)]),
        ("bench", list(SHAPES)),
    ],
)
def test_help_lists_the_names_that_a_flag_takes(
    command: str, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args([command, "--help"])
    text = "".join(capsys.readouterr().out.split())  # lines are broken anywhere, after a dash also
    assert len(names) > 5
    for name in names:
        assert "".join(name.split()) in text


ALL = {"serve", "generate", "chat", "plan", "hardware", "bench", "convert", "report", "eval"}


@pytest.mark.parametrize(
    ("flag", "commands"),
    [
        ("--revision=x", ALL - {"hardware"}),
        ("--offline", ALL - {"hardware"}),
        ("--ignore-unexpected-tensors", ALL - {"hardware", "plan"}),
        ("--convert-to=x", {"serve", "generate", "chat", "eval"}),
        ("--cache-dir=x", (ALL | {"doctor"}) - {"convert", "report"}),
        ("--group-size=32", ALL - {"hardware"}),
        ("--host-memory=1", {"serve", "generate", "chat", "plan", "bench", "eval"}),
        ("--threads=1", ALL - {"convert", "report"}),
        ("--kernels=torch", ALL - {"convert", "report"}),
        ("--max-queued-seqs=1", {"serve"}),
        ("--api-key=x", {"serve"}),
    ],
)
def test_a_flag_stands_on_the_commands_that_honour_it(flag: str, commands: set[str]) -> None:
    accepted = set()
    for command in ALL | {"doctor"}:
        with contextlib.suppress(SystemExit):
            needed = ["--text=x"] if command == "eval" else []
            build_parser().parse_args([command, flag, *needed])
            accepted.add(command)
    assert accepted == commands
