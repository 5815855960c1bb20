"""Answers in the terminal: text on stdout, everything else on stderr."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pty
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fakes import FakeEngine
from penstock.engine import Engine
from penstock.errors import ComputationError, ConfigError, RequestError
from penstock.generation.beam_search import BeamParams
from penstock.generation.chosen import Chosen
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock_server.commands import terminal
from penstock_server.commands.talking.answering import REQUEST_ID, answer
from penstock_server.settings.settings import Settings

SETTINGS = Settings(model="tiny")
BEAM_FLAGS = ("num_beams", "length_penalty", "early_stopping")


def options(**given: Any) -> argparse.Namespace:
    names = [*terminal._SAMPLING_FLAGS, "stop", "prompt", "system", *BEAM_FLAGS]
    return argparse.Namespace(**(dict.fromkeys(names) | given))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine()
    monkeypatch.setattr(terminal, "load_engine", lambda settings: engine)
    monkeypatch.setattr(terminal, "with_history", lambda path: contextlib.nullcontext())
    engine.default_sampling = {"temperature": 0.6}
    return engine


def asked(params: SamplingParams) -> GenerationRequest:
    return GenerationRequest([5, 6], params, REQUEST_ID)


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """What the user types at the prompt; at the end, the end of input."""
    left: list[Any] = [*lines, EOFError]

    def read(prompt: str) -> str:
        line = left.pop(0)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)


def test_generate_prints_the_text_and_then_the_rate(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert terminal.generate(SETTINGS, options(prompt="Say ", max_tokens=9)) == 0
    printed = capsys.readouterr()
    assert printed.out == "Hello!\n"
    assert "6 tokens in" in printed.err and "tokens/s" in printed.err
    assert engine.prompts == ["Say "] and engine.is_closed
    assert (engine.params[0].max_tokens, engine.params[0].temperature) == (9, 0.6)


def test_generate_reads_stdin(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    terminal.generate(SETTINGS, options())
    assert engine.prompts == ["from a pipe\n"]


def test_flags_win_over_the_models_defaults(engine: FakeEngine) -> None:
    terminal.generate(SETTINGS, options(prompt="x", temperature=0.0, seed=1, stop=["a", "b"]))
    params = engine.params[0]
    assert (params.temperature, params.seed, params.stop) == (0.0, 1, ("a", "b"))


def test_generate_searches_with_beams(engine: FakeEngine) -> None:
    terminal.generate(SETTINGS, options(prompt="x", num_beams=3, length_penalty=0.5, early_stopping="never"))
    terminal.generate(SETTINGS, options(prompt="x", num_beams=2, early_stopping="true"))
    assert [each.beams for each in engine.params] == [
        BeamParams(3, 1, 0.5, "never"),
        BeamParams(2, 1, 1.0, True),
    ]
    assert engine.params[0].temperature == 1.0, "the model's own temperature is for draws"


def test_flags_of_a_beam_search_need_one() -> None:
    for name, value in (("length_penalty", 0.5), ("early_stopping", "true")):
        with pytest.raises(ConfigError, match="--num-beams"):
            terminal.generate(SETTINGS, options(prompt="x", **{name: value}))
    with pytest.raises(ConfigError, match="--temperature: .* beam search"):
        terminal.generate(SETTINGS, options(prompt="x", num_beams=2, temperature=0.5))


@pytest.mark.parametrize("run", [terminal.generate, terminal.chat])
def test_wrong_flags_are_told_before_the_model_is_loaded(run: Any) -> None:
    with pytest.raises(ConfigError, match="--top-p: .* between 0 and 1"):
        run(SETTINGS, options(prompt="x", top_p=2.0))


def test_chat_remembers_until_reset(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "Hi", "", "And you?", "/reset", "Anew", "/quit", "never")
    assert terminal.chat(SETTINGS, options(system="Be kind")) == 0
    begin = "system: Be kind\nuser: "
    assert engine.prompts == [
        begin + "Hi\nassistant:",
        begin + "Hi\nassistant: Hello!\nuser: And you?\nassistant:",
        begin + "Anew\nassistant:",
    ]
    printed = capsys.readouterr()
    assert printed.out == "Hello!\n" * 3
    assert printed.err.count("tokens/s") == 3


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_chat_ends_at_the_prompt(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, end: type[BaseException]
) -> None:
    type_lines(monkeypatch, end, "never")
    assert terminal.chat(SETTINGS, options()) == 0
    assert engine.prompts == []


def test_chat_explains_unknown_commands(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "/fly", "/help", "/retry")
    terminal.chat(SETTINGS, options())
    told = capsys.readouterr().err
    assert "There is no /fly" in told and "/save FILE" in told and "no message to answer" in told
    assert engine.prompts == []


def test_chat_has_commands(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "kept.json"
    type_lines(
        monkeypatch, "Hi", "/system Be kind", "/retry", "//path", f"/save {path}", f"/save {path}", "/save"
    )
    terminal.chat(SETTINGS, options())
    begin = "system: Be kind\nuser: Hi\nassistant:"
    assert engine.prompts == ["user: Hi\nassistant:", begin, f"{begin} Hello!\nuser: /path\nassistant:"]
    said = [("system", "Be kind"), ("user", "Hi"), ("assistant", "Hello!")]
    said += [("user", "/path"), ("assistant", "Hello!")]
    kept = json.loads(path.read_text())["messages"]
    assert [(each["role"], each["content"]) for each in kept] == said
    told = capsys.readouterr().err
    assert "can't be written: File exists" in told and "Name a file" in told


def test_a_message_has_more_lines(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    type_lines(monkeypatch, "one\\", "two", '"""three', " four", 'five"""', '"""six"""')
    terminal.chat(SETTINGS, options())
    asked = [prompt.removesuffix("\nassistant:").rpartition("user: ")[2] for prompt in engine.prompts]
    assert asked == ["one\ntwo", "three\n four\nfive", "six"]


def test_ctrl_c_drops_a_message_that_was_begun(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    type_lines(monkeypatch, "one\\", KeyboardInterrupt, "two", KeyboardInterrupt, "never")
    terminal.chat(SETTINGS, options())
    assert engine.prompts == ["user: two\nassistant:"]


HALF_TYPED = """
import sys
from pathlib import Path
from penstock_server.commands.talking.lines import messages, with_history
with with_history(Path(sys.argv[1])):
    for message in messages():
        print("got", repr(message), flush=True)
print("ended", flush=True)
"""


def test_ctrl_c_clears_a_half_typed_line_and_history_stays(tmp_path: Path) -> None:
    """In a terminal of its own, with the real readline."""
    pytest.importorskip("readline")
    path = tmp_path / "history"
    heard = in_terminal(
        path, [("> ", "half"), ("half", "\x03"), ("> ", "whole\n"), ("got 'whole'\r\n> ", "\x03")]
    )
    assert "got 'half" not in heard and "ended" in heard
    assert path.stat().st_mode & 0o077 == 0
    heard = in_terminal(path, [("> ", "\x1b[A\n"), ("got 'whole'\r\n> ", "\x04")])
    assert "ended" in heard


def in_terminal(path: Path, script: list[tuple[str, str]]) -> str:
    """What the program prints; each text is typed when what was printed since the last one ends so."""
    child, terminal_fd = pty.fork()
    if child == 0:
        os.environ["TERM"] = "dumb"
        # Tests that run in the background may ignore SIGINT, and their children would too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.execv(sys.executable, [sys.executable, "-c", HALF_TYPED, str(path)])
    heard = ""
    for wanted, typed in script:
        part = ""
        while not part.endswith(wanted):
            part += os.read(terminal_fd, 1000).decode()
        heard += part
        # Python's readline forgets a signal that comes before it waits for a key: select() begins anew then.
        while Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.01)
        os.write(terminal_fd, typed.encode())
    with contextlib.suppress(OSError):  # a terminal whose program has ended gives an error
        while data := os.read(terminal_fd, 1000):
            heard += data.decode()
    os.close(terminal_fd)
    assert os.waitpid(child, 0)[1] == 0
    return heard


def test_a_message_that_is_too_long_is_forgotten(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "x" * 2000, "Hi")
    terminal.chat(SETTINGS, options())
    assert engine.prompts == ["user: Hi\nassistant:"]
    assert "(/reset begins anew)" in capsys.readouterr().err


def test_chat_needs_a_template(engine: FakeEngine) -> None:
    engine.tokenizer.has_chat_template = False
    with pytest.raises(RequestError, match="penstock generate"):
        terminal.chat(SETTINGS, options())
    assert engine.is_closed


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_cuts_an_answer_between_steps(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.script = ["Hel", press_ctrl_c, "lo"]
    before = signal.getsignal(signal.SIGINT)
    type_lines(monkeypatch, "Hi", "Go on")
    terminal.chat(SETTINGS, options())
    assert engine.num_aborted == 2
    assert engine.prompts[1] == "user: Hi\nassistant: Hel\nuser: Go on\nassistant:"
    assert capsys.readouterr().out == "Hel\nHel\n\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_ends_a_sweep_between_layers(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pressed during layer 1 of the second sweep: layer 2 is not computed, and the next answer is whole.
    Layers come one by one here."""
    computed: list[int] = []
    with Engine.load(tiny_llama) as engine:
        family = engine.model.executor._family
        monkeypatch.setattr(type(family), "most_together", 1)
        layer = family.layer

        def watch(index: int, *arguments: Any) -> Any:
            computed.append(index)
            if len(computed) == 5:
                press_ctrl_c()
            return layer(index, *arguments)

        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        whole = answer(engine, asked(params))
        monkeypatch.setattr(family, "layer", watch)
        cut = answer(engine, asked(params))
        assert computed == [0, 1, 2, 0, 1]
        assert cut.num_tokens == 1 and whole.text.startswith(cut.text)
        assert answer(engine, asked(params)).text == whole.text
        assert not engine.has_work


def test_a_request_that_fails_is_an_error(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.load(tiny_llama) as engine:
        monkeypatch.setattr(
            engine.chooser, "choose", lambda *_: [Chosen(error=ComputationError("not a number"))]
        )
        with pytest.raises(ComputationError):
            answer(engine, asked(SamplingParams()))


def test_a_second_ctrl_c_ends_the_program(engine: FakeEngine) -> None:
    def twice() -> None:
        press_ctrl_c()
        press_ctrl_c()

    engine.script = ["Hel", twice, "lo"]
    with pytest.raises(KeyboardInterrupt):
        terminal.generate(SETTINGS, options(prompt="x"))
    assert engine.is_closed
