"""The real `openai` package against the server over a socket, with the fake engine behind."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
import uvicorn
from pydantic import BaseModel

from fakes import FakeAsyncEngine, Script
from penstock.errors import EngineDead
from penstock.generation.requests.generation_request import SamplingParams
from penstock_server.api.app import create_app
from penstock_server.facade.engine import ServedEngine
from penstock_server.settings.settings import Settings

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


def script_of(prompt: list[int], params: SamplingParams) -> Script:
    """A prompt with "wait" is never finished; one with "fail" fails after its first word."""
    text = bytes(prompt)
    if b"wait" in text:
        return ["Hel", asyncio.Event()]
    if b"json" in text:
        return ['{"value"', ": 7}"]
    if b"fail" in text:
        return ["Hel", EngineDead("secret")]
    return ["Hel", "lo", "!"]


class LiveServer:
    """A server in a thread of this process."""

    def __init__(self, engine: FakeAsyncEngine | None = None, **settings: Any) -> None:
        self.engine = engine or FakeAsyncEngine(script_of)
        fake: Any = self.engine
        app = create_app(ServedEngine(fake), Settings(**{"model": "tiny", "api_key": ("key",)} | settings))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.root = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.url = f"{self.root}/v1"
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))

    def __enter__(self) -> LiveServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    def wait_for_aborts(self, count: int) -> None:
        """Waits without a limit of its own until the last `count` sequences are freed."""
        ticker = threading.Event()
        while not all(stream.is_aborted for stream in self.engine.streams[-count:]):
            ticker.wait(0.01)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer() as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="key", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.models.retrieve("other")


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=2, logprobs=True, top_logprobs=1, seed=1, stop=["\n"]
    )
    assert [choice.message.content for choice in answer.choices] == ["Hello!", "Hello!"]
    assert answer.choices[0].logprobs is not None
    assert answer.usage is not None and answer.usage.completion_tokens == 14
    assert answer.id == f"chatcmpl-{answer._request_id}"


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == "Hello!" and chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage is not None and last.usage.total_tokens > 0


def test_chat_stream_helper_adds_the_chunks_up(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, n=2) as stream:
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["Hello!", "Hello!"]


def test_an_answer_goes_back_as_a_message(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES)
    conversation = [*MESSAGES, answer.choices[0].message, *MESSAGES]
    assert client.chat.completions.create(model="tiny", messages=conversation).choices


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["a", "b"], n=2, logprobs=2)
    assert [choice.text for choice in answer.choices] == ["Hello!"] * 4
    assert answer.choices[0].logprobs is not None
    echoed = client.completions.create(model="tiny", prompt="Say ", echo=True)
    assert echoed.choices[0].text == "Say Hello!"


def test_completion_stream(client: openai.OpenAI) -> None:
    chunks = client.completions.create(model="tiny", prompt="a", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello!"


def test_errors_have_the_packages_types(client: openai.OpenAI, server: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="x" * 5000)
    assert long.value.code == "context_length_exceeded" and long.value.request_id
    with pytest.raises(openai.InternalServerError) as dead:
        client.completions.create(model="tiny", prompt="fail")
    assert (dead.value.status_code, dead.value.code) == (503, "engine_dead")
    stranger = openai.OpenAI(base_url=server.url, api_key="x")
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_an_error_in_a_stream_is_raised(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="tiny", prompt="fail", stream=True)
    assert next(stream).choices[0].text == "Hel"
    with pytest.raises(openai.APIError, match="engine has stopped"):
        next(stream)


def test_closing_a_stream_frees_all_choices(client: openai.OpenAI, server: LiveServer) -> None:
    stream = client.completions.create(model="tiny", prompt="wait", n=3, stream=True)
    next(stream)
    stream.close()
    server.wait_for_aborts(3)


@pytest.mark.anyio
async def test_giving_up_on_an_answer_frees_all_choices(server: LiveServer) -> None:
    num_before = len(server.engine.streams)
    async with openai.AsyncOpenAI(base_url=server.url, api_key="key") as client:
        ask = client.completions.create(model="tiny", prompt="wait", n=3)
        task = asyncio.create_task(ask)
        while len(server.engine.streams) < num_before + 3:
            await asyncio.sleep(0.01)
        task.cancel()
    await asyncio.to_thread(server.wait_for_aborts, 3)


@pytest.mark.anyio
async def test_many_clients_that_hang_up_leave_nothing_behind(server: LiveServer) -> None:
    num_before = len(server.engine.streams)

    async def ask_and_leave(number: int) -> None:
        headers = {"Authorization": "Bearer key"}
        body = {"prompt": "wait", "stream": True}
        async with (
            httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=60) as client,
            client.stream("POST", "/completions", json=body) as answer,
        ):
            await anext(answer.aiter_bytes())

    await asyncio.gather(*map(ask_and_leave, range(30)))
    assert len(server.engine.streams) == num_before + 30
    await asyncio.to_thread(server.wait_for_aborts, 30)


def test_echo_with_logprobs_and_scoring(client: openai.OpenAI) -> None:
    (choice,) = client.completions.create(model="tiny", prompt="Say ", echo=True, logprobs=1).choices
    assert choice.text == "Say Hello!" and choice.logprobs is not None
    assert choice.logprobs.tokens == list("Say Hello!")
    assert choice.logprobs.text_offset == list(range(10))
    scored = client.completions.create(model="tiny", prompt="Say ", echo=True, logprobs=0, max_tokens=0)
    assert scored.choices[0].text == "Say " and scored.choices[0].finish_reason == "length"
    assert scored.usage is not None and scored.usage.completion_tokens == 0


def test_vllms_extensions_through_extra_body(client: openai.OpenAI) -> None:
    extra = {"return_token_ids": True, "prompt_logprobs": 0, "truncate_prompt_tokens": 3}
    answer = client.completions.create(model="tiny", prompt="abcdef", extra_body=extra)
    told = answer.choices[0].model_dump()
    assert told["prompt_token_ids"] == [*b"def"] and told["token_ids"] == [*b"Hello!", 256]
    assert len(told["prompt_logprobs"]) == 3


def test_usage_has_details(client: openai.OpenAI) -> None:
    usage = client.chat.completions.create(model="tiny", messages=MESSAGES).usage
    assert usage is not None and usage.prompt_tokens_details and usage.completion_tokens_details
    assert usage.prompt_tokens_details.cached_tokens == usage.completion_tokens_details.reasoning_tokens == 0


def test_content_parts(client: openai.OpenAI) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": [{"type": "text", "text": "Please."}]},
    ]
    assert client.chat.completions.create(model="tiny", messages=messages).choices
    picture: list[Any] = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(openai.BadRequestError, match="image_url"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": picture}])


def test_responses(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="tiny", input="Hi", instructions="Be kind", store=False, metadata={"a": "b"}
    )
    assert (response.output_text, response.status, response.metadata) == ("Hello!", "completed", {"a": "b"})
    assert response.usage is not None and response.usage.output_tokens == 7
    following: list[Any] = [
        {"role": "user", "content": "Hi"},
        *response.output,
        {"role": "user", "content": "?"},
    ]
    assert client.responses.create(model="tiny", input=following).output_text == "Hello!"
    cut = client.responses.create(model="tiny", input="Hi", max_output_tokens=2)
    assert cut.incomplete_details is not None and cut.incomplete_details.reason == "max_output_tokens"


def test_responses_with_logprobs(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="tiny", input="Hi", include=["message.output_text.logprobs"], top_logprobs=1
    )
    part: Any = response.output[0].content[0]  # type: ignore[union-attr]
    assert [entry.token for entry in part.logprobs] == list("Hello!")


def test_responses_stream(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="tiny", input="Hi", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == "Hello!" and events[-1].type == "response.completed"
    with client.responses.stream(model="tiny", input="Hi") as stream:
        final = stream.get_final_response()
    assert final.output_text == "Hello!" and final.usage is not None


def test_a_responses_stream_that_fails(client: openai.OpenAI) -> None:
    *_, last = client.responses.create(model="tiny", input="fail", stream=True)
    assert last.type == "response.failed" and last.response.error is not None


def test_closing_a_responses_stream_frees_it(client: openai.OpenAI, server: LiveServer) -> None:
    stream = client.responses.create(model="tiny", input="wait", stream=True)
    while next(stream).type != "response.output_text.delta":
        pass
    stream.close()
    server.wait_for_aborts(1)


def test_responses_are_not_kept(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="keeps none"):
        client.responses.retrieve("resp_1")
    with pytest.raises(openai.BadRequestError, match="keeps no responses"):
        client.responses.create(model="tiny", input="Hi", previous_response_id="resp_1")
    assert client.responses.input_tokens.count(model="tiny", input="Hi").input_tokens > 0


class Number(BaseModel):
    value: int


def test_responses_parse(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model="tiny", input="json", text_format=Number)
    assert parsed.output_parsed == Number(value=7)
    with client.responses.stream(model="tiny", input="json", text_format=Number) as stream:
        assert stream.get_final_response().output_parsed == Number(value=7)
