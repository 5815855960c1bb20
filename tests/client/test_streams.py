"""Streams of both clients, against a real server."""

import asyncio
import gc

import pytest

from penstock_client import (
    BadRequest,
    Client,
    ProtocolError,
    StreamError,
    StreamInterrupted,
    Timeout,
    Usage,
)

from . import samples
from .fake_server import PATIENCE_S, Answer, Events, Hangup


@pytest.mark.parametrize(
    ("method", "stream", "path"),
    [
        ("stream_complete", samples.completion_stream(), "/v1/completions"),
        ("stream_chat", samples.chat_stream(), "/v1/chat/completions"),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_whole_stream(client, server, method, stream, path, size):
    blocks = [stream[start : start + size] for start in range(0, len(stream), size)]
    server.script.append(Events(blocks))
    answer = getattr(client, method)("Once", temperature=0.0)
    outcome = client.drain(answer)
    assert outcome.error is None
    assert "".join(chunk.text for chunk in outcome.chunks) == "Grüße 🌍!"
    assert (answer.text, answer.finish_reason) == ("Grüße 🌍!", "stop")
    assert answer.usage == Usage(5, 2, 7, cached_tokens=3)
    assert answer.request_id == "req-1"
    assert server.received[0].path == path
    assert server.received[0].body["stream"] is True
    assert server.received[0].body["stream_options"] == {"include_usage": True}


def test_a_finished_stream_stays_finished(client, server):
    server.script.append(Events([samples.completion_stream()]))
    stream = client.stream_complete("Once")
    assert len(client.drain(stream).chunks) == 3
    assert client.drain(stream).chunks == []
    assert stream.text == "Grüße 🌍!"


def test_nothing_is_sent_until_it_is_read(client, server):
    stream = client.stream_complete("Once")
    assert server.received == []
    assert (stream.text, stream.usage, stream.finish_reason) == ("", None, None)
    client.close_stream(stream)
    assert client.drain(stream).chunks == []
    assert server.received == []


def test_entering_sends_and_raises(client, server):
    server.script.append(Answer.error(400, "too long"))
    with pytest.raises(BadRequest, match="too long"):
        client.peek(client.stream_complete("Once"), 0)


def test_leaving_early_closes_the_connection(client, server):
    server.script.append(Events([samples.completion_event("a")], ending="hold"))
    stream = client.stream_complete("Once")
    (chunk,) = client.peek(stream, 1)
    assert chunk.text == "a"
    assert server.client_gone.wait(PATIENCE_S)
    assert stream.text == "a"
    assert client.drain(stream).chunks == []


def test_leaving_unread_closes_the_connection(client, server):
    server.script.append(Events([], ending="hold"))
    client.peek(client.stream_complete("Once"), 0)
    assert server.client_gone.wait(PATIENCE_S)


def test_a_dropped_stream_closes_its_connection(server):
    server.script.append(Events([samples.completion_event("a")], ending="hold"))
    gc.disable()
    try:
        with Client(server.url, model="tiny") as client:
            for chunk in client.stream_complete("Once"):
                assert chunk.text == "a"
                break
            assert server.client_gone.wait(PATIENCE_S)
    finally:
        gc.enable()


def test_a_whole_stream_leaves_its_connection_for_the_next(client, server):
    server.script += [Events([samples.completion_stream()])] * 3
    for _ in range(3):
        assert client.drain(client.stream_complete("Once")).error is None
    assert server.num_connections == 1


def test_error_event(client, server):
    failure = samples.event({"error": {"message": "broke", "type": "server_error"}})
    server.script.append(Events([samples.completion_event("a") + failure + samples.DONE]))
    stream = client.stream_complete("Once")
    outcome = client.drain(stream)
    assert [chunk.text for chunk in outcome.chunks] == ["a"]
    assert type(outcome.error) is StreamError
    assert (outcome.error.message, outcome.error.type) == ("broke", "server_error")
    assert outcome.error.request_id == "req-1"
    assert stream.text == "a"
    assert client.drain(stream).chunks == []


@pytest.mark.parametrize("ending", ["end", "cut"])
def test_a_stream_without_done_is_interrupted(client, server, ending):
    server.script.append(Events([samples.completion_event("a", "stop")], ending=ending))
    outcome = client.drain(client.stream_complete("Once"))
    assert [chunk.text for chunk in outcome.chunks] == ["a"]
    assert type(outcome.error) is StreamInterrupted
    assert outcome.error.request_id == "req-1"
    # A chunk was handed out, so that sending the request again would repeat text.
    assert len(server.received) == 1
    assert client.sleeps == []


def test_a_reset_connection_is_an_interruption(client, server):
    server.script.append(Events([samples.completion_event("a")], ending="reset"))
    outcome = client.drain(client.stream_complete("Once"), on_chunk=server.proceed.set)
    assert [chunk.text for chunk in outcome.chunks] == ["a"]
    assert type(outcome.error) is StreamInterrupted
    assert client.sleeps == []


@pytest.mark.parametrize("ending", ["cut", "reset"])
def test_after_done_the_connection_may_break(client, server, ending):
    server.proceed.set()
    server.script.append(Events([samples.completion_stream()], ending=ending))
    stream = client.stream_complete("Once")
    outcome = client.drain(stream)
    assert outcome.error is None
    assert stream.usage is not None


def test_garbage_in_a_stream(client, server):
    server.script.append(Events([samples.completion_event("a") + b"data: {]\n\n"], ending="hold"))
    outcome = client.drain(client.stream_complete("Once"))
    assert [chunk.text for chunk in outcome.chunks] == ["a"]
    assert type(outcome.error) is ProtocolError
    assert server.client_gone.wait(PATIENCE_S)


def test_an_answer_that_is_no_stream(client, server):
    server.script.append(Answer.json(samples.completion()))
    outcome = client.drain(client.stream_complete("Once"))
    assert type(outcome.error) is ProtocolError
    assert "application/json" in str(outcome.error)
    assert outcome.error.request_id == "req-1"


def test_a_stream_that_was_turned_away_is_asked_for_again(client, server):
    server.script += [Answer.error(503, retry_after="3"), Events([samples.completion_stream()])]
    stream = client.stream_complete("Once")
    assert client.drain(stream).error is None
    assert stream.text == "Grüße 🌍!"
    assert client.sleeps == [3.0]


def test_a_refused_connection_is_tried_again(make_client, sleeping_server):
    client = make_client(sleeping_server.url)
    client.on_sleep = sleeping_server.start
    sleeping_server.script.append(Events([samples.chat_stream()]))
    assert client.drain(client.stream_chat("Hi")).error is None
    assert len(client.sleeps) == 1


def test_a_request_whose_connection_broke_is_sent_again(client, server):
    server.script += [Hangup(), Events([samples.completion_stream()])]
    stream = client.stream_complete("Once")
    assert client.drain(stream).error is None
    assert stream.text == "Grüße 🌍!"
    assert len(client.sleeps) == 1


BEFORE_ANY_CHUNK = [
    Events([b": keep-alive\n\n"], ending="cut"),
    Events([b": keep-alive\n\n"], ending="end"),
    Events([samples.completion_event("a")[:30]], ending="cut"),
    Events([samples.event({"error": {"message": "bye", "code": "shutting_down"}}), samples.DONE]),
]


@pytest.mark.parametrize("failure", BEFORE_ANY_CHUNK)
def test_a_stream_that_broke_before_its_first_chunk_is_asked_for_again(client, server, failure):
    server.script += [failure, Events([samples.completion_stream()])]
    stream = client.stream_complete("Once")
    outcome = client.drain(stream)
    assert outcome.error is None
    assert "".join(chunk.text for chunk in outcome.chunks) == stream.text == "Grüße 🌍!"
    assert stream.request_id == "req-2"
    assert len(client.sleeps) == 1


def test_retries_of_a_stream_end(client, server):
    server.script += [BEFORE_ANY_CHUNK[0], Answer.error(503), BEFORE_ANY_CHUNK[0]]
    outcome = client.drain(client.stream_complete("Once"))
    assert type(outcome.error) is StreamInterrupted
    assert len(server.received) == 3
    assert len(client.sleeps) == 2


#: Limits of silence in seconds. A machine under load may break a short limit, and a test then takes the next
#: one; a mistake in the client breaks them all.
SILENCES_S = (0.5, 3.0, 15.0)


def test_a_keep_alive_is_no_silence(make_client, server):
    for limit_s in SILENCES_S:
        # Longer than the limit in all, but never silent for as long as that.
        events = Events([b": keep-alive\n\n"] * 15 + [samples.completion_stream()], pause_s=limit_s / 10)
        server.fallback = lambda received, events=events: events
        client = make_client(server.url, timeout=limit_s)
        outcome = client.drain(client.stream_complete("Once"))
        if outcome.error is None:
            return
    raise AssertionError("each limit holds for the whole stream") from outcome.error


def test_a_stall_is_a_timeout(make_client, server):
    server.fallback = lambda received: Events([samples.completion_event("a")], ending="hold")
    for limit_s in SILENCES_S:
        client = make_client(server.url, timeout=limit_s)
        outcome = client.drain(client.stream_complete("Once"))
        assert type(outcome.error) is Timeout
        assert server.client_gone.wait(PATIENCE_S)
        if outcome.chunks:
            break
    assert [chunk.text for chunk in outcome.chunks] == ["a"]


def test_result_is_the_whole_answer(client, server):
    server.script.append(Events([samples.chat_stream()]))
    answer = client.result(client.stream_chat("Once"))
    assert (answer.text, answer.finish_reason, answer.request_id) == ("Grüße 🌍!", "stop", "req-1")
    assert answer.message.role == "assistant"


def test_a_stream_that_was_left_has_no_result(client, server):
    server.script.append(Events([samples.completion_event("a")], ending="hold"))
    stream = client.stream_complete("Once")
    client.peek(stream, 1)
    with pytest.raises(StreamInterrupted):
        client.result(stream)


def test_every_choice_is_in_the_chunks(client, server):
    blocks = [
        samples.completion_event("a", index=0),
        samples.completion_event("x", index=1),
        samples.DONE,
    ]
    server.script.append(Events(blocks))
    chunks = client.drain(client.stream_complete("Once", n=2)).chunks
    texts = [(choice.index, choice.text) for chunk in chunks for choice in chunk.choices]
    assert texts == [(0, "a"), (1, "x")]


def test_a_blocking_client_works_where_an_event_loop_runs_and_its_stream_outlives_that(server):
    server.script += [Answer.json(samples.completion()), Events([samples.completion_stream()])]

    async def main():
        client = Client(server.url, model="tiny")
        answer = client.complete("Once")
        stream = client.stream_complete("Once")
        first = next(stream)
        return client, answer, stream, first

    client, answer, stream, first = asyncio.run(main())
    with client:
        assert answer.text and first.text + "".join(chunk.text for chunk in stream) == "Grüße 🌍!"
