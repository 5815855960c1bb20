"""`fill` and `stream_fill` of both clients against a real server, and errors of the answers."""

from dataclasses import replace

import pytest

from penstock_client import BadRequest, FilledSpan, ProtocolError, StreamInterrupted, Usage

from . import samples
from .fake_server import Answer, Events

SPANS = [
    {"index": 0, "position": 2, "text": "天气", "finish_reason": "stop"},
    {"index": 1, "position": 9, "text": "公园", "finish_reason": "length"},
]
WHOLE = {
    "id": "fill-1",
    "object": "fill",
    "created": 7,
    "model": "tiny",
    "text": "今天天气很好，去公园",
    "spans": SPANS,
    "usage": samples.USAGE,
}


def piece(*spans, **fields):
    found = [
        {"index": index, "position": 2 + 7 * index, "text": text, "finish_reason": reason}
        for index, text, reason in spans
    ]
    return samples.event({"id": "fill-1", "created": 7, "model": "tiny", "spans": found} | fields)


STREAM = [
    piece((0, "天", None)),
    piece((0, "气", "stop"), (1, "公", None)),
    piece((1, "园", "length")),
    piece(text=WHOLE["text"], usage=samples.USAGE),
    samples.DONE,
]


def test_fill(client, server):
    server.script.append(Answer.json(WHOLE))
    filled = client.fill("今天____很好，去____", temperature=0, max_tokens_per_blank=2)
    assert filled.text == WHOLE["text"]
    assert filled.spans == (FilledSpan(0, 2, "天气", "stop"), FilledSpan(1, 9, "公园", "length"))
    assert (filled.usage, filled.request_id) == (Usage(5, 2, 7, cached_tokens=3), "req-1")
    (received,) = server.received
    assert received.path == "/v1/fill"
    assert received.body == {
        "prompt": "今天____很好，去____",
        "temperature": 0,
        "max_tokens_per_blank": 2,
        "stream": False,
        "model": "tiny",
    }


def test_a_stream_gives_the_whole_answer(client, server):
    server.script += [Answer.json(WHOLE), Events(STREAM), Events(STREAM)]
    whole = client.fill("今天____很好，去____")
    stream = client.stream_fill("今天____很好，去____")
    outcome = client.drain(stream)
    texts = [[(span.index, span.text) for span in chunk.spans] for chunk in outcome.chunks]
    assert texts == [[(0, "天")], [(0, "气"), (1, "公")], [(1, "园")], []]
    assert (stream.text, stream.finish_reason, stream.usage) == (WHOLE["text"], "length", whole.usage)
    again = client.stream_fill("今天____很好，去____")
    client.drain(again)
    assert again._assembler.result() == replace(whole, request_id="req-3")


def test_a_stream_without_its_end(client, server):
    server.script += [Events(STREAM[:2])]
    stream = client.stream_fill("____")
    assert isinstance(client.drain(stream).error, StreamInterrupted)
    assert stream.text == "天气公"


def test_errors(client, server):
    error = {
        "error": {"message": "no blank", "type": "invalid_request_error", "param": "prompt", "code": None}
    }
    server.script += [Answer.json(error, 400), Answer.json(WHOLE | {"text": None})]
    with pytest.raises(BadRequest, match="no blank"):
        client.fill("x")
    with pytest.raises(ProtocolError, match="text"):
        client.fill("x")
    with pytest.raises(TypeError, match="Did you mean 'blank'"):
        client.fill("x", blanks="[..]")
    with pytest.raises(TypeError, match="unexpected keyword argument 'n'"):
        client.fill("x", n=2)
