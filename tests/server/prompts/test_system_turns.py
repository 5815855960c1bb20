"""System turns that are not the first: shown where they stand if the template shows them, and moved
otherwise, on all routes that read a conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from conftest import save_byte_tokenizer
from fakes import FakeAsyncEngine, FakeTokenizer
from penstock.errors import TemplateLost
from penstock.text.chat import render_chat
from penstock.text.tokenizer import Tokenizer
from penstock_server.prompts.system_turns import Probe, write_placed
from penstock_server.protocol.conversation import Turn

from ..conftest import MakeClient
from ..tools.chat_templates import HERMES, NO_SYSTEM, ONE_SYSTEM, PLAIN, STRICT

Use = Callable[[str], None]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("systems")
    save_byte_tokenizer(folder)
    return Tokenizer.load(folder)


@pytest.fixture
def use(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Use:
    """use(template): what the routes render with transformers, in the fake engine's tokens."""

    def render(fake: FakeTokenizer, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        ids = render_chat(tokenizer, messages, **kwargs)
        return fake.encode(tokenizer.decode(ids, skip_special_tokens=False))

    def use(template: str) -> None:
        tokenizer.backend.chat_template = template

    monkeypatch.setattr("penstock_server.prompts.inputs.render_chat", render)
    return use


def ask(client: TestClient, path: str, messages: list[dict[str, Any]], **fields: Any) -> Any:
    """The answer to a conversation that may begin with a system's message."""
    body: dict[str, Any] = {"messages": messages} | fields
    if path == "/api/chat":
        body |= {"model": "tiny", "stream": False}
    elif path.startswith("/v1/responses"):
        body = {"input": messages} | fields
    elif path == "/v1/messages":
        body["max_tokens"] = 9
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt(engine: FakeAsyncEngine) -> str:
    return bytes(engine.streams[-1].prompt).decode()


WRITING = ("/v1/chat/completions", "/v1/responses", "/api/chat", "/v1/messages")
S, T, U, V = (
    {"role": "system", "content": "Be kind."},
    {"role": "system", "content": "It is noon."},
    {"role": "user", "content": "Hi"},
    {"role": "user", "content": "Time?"},
)
A = {"role": "assistant", "content": "Hello"}


#: Gemma 3's way: the system's text stands in front of the user's, and nowhere without one.
_IN_FRONT_OF_THE_USERS = (
    "{%- set first = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' -%}"
    "{%- for message in messages if message.role != 'system' -%}"
    "<{{ message.role }}>{{ first if loop.first else '' }}{{ message.content }}</>"
    "{%- endfor -%}<assistant>"
)


@pytest.mark.parametrize("path", WRITING[:3])
def test_a_system_turn_alone_is_shown(
    make_client: MakeClient, engine: FakeAsyncEngine, use: Use, path: str
) -> None:
    use(_IN_FRONT_OF_THE_USERS)
    client = make_client(engine)
    ask(client, path, [S])
    assert prompt(engine) == "<user>Be kind.</><assistant>"
    ask(client, path, [S, U])
    assert prompt(engine) == "<user>Be kind.\n\nHi</><assistant>"


def test_a_system_turn_alone_keeps_its_place_where_it_is_shown(
    make_client: MakeClient, engine: FakeAsyncEngine, use: Use
) -> None:
    use(PLAIN)
    ask(make_client(engine), "/v1/chat/completions", [S])
    assert prompt(engine) == "[system] Be kind.\n[assistant]"


@pytest.mark.parametrize("path", WRITING)
@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_strict_template_gets_them_in_the_users_turns(
    make_client: MakeClient, engine: FakeAsyncEngine, use: Use, path: str, role: str
) -> None:
    use(STRICT)
    client = make_client(engine)
    if role == "developer" and path == "/v1/messages":
        pytest.skip("Anthropic knows no developer")
    ask(client, path, [S, U, A, T | {"role": role}, V])
    written = (
        "<|im_start|>system Be kind.<|im_end|>\n<|im_start|>user Hi<|im_end|>\n"
        "<|im_start|>assistant Hello<|im_end|>\n<|im_start|>user It is noon.\nTime?<|im_end|>\n"
        "<|im_start|>assistant"
    )
    assert prompt(engine) == written
    ask(client, path, [U, A, V, T | {"role": role}])
    assert prompt(engine).endswith("user Time?\nIt is noon.<|im_end|>\n<|im_start|>assistant")


@pytest.mark.parametrize("path", WRITING)
def test_several_in_front_are_one(
    make_client: MakeClient, engine: FakeAsyncEngine, use: Use, path: str
) -> None:
    use(STRICT)
    ask(make_client(engine), path, [S, T, U])
    joint = "\n" if path == "/v1/messages" else "\n\n"
    assert prompt(engine).startswith(
        f"<|im_start|>system Be kind.{joint}It is noon.<|im_end|>\n<|im_start|>user"
    )


def test_what_is_counted_is_what_would_be_written(
    make_client: MakeClient, engine: FakeAsyncEngine, use: Use
) -> None:
    use(STRICT)
    client, messages = make_client(engine), [S, U, A, T, V]
    ask(client, "/v1/chat/completions", messages)
    number = len(engine.streams[-1].prompt)
    assert ask(client, "/v1/tokenize", messages)["count"] == number
    assert ask(client, "/v1/messages/count_tokens", messages)["input_tokens"] == number
    assert ask(client, "/v1/responses/input_tokens", messages)["input_tokens"] == number


@pytest.mark.parametrize("path", WRITING)
def test_a_template_that_shows_them_gets_them_in_place(
    make_client: MakeClient, engine: FakeAsyncEngine, use: Use, path: str
) -> None:
    use(PLAIN)
    ask(make_client(engine), path, [S, U, A, T, V])
    written = (
        "[system] Be kind.\n[user] Hi\n[assistant] Hello\n[system] It is noon.\n[user] Time?\n[assistant]"
    )
    assert prompt(engine) == written


def test_a_template_that_leaves_them_out_without_a_word_gets_them_elsewhere(
    make_client: MakeClient, engine: FakeAsyncEngine, use: Use
) -> None:
    client = make_client(engine)
    use(ONE_SYSTEM)
    ask(client, "/v1/chat/completions", [S, S, T, U, A, T, V])
    assert prompt(engine).startswith("[system] Be kind.\n\nBe kind.\n\nIt is noon.\n[user] Hi\n")
    assert prompt(engine).endswith("[user] It is noon.\nTime?\n[assistant]")
    use(HERMES)  # leaves later ones out where there are tools
    tool = {"type": "function", "function": {"name": "add"}}
    engine.model.tokenizer.tool_template = HERMES
    ask(client, "/v1/chat/completions", [S, U, T], tools=[tool])
    assert prompt(engine).endswith("user Hi\nIt is noon.<|im_end|><|im_start|>assistant")
    ask(client, "/v1/chat/completions", [S, U, T])
    assert prompt(engine).endswith(
        "user Hi<|im_end|><|im_start|>system It is noon.<|im_end|><|im_start|>assistant"
    )


def test_a_template_without_a_system_gets_them_in_the_users_turns(
    make_client: MakeClient, engine: FakeAsyncEngine, use: Use
) -> None:
    use(NO_SYSTEM)
    ask(make_client(engine), "/v1/chat/completions", [S, U, A, T, V])
    assert prompt(engine) == "[user] Be kind.\nHi\n[assistant] Hello\n[user] It is noon.\nTime?\n[assistant]"
    use(NO_SYSTEM)
    client = make_client(engine)
    refused = client.post("/v1/chat/completions", json={"messages": [S, U, V]})
    assert refused.status_code == 400 and "turns alternate" in refused.json()["error"]["message"]


@pytest.mark.parametrize("turns", [["system", "system", "user", "system", "user"], ["system", "user"]])
def test_a_template_that_takes_too_much_is_tried_once(tokenizer: Tokenizer, turns: list[str]) -> None:
    tried: list[Sequence[Turn]] = []

    def write(turns: Sequence[Turn]) -> list[int]:
        tried.append(turns)
        raise TemplateLost

    with pytest.raises(TemplateLost, match="too much time or memory"):
        write_placed(write, [Turn("user", "x")], Probe(tokenizer, {"mood": turns}, write))
    assert len(tried) == 1
    with pytest.raises(TemplateLost):
        write_placed(write, [Turn(role, "x") for role in turns], Probe(tokenizer, {"mood": turns}, write))
    assert len(tried) == 2


def test_a_template_is_asked_once_what_it_shows(tokenizer: Tokenizer) -> None:
    tried: list[Sequence[Turn]] = []
    turns = [Turn("user", "Hi"), Turn("system", "Be kind."), Turn("user", "Ho")]

    def write(turns: Sequence[Turn]) -> list[int]:
        tried.append(turns)
        return [len(turns)]

    for mood, number in (("kind", 3), ("kind", 1), ("grim", 3), ("kind", 1)):
        tried.clear()
        write_placed(write, turns, Probe(tokenizer, {"mood": mood}, write))
        assert len(tried) == number
    assert tried == [turns]


CALL = {"id": "call_0001", "type": "function", "function": {"name": "add", "arguments": "{}"}}
RESULT = {"role": "tool", "content": "2", "tool_call_id": "call_0001"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def test_they_do_not_part_calls_from_their_results(
    make_client: MakeClient, engine: FakeAsyncEngine, use: Use
) -> None:
    """A template that also wants turns to alternate gets them in front."""
    client = make_client(engine)
    engine.model.tokenizer.tool_template = STRICT + "<tool_call>"
    use(STRICT)
    ask(client, "/v1/chat/completions", [S, U, CALLED, T, RESULT, A, V])
    between = (
        "<|im_start|>tool 2<|im_end|>\n<|im_start|>user It is noon.<|im_end|>\n<|im_start|>assistant Hello"
    )
    assert between in prompt(engine)
    use(
        "{% for m in messages if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
        "{% endfor %}" + STRICT
    )
    ask(client, "/v1/chat/completions", [S, U, CALLED, T, RESULT, A, V])
    assert prompt(engine).startswith(
        "<|im_start|>system Be kind.\n\nIt is noon.<|im_end|>\n<|im_start|>user Hi"
    )
