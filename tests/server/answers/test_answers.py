"""All choices run at once, are told as they come, and are freed whatever happens."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from fakes import FakeAsyncEngine, FakeStream, Script, metrics_of
from penstock.errors import ContextOverflow, EngineDead, EngineStopped
from penstock.generation.requests.generation_request import SamplingParams
from penstock.generation.requests.request import RequestOutput
from penstock.generation.sequence import FinishReason
from penstock_server.answers.answers import Answers
from penstock_server.facade.engine import ServedEngine
from penstock_server.prompts.inputs import choices

pytestmark = pytest.mark.anyio

PARAMS = SamplingParams()


def answers_of(engine: FakeAsyncEngine, prompts: list[list[int]], n: int = 1) -> Answers:
    fake: Any = engine
    return Answers(ServedEngine(fake), metrics_of(fake), prompts, [PARAMS] * n)


def scripted(*scripts: Script) -> FakeAsyncEngine:
    """Each request takes the next script."""
    left = list(scripts)
    return FakeAsyncEngine(lambda prompt, params: left.pop(0))


async def test_choices_are_numbered_by_prompt_and_then_by_choice() -> None:
    engine = FakeAsyncEngine(lambda prompt, params: [f"to {prompt[0]}"])
    answers = answers_of(engine, [[7], [8]], n=2)
    await answers.finish()
    assert [answer.text for answer in answers] == ["to 7", "to 7", "to 8", "to 8"]
    assert len(answers) == 4


async def test_outputs_come_as_they_are_made() -> None:
    """The second choice goes on while the first waits."""
    gate = asyncio.Event()
    answers = answers_of(scripted(["a", gate, "b"], ["c", "d"]), [[1], [2]])
    seen = []
    async for item in answers.outputs():
        assert item is not None
        seen.append((item[0], item[1].text))
        if seen[-1] == (1, "d"):
            gate.set()
    assert sorted(seen[:2]) == [(0, "a"), (1, "c")]
    assert seen.index((0, "b")) > seen.index((1, "d"))


async def test_a_prompt_is_scored_once_for_all_its_choices() -> None:
    """A choice that comes before the one which scores waits for it: a stream tells the prompt first."""
    gate = asyncio.Event()
    engine = scripted([gate, "a"], ["b", "c"], [gate, "d"], ["e"])
    fake: Any = engine
    params = choices(SamplingParams(prompt_logprobs=0), 2)
    answers = Answers(ServedEngine(fake), metrics_of(fake), [[1, 2], [1, 3]], params)
    firsts: dict[int, Any] = {}
    asyncio.get_running_loop().call_later(0.01, gate.set)
    async for item in answers.outputs():
        assert item is not None
        firsts.setdefault(item[0], item[1].prompt_logprobs)
    assert [stream.params.prompt_logprobs for stream in engine.streams] == [0, None, 0, None]
    for told in ([answer.prompt_logprobs for answer in answers], [firsts[index] for index in range(4)]):
        assert [None if each is None else each[1].token_id for each in told] == [2, 2, 3, 3]
    assert [answer.text for answer in answers] == ["a", "bc", "d", "e"]


async def test_nobody_waits_for_a_choice_that_can_score_no_more() -> None:
    """It fails, or ends with its first token; or the client leaves."""
    params = choices(SamplingParams(prompt_logprobs=0), 2)

    def scored(*scripts: Script) -> Answers:
        fake: Any = scripted(*scripts)
        return Answers(ServedEngine(fake), metrics_of(fake), [[1, 2]], params)

    async with asyncio.timeout(10):
        with pytest.raises(EngineDead, match="gone"):
            await scored([EngineDead("gone")], ["a"]).finish()
        answers = scored([], ["a", "b"])
        await answers.finish()
        assert [(answer.text, answer.prompt_logprobs is not None) for answer in answers] == [
            ("", True),
            ("ab", True),
        ]
        waiting = asyncio.create_task(scored([asyncio.Event()], ["a"]).finish())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_silence_is_told() -> None:
    gate = asyncio.Event()
    answers = answers_of(scripted(["a", gate, "b"]), [[1]])
    seen: list[str | None] = []
    async for item in answers.outputs(idle_s=0.001):
        seen.append(item and item[1].text)
        if item is None:
            gate.set()
    assert seen[:2] == ["a", None] and seen[-2:] == ["b", ""]


async def test_answer_adds_up() -> None:
    answers = answers_of(FakeAsyncEngine(), [[1, 2]])
    await answers.finish()
    (answer,) = answers
    assert (answer.text, answer.num_output_tokens) == ("Hello!", 7)
    assert answer.finish_reason is FinishReason.STOP
    usage = answers.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 7, 9)


@pytest.mark.parametrize(("keeps_end", "num_entries"), [(False, 6), (True, 7)])
async def test_the_end_token_has_logprobs_only_if_it_is_part_of_the_answer(
    keeps_end: bool, num_entries: int
) -> None:
    fake: Any = FakeAsyncEngine()
    params = SamplingParams(logprobs=0, include_stop_str_in_output=keeps_end)
    answers = Answers(ServedEngine(fake), metrics_of(fake), [[1]], [params])
    await answers.finish()
    (answer,) = answers
    assert len(answer.logprobs) == num_entries


async def test_usage_counts_a_prompt_once() -> None:
    answers = answers_of(FakeAsyncEngine(), [[1, 2], [3]], n=3)
    await answers.finish()
    assert (answers.usage.prompt_tokens, answers.usage.completion_tokens) == (3, 42)


async def test_closing_aborts_every_sequence() -> None:
    engine = FakeAsyncEngine(lambda prompt, params: ["a", asyncio.Event()])
    answers = answers_of(engine, [[1], [2]], n=2)
    async with aclosing(answers.outputs()) as outputs:
        await anext(outputs)
    answers.close()
    assert [stream.is_aborted for stream in engine.streams] == [True] * 4


async def test_all_start_or_none() -> None:
    engine = FakeAsyncEngine()
    with pytest.raises(ContextOverflow):
        answers_of(engine, [[1], [2], [3] * 2000])
    assert [stream.is_aborted for stream in engine.streams] == [True, True]


async def test_one_that_fails_ends_all(caplog: pytest.LogCaptureFixture) -> None:
    answers = answers_of(scripted(["a", EngineDead("x")], ["b", EngineDead("x")]), [[1], [2]])
    with pytest.raises(EngineDead):
        await answers.finish()
    assert "never retrieved" not in caplog.text


async def test_an_engine_that_stops_is_no_answer() -> None:
    class Stopped(FakeStream):
        async def __anext__(self) -> RequestOutput:
            return RequestOutput("r", "", (), (), 1, 0, FinishReason.ABORT)

    class Ended(FakeStream):
        async def __anext__(self) -> RequestOutput:
            raise StopAsyncIteration

    for kind, error in ((Stopped, EngineStopped), (Ended, EngineDead)):
        engine = FakeAsyncEngine()
        answers = answers_of(engine, [[1]])
        engine.streams[0].__class__ = kind
        with pytest.raises(error):
            await answers.finish()
