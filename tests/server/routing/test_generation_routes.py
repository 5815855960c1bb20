"""--lenient where it leaves out no field: the length of an answer."""

from __future__ import annotations

from typing import Any

import pytest

from fakes import FakeAsyncEngine

from ..conftest import MakeClient

HI: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("completions", {"prompt": "Hi", "max_tokens": 2000}, "max_tokens"),
        ("chat/completions", {"messages": HI, "max_tokens": 2000, "n": 2}, "max_tokens"),
        ("chat/completions", {"messages": HI, "max_completion_tokens": 2000}, "max_completion_tokens"),
        ("responses", {"input": "Hi", "max_output_tokens": 2000}, "max_output_tokens"),
    ],
)
def test_an_answer_ends_with_the_context(
    make_client: MakeClient, path: str, body: dict[str, Any], field: str, is_streamed: bool
) -> None:
    body = body | {"stream": is_streamed}
    refused = make_client(FakeAsyncEngine()).post(f"/v1/{path}", json=body)
    assert "maximum context length is 1000" in refused.text
    engine = FakeAsyncEngine()
    client = make_client(engine, lenient=True)
    answer = client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200 and "context_length_exceeded" not in answer.text
    assert answer.headers["x-penstock-ignored"] == f"{field} (the context has room for fewer)"
    assert {stream.params.max_tokens for stream in engine.streams} == {None}
    fits = client.post(f"/v1/{path}", json=body | {field: 50})
    assert "x-penstock-ignored" not in fits.headers and engine.streams[-1].params.max_tokens == 50
    name = {"completions": "prompt", "chat/completions": "messages", "responses": "input"}[path]
    text: Any = "x" * 1000
    longer = [{"role": "user", "content": text}] if name == "messages" else text
    full = client.post(f"/v1/{path}", json=body | {name: longer})
    assert "context_length_exceeded" in full.text, "a prompt without room is refused still"
