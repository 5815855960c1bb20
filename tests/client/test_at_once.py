"""Coroutines that are run to their end at once, and one that can't be."""

import asyncio

import pytest

from penstock_client import Client
from penstock_client.at_once import at_once, blocking_sleep

from . import samples
from .fake_server import Answer, Events


def test_results_and_errors_come_through():
    slept = []

    async def add(left, right):
        await blocking_sleep(slept.append)(left)
        return left + right

    async def fail():
        raise KeyError("mine")

    assert at_once(add(2, 3)) == 5 and slept == [2]
    with pytest.raises(KeyError, match="mine"):
        at_once(fail())


def test_what_would_wait_for_an_event_loop_is_a_bug_of_ours():
    with pytest.raises(AssertionError, match="event loop"):
        at_once(asyncio.sleep(0))


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
