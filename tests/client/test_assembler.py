import pytest

from penstock_client.assembler import CHAT, COMPLETION, StreamAssembler
from penstock_client.errors import ProtocolError, StreamError, StreamInterrupted
from penstock_client.results import Usage

from . import samples

KINDS = [
    pytest.param(COMPLETION, samples.completion_stream(), id="completion"),
    pytest.param(CHAT, samples.chat_stream(), id="chat"),
]


def completions() -> StreamAssembler:
    assembler = StreamAssembler(COMPLETION)
    assembler.request_id = "req-1"
    return assembler


@pytest.mark.parametrize(("kind", "stream"), KINDS)
def test_the_answer_is_the_same_however_the_bytes_are_split(kind, stream):
    splits = [[stream[:cut], stream[cut:]] for cut in range(len(stream) + 1)]
    splits.append([bytes([byte]) for byte in stream])
    for blocks in splits:
        assembler = StreamAssembler(kind)
        chunks = [chunk for block in blocks for chunk in assembler.feed(block)]
        assembler.finish()
        assert "".join(chunk.text for chunk in chunks) == "Grüße 🌍!"
        assert assembler.text == "Grüße 🌍!"
        assert assembler.finish_reason == "stop"
        assert assembler.usage == Usage(5, 2, 7, cached_tokens=3)
        assert chunks[-1].usage == assembler.usage
        answer = assembler.result()
        assert (answer.text, answer.finish_reason, answer.usage) == ("Grüße 🌍!", "stop", assembler.usage)


def test_state_while_it_runs():
    assembler = completions()
    assert len(list(assembler.feed(samples.completion_event("a")))) == 1
    assert (assembler.text, assembler.finish_reason, assembler.usage) == ("a", None, None)
    assert not assembler.is_done


def test_usage_and_finish_reason_outlast_chunks_without_them():
    assembler = completions()
    blocks = [
        samples.completion_event("a", "stop"),
        samples.usage_event(),
        samples.completion_event(""),
    ]
    assert len([chunk for block in blocks for chunk in assembler.feed(block)]) == 3
    assert assembler.finish_reason == "stop"
    assert assembler.usage == Usage(5, 2, 7, cached_tokens=3)


def test_only_choice_0_is_added_up():
    assembler = completions()
    blocks = [
        samples.completion_event("a", index=0),
        samples.completion_event("x", "length", index=1),
        samples.completion_event("b", "stop", index=0),
    ]
    chunks = [chunk for block in blocks for chunk in assembler.feed(block)]
    assert [chunk.choices[0].text for chunk in chunks] == ["a", "x", "b"]
    assert (assembler.text, assembler.finish_reason) == ("ab", "stop")


def test_every_shorter_stream_is_interrupted():
    stream = samples.completion_stream()
    for length in range(len(stream)):
        assembler = completions()
        list(assembler.feed(stream[:length]))
        with pytest.raises(StreamInterrupted) as caught:
            assembler.finish()
        assert caught.value.request_id == "req-1"


def test_nothing_counts_after_done():
    assembler = completions()
    after = samples.completion_event("b") + b"data: garbage\n\n"
    assert len(list(assembler.feed(samples.completion_event("a") + samples.DONE + after))) == 1
    assert list(assembler.feed(after)) == []
    assert assembler.text == "a"


@pytest.mark.parametrize(
    "failure",
    [
        samples.event({"error": {"message": "broke", "type": "server_error", "code": 500}}),
        b'event: error\ndata: {"message": "broke", "type": "server_error", "code": "500"}\n\n',
    ],
)
def test_error_event_comes_after_the_chunks_before_it(failure):
    assembler = completions()
    chunks = assembler.feed(samples.completion_event("a") + failure + samples.DONE)
    assert next(chunks).text == "a"
    with pytest.raises(StreamError) as caught:
        next(chunks)
    assert type(caught.value) is StreamError
    assert (caught.value.message, caught.value.type) == ("broke", "server_error")
    assert (caught.value.code, caught.value.request_id) == ("500", "req-1")
    assert assembler.text == "a"


def test_an_error_that_is_null_is_none():
    assembler = completions()
    data = {"error": None, "choices": [{"text": "a"}]}
    assert [chunk.text for chunk in assembler.feed(samples.event(data))] == ["a"]


@pytest.mark.parametrize("data", [b"garbage", b"[1]", b'{"choices": 1}', b'{"choices": [{}]}'])
def test_garbage_is_a_protocol_error_that_names_the_request(data):
    with pytest.raises(ProtocolError) as caught:
        list(completions().feed(b"data: " + data + b"\n\n"))
    assert caught.value.request_id == "req-1"


def test_an_answer_that_is_not_whole_is_no_result():
    assembler = completions()
    assert not assembler.has_begun
    list(assembler.feed(samples.completion_event("a")))
    assert assembler.has_begun
    with pytest.raises(StreamInterrupted) as caught:
        assembler.result()
    assert caught.value.is_retryable


def test_another_stream_begins_anew():
    assembler = completions()
    list(assembler.feed(samples.completion_event("a")[:20]))
    assembler.begin("req-2")
    list(assembler.feed(samples.completion_stream()))
    assert (assembler.text, assembler.result().request_id) == ("Grüße 🌍!", "req-2")
