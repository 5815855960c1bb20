"""Processors by name."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.memory.planning.processors import PROCESSORS, find_processor


@pytest.mark.parametrize(
    ("spelt", "name", "ram_gib"),
    [
        ("m2 pro", "Apple M2 Pro", 32), ("Apple M2", "Apple M2", 16), ("graviton3", "Graviton3", 128),
        ("apple-m4-pro 24GB", "Apple M4 Pro", 24), ("raspberry pi 5 16 GB", "Raspberry Pi 5", 16),
    ],
)  # fmt: skip
def test_names_as_people_spell_them(spelt: str, name: str, ram_gib: int) -> None:
    found = find_processor(spelt)
    assert (found.name, found.ram_gib) == (name, ram_gib)


@pytest.mark.parametrize("name", ["", "Apple", "M1 Max", "8 GB", "Raspberry Pi 4"])
def test_others_are_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match="Raspberry Pi 5"):
        find_processor(name)


def test_numbers_are_of_the_right_size() -> None:
    """A vector unit multiplies at most 32 pairs a clock, and no core has more than 8 units."""
    assert [find_processor(each.name) for each in PROCESSORS] == list(PROCESSORS)
    for each in PROCESSORS:
        assert 10 <= each.memory_gbps <= 1000 and 4 <= each.ram_gib <= 512
        assert 100 <= each.int8_gops / each.num_cores <= 1000
