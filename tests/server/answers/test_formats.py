"""OpenAI's objects, member for member."""

from __future__ import annotations

from typing import Any

import pytest

from fakes import EOS, FakeAsyncEngine, FakeTokenizer, metrics_of
from penstock.generation.logprobs import TokenLogprobs
from penstock.generation.requests.generation_request import SamplingParams
from penstock.generation.requests.request import RequestOutput
from penstock.generation.sequence import FinishReason
from penstock_server.answers.answers import Answers
from penstock_server.answers.formats import ChatFormat, CompletionFormat, Extras, stream
from penstock_server.facade.engine import ServedEngine
from penstock_server.prompts.inputs import Prompt
from penstock_server.protocol.answer_bodies import FINGERPRINT, Usage

pytestmark = pytest.mark.anyio

TOKENIZER: Any = FakeTokenizer()


def chat_format(**extras: Any) -> ChatFormat:
    return ChatFormat("id1", "tiny", TOKENIZER, Extras(**extras), Prompt([1, 2]))


def completion_format(*prompts: str, **extras: Any) -> CompletionFormat:
    asked = [Prompt(list(text.encode()), text) for text in prompts or ("Hi", "Hi")]
    return CompletionFormat("id1", "tiny", TOKENIZER, Extras(**extras), asked)


def output(text: str, finish: FinishReason | None = None, **fields: Any) -> RequestOutput:
    token_ids = tuple(text.encode())
    logprobs = tuple(TokenLogprobs(token_id, -0.5, ((122, -0.1),)) for token_id in token_ids)
    members: dict[str, Any] = {
        "logprobs": logprobs,
        "num_prompt_tokens": 1,
        "num_output_tokens": 1,
    } | fields
    return RequestOutput("r", text, token_ids, finish_reason=finish, **members)


def wire(chunks: list[Any]) -> list[dict[str, Any]]:
    """As they are sent, without what is the same in all."""
    found = [chunk.model_dump(exclude_unset=True) for chunk in chunks]
    for chunk in found:
        assert isinstance(chunk.pop("created"), int)
        assert chunk.pop("system_fingerprint") == FINGERPRINT
        assert chunk.pop("model") == "tiny"
    return found


def test_a_chat_begins_with_the_role() -> None:
    form = chat_format()
    first, second = wire(form.chunks(1, output("Hi")))
    head = {"id": "chatcmpl-id1", "object": "chat.completion.chunk"}
    delta = {"role": "assistant", "content": ""}
    choice = {"index": 1, "delta": delta, "logprobs": None, "finish_reason": None}
    assert first == head | {"choices": [choice]}
    assert second == head | {"choices": [choice | {"delta": {"content": "Hi"}}]}
    assert len(form.chunks(1, output("there"))) == 1
    assert len(form.chunks(0, output("there"))) == 2


def test_the_last_chunk_says_why_it_ended() -> None:
    form = chat_format()
    form.chunks(0, output("Hi"))
    (last,) = wire(form.chunks(0, output("!", FinishReason.STOP, stop_reason="END")))
    (choice,) = last["choices"]
    assert choice["delta"] == {"content": "!"}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")
    (empty,) = wire(form.chunks(0, output("", FinishReason.LENGTH)))
    assert empty["choices"][0]["delta"] == {}
    assert empty["choices"][0]["finish_reason"] == "length"


def test_nothing_new_is_no_chunk() -> None:
    form = chat_format()
    assert len(form.chunks(0, output(""))) == 1  # the role
    assert form.chunks(0, output("")) == []
    assert completion_format().chunks(0, output("")) == []


@pytest.mark.parametrize("form", [chat_format(usage=True), completion_format(usage=True)])
def test_usage_is_null_until_the_last_chunk(form: Any) -> None:
    *chunks, last = wire([*form.chunks(0, output("Hi")), form.usage_chunk(Usage.model_construct())])
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]) == ([], {})
    assert "usage" not in wire(completion_format().chunks(0, output("Hi")))[0]


def test_chat_logprobs() -> None:
    (chunk,) = wire(chat_format(logprobs=1).chunks(0, output("é"))[1:])
    content = chunk["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9]]
    likely = {"token": "z", "logprob": -0.1, "bytes": [122]}
    assert content[0]["top_logprobs"] == [likely]
    assert (content[0]["token"], content[0]["logprob"]) == ("�", -0.5)


def test_tokens_without_text_still_bring_their_logprobs() -> None:
    form = chat_format(logprobs=1)
    held_back = output("", logprobs=(TokenLogprobs(EOS, -0.5),))
    (chunk,) = wire(form.chunks(0, held_back)[1:])
    (choice,) = chunk["choices"]
    assert choice["delta"] == {} and choice["logprobs"]["content"][0]["bytes"] == []


def test_completion_logprobs_go_on_from_chunk_to_chunk() -> None:
    form = completion_format("> ", echo=True, logprobs=1)
    first, second = (wire(form.chunks(0, output(text)))[0]["choices"][0]["logprobs"] for text in ("ab", "c"))
    assert first == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"z": -0.1, "a": -0.5}, {"z": -0.1, "b": -0.5}],
        "text_offset": [2, 3],
    }
    assert second["text_offset"] == [4]


def test_completion_echoes_each_prompt_once() -> None:
    form = completion_format("one: ", "two: ", echo=True)
    texts = [wire(form.chunks(index, output("x")))[0]["choices"][0]["text"] for index in (1, 0, 1, 0)]
    assert texts == ["two: x", "one: x", "x", "x"]


async def finished(n: int = 1, logprobs: int | None = None) -> Answers:
    fake: Any = FakeAsyncEngine()
    metrics = metrics_of(fake)
    answers = Answers(ServedEngine(fake), metrics, [[1, 2]], [SamplingParams(logprobs=logprobs)] * n)
    await answers.finish()
    return answers


async def test_whole_chat() -> None:
    body = chat_format().whole(await finished(n=2)).model_dump()
    assert (body["id"], body["object"]) == ("chatcmpl-id1", "chat.completion")
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 14,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
    assert body["choices"][1] == {
        "index": 1,
        "message": {"role": "assistant", "content": "Hello!", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": None,
    }


async def test_whole_completion() -> None:
    form = completion_format("Say ", echo=True, logprobs=1)
    body = form.whole(await finished(logprobs=1)).model_dump()
    assert (body["id"], body["object"]) == ("cmpl-id1", "text_completion")
    (choice,) = body["choices"]
    assert choice["text"] == "Say Hello!"
    assert choice["logprobs"]["tokens"] == list("Hello!")
    assert choice["logprobs"]["top_logprobs"][0] == {"z": -0.5, "H": -0.25}


async def test_chunks_add_up_to_the_whole() -> None:
    with_usage = True
    form = chat_format(usage=with_usage)
    answers = await started()
    chunks: list[Any] = [chunk async for chunk in stream(form, answers, with_usage, None)]
    *parts, last = wire(chunks)
    text = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
    assert text == "Hello!"
    assert last["usage"]["completion_tokens"] == 7


async def started() -> Answers:
    fake: Any = FakeAsyncEngine()
    return Answers(ServedEngine(fake), metrics_of(fake), [[1, 2]], [SamplingParams()])
