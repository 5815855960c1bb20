"""Client.batch: that it is AsyncClient's, from a thread. What a batch does is in test_batch.py."""

import gc
import threading

import pytest

from penstock_client import Client

from . import samples
from .fake_server import PATIENCE_S, Events, Received


def echo(received: Received) -> Events:
    return Events([samples.completion_event(received.body["prompt"], "stop"), samples.DONE])


b_arrived = threading.Event()


def held(received: Received) -> Events:
    """Only "a" is answered to its end, once "b" has a connection that can be closed."""
    if received.body["prompt"] == "a":
        b_arrived.wait(PATIENCE_S)
        return echo(received)
    b_arrived.set()
    return Events([samples.completion_event("b")], ending="hold")


def batch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "penstock-batch"]


@pytest.fixture
def client(server):
    server.fallback = echo
    b_arrived.clear()
    with Client(server.url, "secret", model="tiny") as client:
        yield client
    assert batch_threads() == []


def test_results(client, server):
    results = client.batch(["a", "b", "c"], concurrency=2)
    assert batch_threads() == []
    assert [(each.index, each.unwrap().text) for each in results] == [(0, "a"), (1, "b"), (2, "c")]
    assert server.received[0].headers["authorization"] == "Bearer secret"
    assert list(results) == []


def test_chats(client, server):
    server.fallback = lambda received: Events([samples.chat_stream()])
    assert [each.unwrap().text for each in client.batch_chat(["Hi"])] == ["Grüße 🌍!"]


def test_leaving_the_with_closes_the_connections(client, server):
    server.fallback = held
    with client.batch(["a", "b"]) as results:
        assert next(results).prompt == "a"
    assert server.client_gone.wait(PATIENCE_S)
    assert list(results) == []


def test_breaking_out_closes_the_connections(client, server):
    server.fallback = held
    gc.disable()
    try:
        for result in client.batch(["a", "b"]):
            assert result.prompt == "a"
            break
        assert server.client_gone.wait(PATIENCE_S)
    finally:
        gc.enable()


def test_an_exception_in_the_readers_thread_ends_the_call(client, server, monkeypatch):
    """Such as KeyboardInterrupt, while a result is waited for."""
    server.fallback = held
    results = client.batch(["b"])
    import concurrent.futures

    original, calls = concurrent.futures.Future.result, []

    def interrupted(future, timeout=None):
        calls.append(future)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return original(future, timeout)

    monkeypatch.setattr(concurrent.futures.Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(results)
    monkeypatch.undo()
    assert batch_threads() == []


def test_errors_of_the_source_reach_the_reader(client):
    def prompts():
        yield "a"
        raise KeyError("a bug of the caller")

    with pytest.raises(KeyError):
        list(client.batch(prompts()))


def test_wrong_options_are_refused_at_once(client):
    with pytest.raises(TypeError, match=r"^batch\(\) got an unexpected"):
        client.batch(["a"], temprature=1.0)
    with pytest.raises(ValueError, match="concurrency"):
        client.batch_chat(["a"], concurrency=0)


def test_it_works_inside_an_event_loop(client):
    import asyncio

    async def main() -> list[str]:
        return [each.unwrap().text for each in client.batch(["a"])]

    assert asyncio.run(main()) == ["a"]
