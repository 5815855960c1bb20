"""Batches of AsyncClient against the fake server, and of Client against a real one that is killed."""

import asyncio
import signal
import threading

import pytest

from end_to_end.server_process import ServerProcess
from penstock_client import (
    BadRequest,
    Client,
    ConnectionFailed,
    ProtocolError,
    ServerError,
    StreamInterrupted,
)

from . import samples
from .conftest import AsyncFace
from .fake_server import PATIENCE_S, Answer, Events, Hangup, Received, Silence

WHOLE = samples.completion_stream()
TEXT = "Grüße 🌍!"


@pytest.fixture
def client(server):
    face = AsyncFace(server.url, model="tiny", timeout=PATIENCE_S)
    yield face
    face.close()


def echo(received: Received) -> Events:
    """A stream whose text is the prompt."""
    return Events([samples.completion_event(received.body["prompt"], "stop"), samples.DONE])


def test_results_in_order(client, server):
    server.fallback = echo
    prompts = [f"prompt {number}" for number in range(50)]
    results = client.collect(client.batch(prompts, concurrency=7, max_tokens=3))
    assert [(each.index, each.prompt, each.unwrap().text) for each in results] == [
        (number, prompt, prompt) for number, prompt in enumerate(prompts)
    ]
    assert {each.num_attempts for each in results} == {1}
    assert {received.body["max_tokens"] for received in server.received} == {3}
    assert len(server.received) == 50
    assert server.num_connections <= 7


def test_chats(client, server):
    server.fallback = lambda received: Events([samples.chat_stream()])
    results = client.collect(client.batch_chat(["Hi", [{"role": "user", "content": "Ho"}]]))
    assert [each.unwrap().message.content for each in results] == [TEXT, TEXT]


@pytest.mark.parametrize(("ordered", "expected"), [(True, ["slow", "fast"]), (False, ["fast", "slow"])])
def test_order(client, server, ordered, expected):
    fast_was_read = threading.Event()

    def answer(received: Received) -> Events:
        if received.body["prompt"] == "slow":
            assert fast_was_read.wait(PATIENCE_S)
        return echo(received)

    server.fallback = answer
    seen = []

    async def read() -> None:
        done = lambda progress: fast_was_read.set() if progress.num_done else None  # noqa: E731
        async with client.batch(["slow", "fast"], ordered=ordered, progress=done) as results:
            async for each in results:
                seen.append(each.prompt)

    client.run(read())
    assert seen == expected


TRANSIENT = [
    Hangup(),
    Answer.error(503, retry_after="3"),
    Answer.error(429),
    Answer.error(502),
    Events([WHOLE[:40]], ending="cut"),
    Events([samples.completion_event("Grü")], ending="cut"),
    Events([samples.completion_event("Grü")], ending="end"),
    Events([samples.completion_event("Grü") + samples.completion_event("ße")[:25]], ending="reset"),
    Events([samples.event({"error": {"message": "bye", "code": "shutting_down"}}), samples.DONE]),
    Events([samples.completion_event("Grü"), samples.event({"error": {"code": "engine_dead"}})]),
]


@pytest.mark.parametrize("failure", TRANSIENT)
def test_what_had_not_ended_is_asked_again(client, server, failure):
    server.proceed.set()
    server.script += [failure, failure]
    server.fallback = lambda received: Events([WHOLE])
    results = client.collect(client.batch(["a", "b", "c"], concurrency=1))
    assert [(each.index, each.unwrap().text) for each in results] == [(0, TEXT), (1, TEXT), (2, TEXT)]
    assert [each.num_attempts for each in results] == [3, 1, 1]
    assert len(client.sleeps) == 2
    if getattr(failure, "headers", {}).get("retry-after"):
        assert client.sleeps == [3.0, 3.0]


def test_a_server_that_is_not_there_yet(sleeping_server):
    client = AsyncFace(sleeping_server.url, model="tiny")
    sleeping_server.fallback = echo

    def start() -> None:
        client.on_sleep = lambda: None
        sleeping_server.start()

    client.on_sleep = start
    results = client.collect(client.batch(["a", "b", "c"], concurrency=2))
    client.close()
    assert [each.unwrap().text for each in results] == ["a", "b", "c"]


def test_silence_is_tried_again(server):
    """A machine under load may keep later answers from coming in time, too. Those are tried again as well."""
    client = AsyncFace(server.url, model="tiny", timeout=0.5)
    silences = [Silence(), Events([samples.completion_event("a")], ending="hold")]

    def answer(received: Received) -> Silence | Events:
        num_failed = len(client.sleeps)
        return silences[num_failed] if num_failed < 2 else echo(received)

    server.fallback = answer
    (result,) = client.collect(client.batch(["a"]))
    client.close()
    assert result.unwrap().text == "a"
    assert result.num_attempts == 1 + len(client.sleeps) >= 3


FINAL = [
    (Answer.error(400), BadRequest),
    (Answer.error(500), ServerError),
    (Answer.error(504), ServerError),
    (Answer(b"<html>"), ProtocolError),
    (Events([b"data: {]\n\n"]), ProtocolError),
    (Events([samples.DONE]), ProtocolError),
]


@pytest.mark.parametrize(("failure", "kind"), FINAL)
def test_what_is_wrong_with_one_prompt_stays_its_own(client, server, failure, kind):
    server.script.append(failure)
    server.fallback = lambda received: Events([WHOLE])
    first, second = client.collect(client.batch(["a", "b"], concurrency=1))
    assert isinstance(first.error, kind) and first.answer is None
    assert first.error.request_id is not None
    assert second.unwrap().text == TEXT
    with pytest.raises(kind):
        first.unwrap()
    assert client.sleeps == []


def test_a_prompt_that_kills_the_server_is_given_up(client, server):
    server.fallback = lambda received: (
        Events([samples.completion_event("a")], ending="cut")
        if received.body["prompt"] == "poison"
        else echo(received)
    )
    results = client.collect(client.batch(["a", "poison", "b"]))
    assert [each.error is None for each in results] == [True, False, True]
    assert isinstance(results[1].error, StreamInterrupted)
    assert results[1].num_attempts == 6


def test_patience_ends(sleeping_server):
    client = AsyncFace(sleeping_server.url, model="tiny")
    results = client.collect(client.batch(["a", "b"], patience=0))
    client.close()
    assert [type(each.error) for each in results] == [ConnectionFailed] * 2
    assert client.sleeps == []


def test_prompts_are_read_as_they_are_needed(client, server):
    server.fallback = echo
    taken = []

    def prompts():
        for number in range(1000):
            taken.append(number)
            yield f"prompt {number}"

    async def read() -> int:
        async with client.batch(prompts(), concurrency=2) as results:
            assert taken == []
            await anext(results)
            return len(taken)

    assert client.run(read()) <= 1 + 2 * 4
    assert len(taken) <= 1 + 2 * 4


def b_goes_on():
    """The answer to "a" waits until the server has been asked for "b", whose answer never ends."""
    b_arrived = threading.Event()

    def answer(received):
        if received.body["prompt"] == "a":
            assert b_arrived.wait(PATIENCE_S)
            return echo(received)
        b_arrived.set()
        return Events([samples.completion_event("b")], ending="hold")

    return answer


def test_leaving_early_closes_the_connections(client, server):
    server.fallback = b_goes_on()

    async def read() -> None:
        async with client.batch(["a", "b"]) as results:
            assert (await anext(results)).prompt == "a"

    client.run(read())
    assert server.client_gone.wait(PATIENCE_S)
    assert client.sleeps == []


def test_breaking_out_closes_the_connections(client, server):
    server.fallback = b_goes_on()

    async def read() -> bool:
        async for each in client.batch(["a", "b"]):
            assert each.prompt == "a"
            break
        return await asyncio.to_thread(server.client_gone.wait, PATIENCE_S)

    assert client.run(read())


def test_an_error_of_the_source_ends_the_batch(client, server):
    server.fallback = echo

    def prompts():
        yield "a"
        raise KeyError("a bug of the caller")

    with pytest.raises(KeyError, match="bug of the caller"):
        client.collect(client.batch(prompts()))


def test_prompt_logprobs_are_not_streamed(client, server):
    server.script.append(Answer.json(samples.completion("a")))
    (result,) = client.collect(client.batch(["a"], prompt_logprobs=1))
    assert result.unwrap().text == "a"
    assert server.received[0].body["stream"] is False


def test_no_prompts(client):
    assert client.collect(client.batch([])) == []


def test_wrong_options_are_refused_at_once(client):
    with pytest.raises(TypeError, match=r"^batch\(\) got an unexpected .* 'temprature'"):
        client.batch(["a"], temprature=1.0)
    with pytest.raises(TypeError, match=r"^batch_chat\(\) got an unexpected"):
        client.batch_chat(["a"], echo=True)
    with pytest.raises(TypeError, match="several prompts"):
        client.batch("Once")
    with pytest.raises(ValueError, match="concurrency"):
        client.batch(["a"], concurrency=0)
    with pytest.raises(ValueError, match="patience"):
        client.batch(["a"], patience=-1.0)


def test_progress(client, server):
    server.script += [Answer.error(503), Answer.error(400)]
    server.fallback = lambda received: Events([WHOLE])
    seen = []
    client.collect(client.batch(["a", "b", "c"], concurrency=1, progress=seen.append))
    assert (seen[0].num_done, seen[0].total) == (0, 3)
    last = seen[-1]
    assert (last.num_done, last.num_failed, last.num_retries, last.completion_tokens) == (3, 1, 1, 4)
    assert [each.num_done for each in seen] == sorted(each.num_done for each in seen)


@pytest.mark.slow
def test_a_server_that_is_killed_and_started_again():
    """Every result once, and the same as if nothing had happened."""
    prompts = [f"Once upon a time, in the year {number}," for number in range(12)]
    params = {"max_tokens": 8, "temperature": 0}
    seen = []
    with ServerProcess("demo") as first:
        port = int(first.url.rpartition(":")[2])
        with Client(first.url) as client:
            assert client.wait_until_ready().is_ready
            results = client.batch(prompts, concurrency=2, **params)
            seen += [next(results) for _ in range(3)]
            first.end(signal.SIGKILL)
            with ServerProcess("demo", port=port):
                seen += results
                alone = [client.complete(prompt, **params).text for prompt in prompts]
    assert [each.index for each in seen] == list(range(len(prompts)))
    assert [each.unwrap().text for each in seen] == alone
    # At most 3 + 4 * 2 prompts had begun when it was killed.
    assert max(each.num_attempts for each in seen) > 1
