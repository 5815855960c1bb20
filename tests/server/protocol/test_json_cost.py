"""What JSON would take, told from its bytes. The oracle is the JSON once it is read."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from penstock_server.protocol import json_cost
from penstock_server.protocol.json_cost import JsonCost

ENDLESS = 1 << 60
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


def size_of(value: Any) -> int:
    """What a value takes in Python, without sharing anything."""
    inner: list[Any] = []
    if isinstance(value, dict):
        inner = [*value.keys(), *value.values()]
    elif isinstance(value, list):
        inner = value
    return sys.getsizeof(value) + sum(map(size_of, inner))


def depth_of(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(depth_of, value.values() if isinstance(value, dict) else value), default=0)


@settings(deadline=None, max_examples=50)
@given(VALUES, st.booleans(), st.integers(3, 60))
def test_the_cost_is_at_least_what_the_values_take(value: Any, is_ascii: bool, chunk: int) -> None:
    """In chunks of any size, whose borders lie in texts, escapes and characters."""
    data = json.dumps(value, ensure_ascii=is_ascii).encode("utf-8", "replace")
    value = json.loads(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_cost, "CHUNK_BYTES", chunk)
        cost = JsonCost.of(data, ENDLESS, ENDLESS)
    assert cost.depth == depth_of(value)
    # 80 bytes for the outermost value, which has no comma.
    assert size_of(value) <= cost.num_bytes + 80 + 16 * data.count(b'"')
    # An escape that goes on in the next chunk may be any character.
    assert cost.num_bytes <= JsonCost.of(data, ENDLESS, ENDLESS).num_bytes + 5 * len(data)


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        ("a" * 10_000, 10_000, 10_100),
        ("[{,:" * 2500, 10_000, 10_100),  # in a text they are characters
        ('\\"[' * 2500, 7_500, 10_100),
        ("\\\\" * 5000, 10_000, 10_100),
        ("é" * 5000, 5_000, 15_100),
        ("好" * 5000, 10_000, 25_100),
        ("a" * 10_000 + "😀", 40_000, 50_200),
        ("a" * 10_000 + "\\ud83d\\ude00", 40_000, 50_200),
        ("a" * 10_000 + "\\u597d", 20_000, 30_200),
    ],
    ids=range(9),
)
def test_texts(text: str, least: int, most: int) -> None:
    data = f'["{text}"]'.encode()
    found = JsonCost.of(data, ENDLESS, ENDLESS)
    own = json_cost.CONTAINER_BYTES
    assert least <= found.num_bytes - own <= most and found.depth == 1
    assert sys.getsizeof(from_json(data)[0]) - 80 <= found.num_bytes - own


@pytest.mark.parametrize("end", ["]", "\\", '"', ""])
def test_looking_ends_at_the_limit_and_names_the_field(end: str) -> None:
    data = ('{"prompt": "x", "stop_token_ids" : ["a:b", ' + '"",' * 400_000 + end).encode()
    found = JsonCost.of(data, 1_000_000, 9)
    assert found.field == "stop_token_ids" and 1_000_000 < found.num_bytes < 8_000_000
    deep = JsonCost.of(b'{"a": 1, "b": {"c": ' + b"[" * 1000, ENDLESS, 100)
    assert (deep.field, deep.depth) == ("b", 1002)
    assert JsonCost.of(b"[" * 1000, ENDLESS, 100).field is None
    assert JsonCost.of(b'{"' + b"n" * 1000 + b'": [' + b"[" * 1000, ENDLESS, 100).field is None


@pytest.mark.parametrize("before", range(8))
def test_an_escape_at_a_chunks_end_is_as_wide_as_elsewhere(before: int) -> None:
    """Four bytes for each character of a text that needs two would be a refusal of a body that fits."""
    text = "a" * before + "\\\\" * 3 + "\\u00e9" * 1000
    data = f'["{text}"]'.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_cost, "CHUNK_BYTES", 16)
        cost = JsonCost.of(data, ENDLESS, ENDLESS)
    assert abs(cost.num_bytes - JsonCost.of(data, ENDLESS, ENDLESS).num_bytes) <= 16
