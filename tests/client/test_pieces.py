import pytest

from penstock_client.errors import ProtocolError
from penstock_client.parsing import parse_chat_chunk, parse_completion_chunk
from penstock_client.pieces import Pieces
from penstock_client.results import Message, TokenLogprob, ToolCall

HEAD = {"id": "x-1", "model": "tiny", "created": 7}


def completion(*choices, **fields) -> Pieces:
    pieces = Pieces()
    for choice in choices:
        pieces.add(parse_completion_chunk({**HEAD, **fields, "choices": [choice]}))
    return pieces


def chat(*deltas, **fields) -> Pieces:
    pieces = Pieces()
    for delta in deltas:
        pieces.add(parse_chat_chunk({**HEAD, **fields, "choices": [{"index": 0, "delta": delta}]}))
    return pieces


def call(index: int, arguments: str, **fields) -> dict:
    name = {"name": fields.pop("name")} if "name" in fields else {}
    return {"index": index, **fields, "function": {**name, "arguments": arguments}}


def test_head():
    answer = completion({"index": 0, "text": "a"}).completion("req-1")
    assert (answer.id, answer.model, answer.created, answer.request_id) == ("x-1", "tiny", 7, "req-1")


def test_choices_are_sorted_and_kept_apart():
    pieces = completion(
        {"index": 1, "text": "x", "finish_reason": "length"},
        {"index": 0, "text": "a"},
        {"index": 1, "text": "y"},
        {"index": 0, "text": "b", "finish_reason": "stop", "stop_reason": 0},
    )
    choices = pieces.completion(None).choices
    assert [(each.index, each.text, each.finish_reason, each.stop_reason) for each in choices] == [
        (0, "ab", "stop", 0),
        (1, "xy", "length", None),
    ]


def test_logprobs_and_token_ids_are_joined():
    def piece(token: str, token_id: int) -> dict:
        logprobs = {"tokens": [token], "token_logprobs": [-1.0], "top_logprobs": [None]}
        return {"index": 0, "text": token, "logprobs": logprobs, "token_ids": [token_id]}

    first = {**piece("a", 5), "prompt_token_ids": [1, 2]}
    (choice,) = completion(first, piece("b", 6)).completion(None).choices
    assert choice.logprobs == (TokenLogprob("a", -1.0), TokenLogprob("b", -1.0))
    assert (choice.token_ids, choice.prompt_token_ids) == ((5, 6), (1, 2))


def test_what_no_chunk_had_is_none():
    (choice,) = completion({"index": 0, "text": "a"}).completion(None).choices
    assert (choice.logprobs, choice.token_ids, choice.prompt_token_ids) == (None, None, None)


def test_a_chat():
    pieces = chat({"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}, {})
    assert pieces.chat_completion(None).message == Message("assistant", "ab")
    assert chat({"role": "assistant"}, prompt_token_ids=[1]).chat_completion(None).prompt_token_ids == (1,)


def test_an_empty_answer_is_a_text():
    assert chat({"role": "assistant", "content": ""}).chat_completion(None).message.content == ""


def test_tool_calls():
    pieces = chat(
        {"role": "assistant", "content": None},
        {"tool_calls": [call(0, "", id="call_1", name="weather")]},
        {"tool_calls": [call(0, '{"city":')]},
        {"tool_calls": [call(1, "{", id="call_2", name="time"), call(0, ' "Oslo"}')]},
        {"tool_calls": [call(1, "}")]},
    )
    answer = pieces.chat_completion(None)
    assert answer.tool_calls == pieces.tool_calls
    assert answer.tool_calls == (
        ToolCall("call_1", "weather", '{"city": "Oslo"}'),
        ToolCall("call_2", "time", "{}"),
    )
    assert answer.message.content is None


def test_nothing_is_no_answer():
    for make in (Pieces().completion, Pieces().chat_completion):
        with pytest.raises(ProtocolError) as caught:
            make("req-1")
        assert caught.value.request_id == "req-1"
    assert (Pieces().text, Pieces().finish_reason, Pieces().tool_calls) == ("", None, ())


def test_reasoning_is_joined_and_may_stand_alone():
    deltas = [{"role": "assistant"}, {"reasoning_content": "Hm", "reasoning": "Hm"}, {"reasoning": ", so."}]
    thought = chat(*deltas).chat_completion(None).message
    assert (thought.reasoning, thought.content) == ("Hm, so.", None)
    answered = chat(*deltas, {"content": "Four."}).chat_completion(None).message
    assert (answered.reasoning, answered.content) == ("Hm, so.", "Four.")
    assert chat({"content": "Four."}).chat_completion(None).message.reasoning is None
