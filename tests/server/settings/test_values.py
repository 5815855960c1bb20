"""Texts and what they mean."""

from __future__ import annotations

import pytest

from penstock_server.settings.values import parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("7B", 7),
        ("2GiB", 2 * 2**30),
        ("512m", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("3 kb", 3000),
        ("1T", 2**40),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "-1", "GiB", "1PiB", "1 2", "0x10"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="no size"):
        parse_bytes(text)
