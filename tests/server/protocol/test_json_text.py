"""The JSON of a body: what is read, and what an error says of the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings

from penstock_server.protocol.errors import ApiError
from penstock_server.protocol.json_text import JsonTooCostly, cost_of, read_body

from .test_json_cost import VALUES


@settings(deadline=None, max_examples=50)
@given(VALUES)
def test_what_is_read_is_what_was_written(value: Any) -> None:
    data = json.dumps(value).encode()
    assert read_body(data) == json.loads(data)
    assert read_body(b"\xef\xbb\xbf" + data) == json.loads(data)


@pytest.mark.parametrize(
    ("data", "said", "param"),
    [
        (b'{"a": [1, {"b": "x\\ud800"}]}', "a.1.b: has half a surrogate pair", "a.1.b"),
        (b'{"a": {"\\udc00": 1}}', "has half a surrogate pair", "a.\udc00"),
        (b'"\\ud800\\ud800"', "The body: has half a surrogate pair", None),
        (b'{"a": "\\ud800}', "half a surrogate pair is no character", None),
        (b'{"a": "\xed\xa0\x80"}', "not text in UTF-8", None),
        (b'{"a": "\xff"}', "not text in UTF-8", None),
        (b'{"a": 1}\n {}', "trailing characters at line 2", None),
        (b"[" * 150, "EOF", None),
        (b"[" * 500, "recursion", None),
        (b"9" * 5000, "number out of range", None),
        (b"{'a': 1}", "key must be a string", None),
    ],
)
def test_what_is_no_json(data: bytes, said: str, param: str | None) -> None:
    with pytest.raises(ApiError, match=said) as refused:
        read_body(data)
    assert (refused.value.status_code, refused.value.param) == (400, param)


def test_whole_pairs_are_characters() -> None:
    assert read_body(b'{"\\ud83d\\ude00": "\\\\ud800"}') == {"😀": "\\ud800"}


def test_a_limit_on_what_the_values_take() -> None:
    lists = b'{"a": [' + b"[]," * 1000 + b"[]]}"
    assert 750_000 < cost_of(lists, 1_000_000) < 1_000_000
    with pytest.raises(JsonTooCostly, match="more than 700000 bytes") as refused:
        cost_of(lists, 700_000)
    assert refused.value.field == "a" and not refused.value.is_too_deep
    with pytest.raises(JsonTooCostly, match="deeper than 128 levels") as deep:
        cost_of(b'{"b":' + b"[" * 2000, 1 << 40)
    assert deep.value.field == "b" and deep.value.is_too_deep
