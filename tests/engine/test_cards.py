"""Cards by name."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.memory.cards import CARDS, find_card


@pytest.mark.parametrize(
    ("spelt", "name"),
    [
        ("gtx 1060", "GTX 1060 6 GB"), ("GTX1060", "GTX 1060 6 GB"),
        ("NVIDIA GeForce GTX 1060 6GB", "GTX 1060 6 GB"), ("rtx3060 12 GB", "RTX 3060"),
        ("gtx-1080-ti", "GTX 1080 Ti"), ("Tesla T4", "T4"), ("t4 16gb", "T4"),
    ],
)  # fmt: skip
def test_names_as_people_spell_them(spelt: str, name: str) -> None:
    assert find_card(spelt).name == name


def test_unknown_cards_are_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="RTX 3090"):
        find_card("Voodoo 2")


def test_numbers_are_of_the_right_size() -> None:
    """Gigabytes where bytes are meant, or TOPS where GOPS are, would plan nonsense."""
    for card in CARDS:
        assert 2**32 <= card.total_bytes <= 2**38
        assert 100 <= card.memory_gbps <= 10_000 and 5 <= card.host_to_device_gbps <= 60
        assert 10_000 <= card.int8_gops <= 10_000_000
        assert card.compute_capability >= (6, 1)
