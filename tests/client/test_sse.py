"""The rules are those of the WHATWG HTML standard, section "Server-sent events"."""

import doctest

import pytest

from penstock_client import sse
from penstock_client.sse import Event, SSEParser


def parse(*blocks: bytes) -> list[Event]:
    parser = SSEParser()
    return [event for block in blocks for event in parser.feed(block)]


def data_of(*blocks: bytes) -> list[str]:
    return [event.data for event in parse(*blocks)]


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        pytest.param(b"data: a\n\n", ["a"], id="plain"),
        pytest.param(b"data:a\n\n", ["a"], id="no space"),
        pytest.param(b"data:  a \n\n", [" a "], id="only one space is dropped"),
        pytest.param(b"data: a\ndata: b\n\n", ["a\nb"], id="several lines"),
        pytest.param(b"data\n\n", [""], id="a field without colon is empty"),
        pytest.param(b"data:\ndata:\n\n", ["\n"], id="empty lines of data"),
        pytest.param(b"data: a:b\n\n", ["a:b"], id="only the first colon splits"),
        pytest.param(b": note\ndata: a\n:\n\n", ["a"], id="comments"),
        pytest.param(b": keep-alive\n\n: keep-alive\n\n", [], id="comments alone"),
        pytest.param(b"event: x\n\ndata: a\n\n", ["a"], id="no data, no event"),
        pytest.param(b"Data: a\ndatax: b\n data: c\n\n", [], id="unknown fields"),
        pytest.param(b"retry: 10\ndata: a\n\n", ["a"], id="retry"),
        pytest.param(b"\n\n\ndata: a\n\n\n\n", ["a"], id="empty lines"),
        pytest.param(b"data: a\n", [], id="unfinished event"),
        pytest.param(b"data: a\n\ndata: b", ["a"], id="unfinished line"),
        pytest.param(b"data: a\r\n\r\ndata: b\r\r", ["a", "b"], id="CRLF and CR"),
        pytest.param(b"data: a\r\ndata: b\n\r\n", ["a\nb"], id="mixed line ends"),
        pytest.param("data: \u2028\x0b\x85\n\n".encode(), ["\u2028\x0b\x85"], id="no line ends"),
        pytest.param(b"\xef\xbb\xbfdata: a\n\n", ["a"], id="byte order mark"),
        pytest.param("data: \ufeff\n\n".encode(), ["\ufeff"], id="only the leading mark"),
        pytest.param("data: Grüße 🌍\n\n".encode(), ["Grüße 🌍"], id="UTF-8"),
        pytest.param(b"data: \xff\n\n", ["\ufffd"], id="invalid UTF-8"),
    ],
)
def test_rules_hold_however_the_bytes_are_split(stream, expected):
    assert data_of(stream) == expected
    assert data_of(*(bytes([byte]) for byte in stream)) == expected
    for cut in range(len(stream) + 1):
        assert data_of(stream[:cut], stream[cut:]) == expected
        assert data_of(stream[:cut], b"", stream[cut:]) == expected


def test_a_cr_ends_its_line_at_once():
    parser = SSEParser()
    assert parser.feed(b"data: a\r\r") == [Event("a")]
    assert parser.feed(b"\n") == []
    assert parser.feed(b"\ndata: b\n\n") == [Event("b")]


def test_the_event_field_holds_for_one_event():
    stream = b"event: error\ndata: a\n\ndata: b\n\nevent: x\n\ndata: c\n\n"
    assert [event.event for event in parse(stream)] == ["error", "message", "message"]


def test_the_id_holds_until_it_changes():
    stream = b"id: 1\ndata: a\n\ndata: b\n\nid: bad\0\ndata: c\n\nid\ndata: d\n\n"
    assert [event.id for event in parse(stream)] == ["1", "1", "1", ""]


def test_examples_in_the_docstrings():
    result = doctest.testmod(sse)
    assert result.attempted and not result.failed
