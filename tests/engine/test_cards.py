"""Cards by name."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.memory.planning.cards import CARDS, card_notes, find_card


@pytest.mark.parametrize(
    ("spelt", "name"),
    [
        ("gtx 1060", "GTX 1060 6 GB"), ("GTX1060", "GTX 1060 6 GB"), ("1060", "GTX 1060 6 GB"),
        ("NVIDIA GeForce GTX 1060 6GB", "GTX 1060 6 GB"), ("rtx3060 12 GB", "RTX 3060 12 GB"),
        ("RTX 3060 12 GiB", "RTX 3060 12 GB"), ("gtx-1080-ti", "GTX 1080 Ti 11 GB"),
        ("3090", "RTX 3090 24 GB"), ("1070", "GTX 1070 8 GB"), ("2080ti", "RTX 2080 Ti 11 GB"),
        ("Tesla P100 16GB", "P100 16 GB"), ("V100", "V100 16 GB"), ("Tesla V100 32GB", "V100 32 GB"),
        ("A100", "A100 40 GB"), ("NVIDIA A100 80GB", "A100 80 GB"),
        ("4060 Ti", "RTX 4060 Ti 8 GB"), ("rtx 4060ti 16GB", "RTX 4060 Ti 16 GB"), ("4060", "RTX 4060 8 GB"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090 32 GB"), ("5060 ti 16 gb", "RTX 5060 Ti 16 GB"),
        ("Tesla T4", "T4 16 GB"), ("t4 16gb", "T4 16 GB"), ("NVIDIA H200", "H200 141 GB"),
    ],
)  # fmt: skip
def test_names_as_people_spell_them(spelt: str, name: str) -> None:
    assert find_card(spelt).name == name


@pytest.mark.parametrize(
    "name", ["Voodoo 2", "", "GTX 1060 3 GB", "rtx 2060 12gb", "RTX 4070 Ti", "RTX 3080 12 GB", "GTX", "60"]
)
def test_other_cards_are_refused_with_those_there_are(name: str) -> None:
    """The GTX 1060 with 3 GB is another chip, and a Ti is another card."""
    with pytest.raises(ConfigError, match="RTX 3090"):
        find_card(name)


def test_each_card_is_found_by_its_own_name() -> None:
    assert [find_card(card.name) for card in CARDS] == list(CARDS)


def test_numbers_are_of_the_right_size() -> None:
    """Gigabytes where bytes are meant, or TOPS where GOPS are, would plan nonsense."""
    for card in CARDS:
        assert 2**32 <= card.total_bytes <= 2**38
        assert 100 <= card.memory_gbps <= 10_000 and 5 <= card.host_to_device_gbps <= 60
        assert 2_000 <= card.int8_gops <= 1_000_000
        assert card.compute_capability >= (6, 0)


def test_a_note_says_how_much_of_the_peak_is_counted() -> None:
    """130 and 17.5 TOPS are the peaks of the data sheets."""
    for name, peak in (("T4", "130 TOPS"), ("GTX 1060", "17.5 TOPS"), ("A100", "624 TOPS")):
        (note,) = card_notes(find_card(name))
        assert "data sheet" in note and f"28% of the data sheet's peak of {peak}" in note


def test_a_card_without_dp4a_is_served_by_float64() -> None:
    """Each byte of weights costs 17 of memory traffic, and from some rows on the multiplications. torch's
    kernels count one row of float64 for the two rows that a token has elsewhere."""
    assert [card.name for card in CARDS if "no dp4a" in card_notes(card)[0]] == ["P100 16 GB"]
    card = find_card("Tesla P100")
    ((rows, gbps),) = card.products
    assert gbps == pytest.approx(732 / 17)
    assert 2 * rows * gbps <= card.int8_gops <= 2 * (rows + 1) * gbps
    assert "6.0 and no dp4a" in card_notes(card)[0] and "--device cpu" in card_notes(card)[0]
    assert not any(card.products for card in CARDS if card.compute_capability >= (6, 1))
