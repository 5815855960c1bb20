"""Templates that loop, grow or end their process are refused, and the next request is answered."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.errors import ContextOverflow
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
{% elif messages[0].content == 'power' %}{{ 9 ** (9 ** 9) }}
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


@pytest.mark.parametrize("way", ["loop", "grow", "list", "power", "recursion", "write"])
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
