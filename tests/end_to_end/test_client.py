"""penstock_client against the real server: its answers are the openai package's, and leaving frees."""

from __future__ import annotations

import asyncio

import openai
import pytest

from penstock_client import AsyncClient, BadRequest, Client, NotFound

from .server_process import ServerProcess

QUESTION = "Who are you?"


def test_chat_and_complete_equal_the_openai_package(server: ServerProcess, client: openai.OpenAI) -> None:
    with Client(server.url) as mine:
        answer = mine.chat(QUESTION, temperature=0, max_tokens=30)
        theirs = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=30,
        )
        assert answer.text == theirs.choices[0].message.content
        assert theirs.usage is not None and answer.usage is not None
        assert answer.usage.completion_tokens == theirs.usage.completion_tokens
        story = mine.complete("Once upon a time", temperature=0, max_tokens=20)
        assert (
            story.text
            == client.completions.create(
                model="demo", prompt="Once upon a time", temperature=0, max_tokens=20
            )
            .choices[0]
            .text
        )


def test_streams_add_up_and_may_be_left(server: ServerProcess) -> None:
    with Client(server.url) as mine:
        whole = mine.chat(QUESTION, temperature=0, max_tokens=30).text
        with mine.stream_chat(QUESTION, temperature=0, max_tokens=30) as stream:
            assert "".join(chunk.text for chunk in stream) == whole == stream.text
        with mine.stream_complete("Once", temperature=0, max_tokens=400) as stream:
            next(stream)
        assert mine.health().status == "ok"


def test_the_asynchronous_client_asks_many_at_once(server: ServerProcess) -> None:
    prompts = ["Once", "One day", "The fox"]

    async def ask_all() -> list[str]:
        async with AsyncClient(server.url) as mine:
            answers = await asyncio.gather(
                *(mine.complete(prompt, temperature=0, max_tokens=12) for prompt in prompts)
            )
        return [answer.text for answer in answers]

    with Client(server.url) as mine:
        alone = [mine.complete(prompt, temperature=0, max_tokens=12).text for prompt in prompts]
    assert asyncio.run(ask_all()) == alone


def test_errors_have_their_own_classes(server: ServerProcess) -> None:
    with Client(server.url) as mine:
        with pytest.raises(BadRequest, match="context"):
            mine.complete("word " * 2000, max_tokens=5)
        with pytest.raises(NotFound):
            mine.complete("hello", model="nobody")
