"""The response object and the order of its events."""

from __future__ import annotations

from typing import Any

import pytest

from fakes import FakeAsyncEngine, FakeTokenizer, Script, metrics_of
from penstock.errors import EngineDead
from penstock.generation.requests.generation_request import SamplingParams
from penstock_server.answers.answers import Answers
from penstock_server.answers.responses_format import ResponsesFormat, response_events
from penstock_server.facade.engine import ServedEngine
from penstock_server.protocol.conversation import ToolOffer
from penstock_server.protocol.responses_request import LOGPROBS, ResponsesRequest
from penstock_server.protocol.tools import Function
from penstock_server.tools.use import ToolUse

pytestmark = pytest.mark.anyio

TOKENIZER: Any = FakeTokenizer()


def form_of(tools: ToolUse | None = None, **fields: Any) -> ResponsesFormat:
    body = ResponsesRequest.model_validate({"input": "Hi"} | fields)
    params = SamplingParams(temperature=0.5, top_p=0.9)
    return ResponsesFormat("id1", "tiny", TOKENIZER, body, params, tools)


def answers_of(script: Script = ("Hel", "lo!"), **params: Any) -> Answers:
    fake: Any = FakeAsyncEngine(lambda *_: script)
    return Answers(ServedEngine(fake), metrics_of(fake), [[1, 2]], [SamplingParams(**params)])


async def test_whole() -> None:
    answers = answers_of()
    await answers.finish()
    body = form_of(metadata={"a": "b"}, instructions="Be kind").whole(answers).model_dump()
    assert (body["id"], body["object"], body["status"]) == ("resp_id1", "response", "completed")
    part = {"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}
    message = {"id": "msg_id1", "type": "message", "role": "assistant", "status": "completed"}
    assert body["output"] == [message | {"content": [part]}]
    assert body["usage"] == {
        "input_tokens": 2,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 9,
    }
    said = (body["temperature"], body["top_p"], body["metadata"], body["instructions"], body["truncation"])
    assert said == (0.5, 0.9, {"a": "b"}, "Be kind", "disabled")
    assert (body["error"], body["incomplete_details"], body["text"]["format"]) == (
        None,
        None,
        {"type": "text"},
    )


async def test_an_answer_that_was_cut_is_incomplete() -> None:
    answers = answers_of(max_tokens=2)
    await answers.finish()
    body = form_of(max_output_tokens=2).whole(answers).model_dump()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete" and body["completed_at"] is None


async def events_of(form: ResponsesFormat, answers: Answers) -> list[dict[str, Any]]:
    events = [event async for event in response_events(form, answers, None)]
    return [event.model_dump(exclude_unset=True) for event in events if event is not None]


async def test_the_events_in_their_order() -> None:
    events = await events_of(form_of(), answers_of())
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(10))
    assert "".join(event.get("delta", "") for event in events) == "Hello!" == events[6]["text"]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["usage"] is None
    assert {event["item_id"] for event in events if "item_id" in event} == {"msg_id1"}
    assert events[8]["item"] == events[9]["response"]["output"][0]
    assert events[7]["part"] == events[8]["item"]["content"][0]


async def test_a_stream_that_was_cut_ends_as_incomplete() -> None:
    *_, last = await events_of(form_of(), answers_of(max_tokens=4))
    assert (last["type"], last["response"]["output"][0]["content"][0]["text"]) == (
        "response.incomplete",
        "Hell",
    )


async def test_an_error_ends_a_stream_as_failed() -> None:
    *_, last = await events_of(form_of(), answers_of(["Hel", EngineDead("secret")]))
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    error = last["response"]["error"]
    assert error["code"] == "server_error" and "engine has stopped" in error["message"]
    assert "secret" not in str(last)


async def test_an_output_that_is_held_back_is_a_keep_alive() -> None:
    """A list of calls says nothing before the name of its first call: a proxy would take that for silence."""
    offer = ToolOffer((Function(name="now"),), "required")
    form = form_of(ToolUse.of(offer, TOKENIZER, "hermes"))
    answers = answers_of(["[", "{", '"name": "now"', ', "parameters": {}}]'])
    events = [event async for event in response_events(form, answers, 1000.0)]
    assert events[2:5] == [None, None, None] and events[5] is not None
    item = events[-1].response["output"][0] if events[-1] and events[-1].response else {}
    assert (item["type"], item["name"]) == ("function_call", "now")


async def test_logprobs_where_asked_for() -> None:
    form = form_of(include=[LOGPROBS], top_logprobs=1)
    events = await events_of(form, answers_of(logprobs=1))
    deltas = [event for event in events if event["type"].endswith("text.delta")]
    told = [entry["token"] for event in deltas for entry in event["logprobs"]]
    part = events[-1]["response"]["output"][0]["content"][0]
    assert told == [entry["token"] for entry in part["logprobs"]] == list("Hello!")
    assert len(part["logprobs"][0]["top_logprobs"]) == 1
