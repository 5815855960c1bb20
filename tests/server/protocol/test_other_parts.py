"""Images, sounds and files in messages, on all routes: text files are text, notes stand for the others in
results of tools and with --lenient, and otherwise they are refused by name."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from starlette.testclient import TestClient

from fakes import FakeAsyncEngine
from penstock_server.protocol.other_parts import MAX_QUOTED_CHARS, Leniency, with_text

from ..conftest import MakeClient

IMAGE_NOTE = "[image left out: this model reads text]"
DATA = base64.b64encode("Grüße\n".encode()).decode()
PDF = base64.b64encode(b"%PDF-1.7\n1 0 obj").decode()
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n\0\0").decode()
LOOK = {"name": "look", "arguments": "{}"}
CALLED = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": LOOK}]}


def text(kind: str) -> dict[str, Any]:
    return {"type": kind, "text": "See"}


def chat(*parts: Any, in_result: bool = False) -> tuple[str, dict[str, Any]]:
    content = [text("text"), *parts]
    result = [CALLED, {"role": "tool", "tool_call_id": "c", "content": content}]
    asked = {"role": "user", "content": "Hi" if in_result else content}
    return "/v1/chat/completions", {"messages": [asked, *(result if in_result else [])]}


def responses(*parts: Any, in_result: bool = False) -> tuple[str, dict[str, Any]]:
    content = [text("input_text"), *parts]
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    result = [call, {"type": "function_call_output", "call_id": "c", "output": content}]
    asked = {"role": "user", "content": "Hi" if in_result else content}
    return "/v1/responses", {"input": [asked, *(result if in_result else [])]}


def messages(*parts: Any, in_result: bool = False) -> tuple[str, dict[str, Any]]:
    content = [text("text"), *parts]
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]}
    answer = {"type": "tool_result", "tool_use_id": "c", "content": content}
    result = [call, {"role": "user", "content": [answer]}]
    asked = {"role": "user", "content": "Hi" if in_result else content}
    return "/v1/messages", {"messages": [asked, *(result if in_result else [])], "max_tokens": 9}


def ollama(*images: Any, in_result: bool = False) -> tuple[str, dict[str, Any]]:
    message = {"role": "tool" if in_result else "user", "content": "See", "images": list(images)}
    return "/api/chat", {"model": "tiny", "messages": [message], "stream": False}


def ollama_prompt(*images: Any) -> tuple[str, dict[str, Any]]:
    return "/api/generate", {"model": "tiny", "prompt": "See", "images": list(images), "stream": False}


CHAT_IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}", "detail": "auto"}}
INPUT_IMAGE = {"type": "input_image", "image_url": "https://example.org/a.png", "detail": "auto"}
BLOCK_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}


def prompt(engine: FakeAsyncEngine) -> str:
    return bytes(engine.streams[-1].prompt).decode()


def ask(client: TestClient, request: tuple[str, dict[str, Any]]) -> Any:
    path, body = request
    return client.post(path, json=body)


@pytest.mark.parametrize(
    ("make", "image"),
    [(chat, CHAT_IMAGE), (responses, INPUT_IMAGE), (messages, BLOCK_IMAGE), (ollama, PNG)],
)
def test_an_image(make_client: MakeClient, make: Any, image: Any) -> None:
    engine = FakeAsyncEngine()
    client, lenient = make_client(engine), make_client(engine, lenient=True)
    refused = ask(client, make(image))
    assert refused.status_code == 400 and "--lenient" in refused.text and "image" in refused.text
    for asked in (lenient, make(image)), (client, make(image, in_result=True)):
        answer = ask(*asked)
        assert answer.status_code == 200, answer.text
        assert f"See\n{IMAGE_NOTE}\n" in prompt(engine)
        assert answer.headers["x-penstock-ignored"] == "image part"
    several = ask(client, make(image, image, in_result=True))
    assert several.headers["x-penstock-ignored"] == "2 image parts"
    assert prompt(engine).count(IMAGE_NOTE) == 2


def test_an_image_beside_ollamas_prompt(make_client: MakeClient) -> None:
    engine = FakeAsyncEngine()
    assert ask(make_client(engine), ollama_prompt(PNG)).status_code == 400
    assert ask(make_client(engine, lenient=True), ollama_prompt(PNG)).status_code == 200
    assert f"user: See\n{IMAGE_NOTE}\n" in prompt(engine)


OTHERS = [
    (chat, {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}, "audio"),
    (chat, {"type": "video_url", "video_url": {"url": "x"}}, "video"),
    (chat, {"type": "file", "file": {"file_id": "file-1"}}, "file"),
    (chat, {"type": "file", "file": {"file_data": PDF, "filename": "a.pdf"}}, "file"),
    (chat, {"type": "hologram", "data": 1}, "hologram"),
    (responses, {"type": "input_file", "file_url": "https://example.org/a"}, "file"),
    (responses, {"type": "input_file", "file_data": f"data:application/pdf;base64,{PDF}"}, "file"),
    (messages, {"type": "document", "source": {"type": "url", "url": "https://example.org/a.pdf"}}, "file"),
    (messages, {"type": "document", "source": {"type": "base64", "media_type": "application/pdf",
                                               "data": PDF}}, "file"),
    (messages, {"type": "tool_reference", "tool_name": "x"}, "tool_reference"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "part", "name"), OTHERS)
def test_other_parts(make_client: MakeClient, make: Any, part: Any, name: str) -> None:
    engine = FakeAsyncEngine()
    client = make_client(engine)
    refused = ask(client, make(part))
    assert refused.status_code == 400 and repr(part["type"]) in refused.text
    for asked in (make_client(engine, lenient=True), make(part)), (client, make(part, in_result=True)):
        answer = ask(*asked)
        assert answer.status_code == 200, answer.text
        assert f"See\n[{name} left out: this model reads text]" in prompt(engine)
        assert answer.headers["x-penstock-ignored"] == f"{name} part"


TEXTS = [
    (chat, {"type": "file", "file": {"file_data": DATA, "filename": "a.txt"}}, "a.txt\nGrüße\n"),
    (responses, {"type": "input_file", "file_data": f"data:text/plain;base64,{DATA}", "filename": "a.txt"},
     "a.txt\nGrüße\n"),
    (responses, {"type": "input_file", "file_data": "data:text/plain,Gr%C3%BC%C3%9Fe"}, "Grüße"),
    (messages, {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Grüße"},
                "title": "T", "context": "C", "citations": {"enabled": True}}, "T\nC\nGrüße"),
    (messages, {"type": "document", "source": {"type": "content", "content": "Grüße"}}, "Grüße"),
    (messages, {"type": "document", "source": {"type": "content", "content": [text("text"), BLOCK_IMAGE]}},
     f"See\n{IMAGE_NOTE}"),
    (messages, {"type": "document", "source": {"type": "base64", "media_type": "text/plain", "data": DATA}},
     "Grüße\n"),
    (messages, {"type": "search_result", "source": "u", "title": "T", "content": [text("text")]},
     "T\nu\nSee"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "part", "shown"), TEXTS)
@pytest.mark.parametrize("in_result", [False, True])
def test_text_files_are_text(
    make_client: MakeClient, make: Any, part: Any, shown: str, in_result: bool
) -> None:
    engine = FakeAsyncEngine()
    answer = ask(make_client(engine), make(part, in_result=in_result))
    assert answer.status_code == 200, answer.text
    assert f"See\n{shown}\n" in prompt(engine) and "x-penstock-ignored" not in answer.headers


def test_an_answer_that_was_spoken(make_client: MakeClient) -> None:
    engine = FakeAsyncEngine()
    spoken = {"role": "assistant", "content": None, "audio": {"id": "audio_1"}}
    body = {"messages": [{"role": "user", "content": "Hi"}, spoken, {"role": "user", "content": "More"}]}
    assert make_client(engine).post("/v1/chat/completions", json=body).status_code == 400
    assert make_client(engine, lenient=True).post("/v1/chat/completions", json=body).status_code == 200
    assert "assistant: [audio left out: this model reads text]\n" in prompt(engine)


def test_counts_are_those_of_the_prompts(make_client: MakeClient) -> None:
    engine = FakeAsyncEngine()
    client = make_client(engine, lenient=True)
    for make, image, path in (
        (chat, CHAT_IMAGE, "/v1/tokenize"),
        (responses, INPUT_IMAGE, "/v1/responses/input_tokens"),
        (messages, BLOCK_IMAGE, "/v1/messages/count_tokens"),
    ):
        request: Any = make(image)
        ask(client, request)
        request[1].pop("max_tokens", None)
        counted = client.post(path, json=request[1]).json()
        assert counted.get("count", counted.get("input_tokens")) == len(prompt(engine))


def test_lists_that_are_too_long_and_parts_without_a_type_are_refused(make_client: MakeClient) -> None:
    client = make_client(FakeAsyncEngine(), lenient=True)
    for parts in (
        [CHAT_IMAGE] * 1025,
        [{"type": None}],
        [{"type": ["image"]}],
        [{}],
        [7],
        [{"type": "x" * 65}],
    ):
        assert ask(client, chat(*parts)).status_code == 400


@pytest.mark.parametrize(("chars", "is_text"), [(MAX_QUOTED_CHARS, True), (MAX_QUOTED_CHARS + 1, False)])
def test_a_long_data_url_without_base64_is_no_text(chars: int, is_text: bool) -> None:
    """Such a URL takes long, and seventy times its size, to be read."""
    part = {"type": "input_file", "file_data": "data:text/plain," + ("%41" * chars)[-chars:]}
    (found,) = with_text([part], ("input_text",), "input_text", Leniency())
    assert (found is not part) == is_text
    (found,) = with_text([part], ("input_text",), "input_text", Leniency(True))
    assert (found["text"] == "[file left out: this model reads text]") == (not is_text)


def test_a_file_with_control_characters_is_no_text() -> None:
    for code in range(0x80):
        data = base64.b64encode(b"a" + bytes([code]) + b"b").decode()
        part = {"type": "file", "file": {"file_data": data}}
        (found,) = with_text([part], ("text",), "text", Leniency())
        assert (found is not part) == (code >= 32 or chr(code) in "\t\n\r\f"), code
