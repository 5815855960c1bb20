"""Templates that loop, grow or end their process are refused, and the next request is answered."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.errors import ContextOverflow, RequestFailed
from penstock.text import text_process
from penstock.text.text_process import Rendering, TextLost, TextProcess

FINE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
#: Loops and grows only where a message says so.
EVIL = """\
{% if messages[0].content == 'loop' %}
{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{% elif messages[0].content == 'grow' %}{% set ns = namespace(x='aaaaaaaa') %}
{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}
{% elif messages[0].content == 'list' %}{{ [messages] * 99999999999 }}
{% elif messages[0].content == 'power' %}{{ 9 ** (9 ** (8 + messages | length)) }}
{% elif messages[0].content == 'recursion' %}{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}
{% elif messages[0].content == 'write' %}
{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}{% endif %}"""


def asked(template: str, content: Any = "Hi") -> Rendering:
    return Rendering(template, [{"role": "user", "content": content}], {}, {}, True, False)


@pytest.fixture(scope="module")
def process() -> Iterator[TextProcess]:
    process = TextProcess()
    yield process
    process.close()


@pytest.mark.parametrize(
    "way",
    [
        "loop",
        "grow",
        *(pytest.param(way, marks=pytest.mark.slow) for way in ("list", "power", "recursion", "write")),
    ],
)
def test_a_template_that_does_not_end_is_refused(
    way: str, process: TextProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_process, "MAX_SECONDS", 0.5)
    with pytest.raises((TextLost, ValueError)):
        process.render(asked(EVIL, way))
    assert process.render(asked(FINE)) == ("[user]Hi", b"\1\1\1\1\1\1\0\0")


def test_a_process_that_was_killed_is_started_again(process: TextProcess) -> None:
    template = "{{ messages[0].content }}"
    process.render(asked(template))
    assert process._process is not None
    os.kill(process._process.pid, signal.SIGKILL)
    process._process.wait()
    assert process.render(asked(template))[0] == "Hi"


def test_the_length_is_checked_before_the_text_is_fetched(process: TextProcess) -> None:
    def check(num_chars: int) -> None:
        raise ContextOverflow("too long", num_chars, 1)

    with pytest.raises(ContextOverflow) as caught:
        process.render(asked("{{ 'a' * 1000 }}"), check)
    assert caught.value.num_prompt_tokens == 1000
    assert process.render(asked(FINE))[0] == "[user]Hi"


def test_the_templates_own_words_and_odd_values_come_back(process: TextProcess) -> None:
    with pytest.raises(ValueError, match="^no \ud800$"):
        process.render(asked("{{ raise_exception('no ' + messages[0].content) }}", "\ud800"))
    assert process.render(asked("{{ messages[0].content }}", "\ud800😀"))[0] == "\ud800😀"
    assert process.render(asked("{{ messages[0].content }}", {1, 2}))[0] == "<set>"
    with pytest.raises(ValueError, match="no JSON"):
        process.render(asked(FINE, threading.Lock()))


def test_long_conversations_have_longer_limits(process: TextProcess) -> None:
    text = "a😀" * 3_000_000
    assert process.render(asked("{{ messages[0].content | trim }}.", text))[0] == text + "."


@pytest.mark.parametrize("kind", ["-S", "-SH"])
def test_a_limit_of_memory_that_the_server_has_is_kept(kind: str) -> None:
    program = (
        "from test_text_process import EVIL, FINE, TextLost, TextProcess, asked\n"
        "process = TextProcess()\n"
        "for way in ('grow', 'Hi'):\n"
        "    try: process.render(asked(EVIL, way)); print('fine')\n"
        "    except TextLost: print('lost')\n"
        "print(process.render(asked(FINE))[0], process.render(asked(FINE))[0])"
    )
    ulimit = f"ulimit {kind} -v 16000000"
    found = subprocess.run(
        ["bash", "-c", f'{ulimit} && exec "$0" -c "$1"', sys.executable, program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert found.stdout.split() == ["lost", "fine", "[user]Hi", "[user]Hi"], found.stderr


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ("import nothing_such", "status 1: ModuleNotFoundError: No module named 'nothing_such'"),
        ("import sys; sys.stdin.buffer.read(9); sys.exit(3)", "status 3: it said nothing"),
        ("import sys; print('x' * 9999 + '\\nlast', file=sys.stderr); sys.exit(4)", "status 4: last"),
    ],
)
def test_a_process_that_ends_for_another_reason_says_why(
    start: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = TextProcess()
    with monkeypatch.context() as patch:
        patch.setattr(text_process, "_START", start)
        for _ in range(2):
            with pytest.raises(RequestFailed, match=f"ended with {words}$"):
                process.render(asked(FINE))
    assert process.render(asked(FINE))[0] == "[user]Hi"


def test_what_the_process_says_fills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = "import sys; sys.stderr.write('x' * 1_000_000); sys.stderr.flush(); "
    monkeypatch.setattr(text_process, "_START", noise + text_process._START)
    process = TextProcess()
    assert process.render(asked(FINE))[0] == "[user]Hi"
    errors = process._errors
    process.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(errors)


def test_a_thread_does_not_wait_for_another_ones_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_process, "MAX_SECONDS", 20.0)
    children: list[Any] = []
    has_started = threading.Event()

    def loop() -> None:
        own = text_process.text_process()
        own.render(asked(FINE))
        children.append(own._process)
        has_started.set()
        with pytest.raises((TextLost, RequestFailed)):
            own.render(asked(EVIL, "loop"))
        own.render(asked(FINE))
        children.append(own._process)

    thread = threading.Thread(target=loop)
    thread.start()
    has_started.wait()
    assert text_process.text_process().render(asked(FINE))[0] == "[user]Hi"
    is_looping = thread.is_alive()
    children[0].kill()
    thread.join()
    assert is_looping
    assert all(child.poll() is not None for child in children), "a process ends with its thread"


def test_an_ended_process_leaves_nothing() -> None:
    process = TextProcess()
    process.render(asked(FINE))
    assert process._process is not None
    child = process._process
    process.close()
    process.close()
    assert child.returncode is not None and process.render(asked(FINE))[0] == "[user]Hi"
    child = process._process
    del process
    assert child.wait() is not None
