"""Several answers of one search: each is told once, whoever asks first, and errors reach all."""

from __future__ import annotations

import asyncio

import pytest

from fakes import FakeStream
from penstock.errors import StepFailed
from penstock.generation.beam_search import BeamParams
from penstock.generation.requests.generation_request import SamplingParams
from penstock_server.answers.ranked_stream import RankedStream, Search

pytestmark = pytest.mark.anyio

PARAMS = SamplingParams(beams=BeamParams(3, 3))


def streams_of(*script: object) -> tuple[FakeStream, list[RankedStream]]:
    stream = FakeStream("r", [1], PARAMS, list(script))
    search = Search(stream)
    return stream, [RankedStream(search, rank) for rank in range(3)]


async def test_each_answer_has_its_place() -> None:
    stream, ranked = streams_of("a", "b")
    told = await asyncio.gather(*(each.__anext__() for each in reversed(ranked)))
    best = await ranked[0].__anext__()
    assert told == [best.others[1], best.others[0], best] and best.text == "ab"


async def test_an_error_reaches_all() -> None:
    _, ranked = streams_of("a", StepFailed(["r"], "no disk"))
    told = await asyncio.gather(*(each.__anext__() for each in ranked), return_exceptions=True)
    assert [type(each) for each in told] == [StepFailed] * 3


async def test_leaving_frees_the_search_and_ends_the_wait() -> None:
    stream, ranked = streams_of(asyncio.Event())
    waiting = [asyncio.ensure_future(each.__anext__()) for each in ranked]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    assert not any(each.done() for each in waiting[1:]), "one that leaves must not disturb the others"
    ranked[1].abort()
    assert stream.is_aborted
    told = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in told] == [asyncio.CancelledError] * 3
