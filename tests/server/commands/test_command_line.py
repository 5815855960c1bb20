"""Commands and flags: which there are, and what is said of others."""

from __future__ import annotations

import contextlib
import shlex

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
        (["serve", "m", "--device", "tpu"], "device is 'tpu'; choose auto, cpu, cuda", "penstock serve"),
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


COMMANDS = ("serve", "batch", "generate", "fill", "chat", "convert", "plan", "hardware", "bench", "doctor")


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(arguments)
    assert caught.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", [*COMMANDS, "report", "eval"])
def test_help_begins_with_what_a_command_does_and_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, empty, *rest = help_of(capsys, command, "--help").splitlines()
    assert first[0].isupper() and first.endswith(".") and empty == ""
    assert rest[0] == "For example:" and rest[1].startswith(f"  penstock {command} ")
    example = shlex.split(rest[1])
    assert build_parser().parse_args(example[1:]).command == command
    assert any(line.startswith(f"usage: penstock {command} ") for line in rest)


@pytest.mark.parametrize("command", ["generate", "fill", "chat"])
def test_help_has_what_people_use_and_help_all_the_rest(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    short, whole = (help_of(capsys, command, flag) for flag in ("--help", "--help-all"))
    for flag in ("MODEL", "--max-tokens", "--temperature", "--host-memory", "--help-all"):
        assert flag in short and flag in whole
    for flag in ("--num-beams", "--kv-dtype", "--kernel-tuning", "--no-repeat-ngram-size"):
        assert flag not in short and flag in whole
    assert "beam search" not in short and len(short) < len(whole) / 2


def test_the_model_of_a_batch_is_positional_or_a_flag() -> None:
    for arguments in (["m", "in", "out"], ["--model", "m", "in", "out"]):
        options = build_parser().parse_args(["batch", *arguments])
        assert (options.model, str(options.source), str(options.target)) == ("m", "in", "out")
    assert "model" not in build_parser().parse_args(["batch", "in", "out"])


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
        ("--device=cuda:1", (ALL | {"doctor"}) - {"convert", "report"}),
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
