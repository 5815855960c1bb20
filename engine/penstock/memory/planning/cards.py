"""Cards: well-known GPUs as data, so that one can plan before buying.

Sources: capacities, memory rates and FP32 rates are from the vendor's data sheets. INT8 rates of GTX 10xx are
four times FP32, since dp4a does four multiplications and additions where FP32 does one; INT8 rates of tensor
cores are from the data sheets, for dense INT8. A product gets INT8_SHARE of either. Pinned copies from host
to device reach 75-85% of PCIe's nominal rate (12.1 GB/s were measured on a Tesla P100 with PCIe 3.0 x16); the
RTX 4060, 4060 Ti and 5060 Ti have eight PCIe lanes. The RTX 50xx have PCIe 5.0: on a mainboard with PCIe 4.0
their link has half the rate. The data sheets of the RTX 50xx name FP4 with sparsity, four times the rate of
dense INT8. The V100 (the SXM2 card; a PCIe card has 56 TOPS) has dp4a, and tensor cores without INT8. This
project measured none of these numbers.

The P100 has compute capability 6.0 and no dp4a. None of our kernels serves there but torch's, which copy
weights to float64 for each product. The INT8 rate of the P100 is therefore the FP64 rate of its data sheet,
doubled: a row of float64 does the work of two rows of INT8.
"""

from __future__ import annotations

import re

from penstock.errors import ConfigError
from penstock.memory.hardware import DeviceProfile, ProductRates

GIB = 1 << 30
#: The share of the peak that real products of INT8 matrices reach: llama.cpp's products on a Tesla P40 (dp4a)
#: made 13 of 47 TOPS with a prompt of 2048 tokens (https://github.com/ggml-org/llama.cpp/pull/7716).
INT8_SHARE = 0.28
#: The first compute capability with dp4a, which our CUDA kernels need.
DP4A = (6, 1)
#: Bytes that move where weights are copied to float64, for each byte of INT8: 1 is read, 8 are written, and 8
#: are read again.
FLOAT64_BYTES = 17


def _card(
    name: str, capability: tuple[int, int], gib: float, memory_gbps: float, link_gbps: float, int8_tops: float
) -> DeviceProfile:
    num_bytes, int8_gops = int(gib * GIB), int8_tops * 1000 * INT8_SHARE
    products: ProductRates = ()
    if capability < DP4A:
        copied_gbps = memory_gbps / FLOAT64_BYTES
        # With more rows than these, multiplying takes longer than copying: it makes two operations for each
        # weight and row.
        products = ((max(1, int(int8_gops / 2 / copied_gbps)), copied_gbps),)
    # How much can be pinned depends on the machine, not on the card.
    return DeviceProfile(
        name, capability, num_bytes, num_bytes, memory_gbps, link_gbps, int8_gops, 1 << 62, products
    )


#: A card's name ends in the size that the card is sold by: sizes tell cards of one model apart.
CARDS = tuple(
    _card(*row)
    for row in (
        ("GTX 1060 6 GB", (6, 1), 6, 192.2, 12.0, 17.5),
        ("GTX 1070 8 GB", (6, 1), 8, 256.3, 12.0, 25.8),
        ("GTX 1080 Ti 11 GB", (6, 1), 11, 484.4, 12.0, 45.0),
        ("RTX 2060 6 GB", (7, 5), 6, 336.0, 12.0, 103.0),
        ("RTX 2080 Ti 11 GB", (7, 5), 11, 616.0, 12.0, 215.2),
        ("RTX 3060 12 GB", (8, 6), 12, 360.0, 24.0, 102.0),
        ("RTX 3080 10 GB", (8, 6), 10, 760.0, 24.0, 238.0),
        ("RTX 4060 8 GB", (8, 9), 8, 272.0, 12.0, 121.0),
        ("RTX 4060 Ti 8 GB", (8, 9), 8, 288.0, 12.0, 177.0),
        ("RTX 4060 Ti 16 GB", (8, 9), 16, 288.0, 12.0, 177.0),
        ("RTX 4070 12 GB", (8, 9), 12, 504.0, 24.0, 233.0),
        ("RTX 4090 24 GB", (8, 9), 24, 1008.0, 24.0, 661.0),
        ("RTX 5060 Ti 8 GB", (12, 0), 8, 448.0, 24.0, 190.0),
        ("RTX 5060 Ti 16 GB", (12, 0), 16, 448.0, 24.0, 190.0),
        ("RTX 5070 12 GB", (12, 0), 12, 672.0, 48.0, 247.0),
        ("RTX 5090 32 GB", (12, 0), 32, 1792.0, 48.0, 838.0),
        ("P100 16 GB", (6, 0), 16, 732.0, 12.1, 9.4),
        ("V100 16 GB", (7, 0), 16, 900.0, 12.0, 62.8),
        ("V100 32 GB", (7, 0), 32, 900.0, 12.0, 62.8),
        ("T4 16 GB", (7, 5), 15, 320.0, 12.0, 130.0),
        ("RTX 3090 24 GB", (8, 6), 24, 936.0, 24.0, 284.0),
        ("A100 40 GB", (8, 0), 40, 1555.0, 24.0, 624.0),
        ("A100 80 GB", (8, 0), 80, 2039.0, 24.0, 624.0),
        ("H200 141 GB", (9, 0), 139, 4800.0, 52.0, 1979.0),
    )
)


def find_card(name: str) -> DeviceProfile:
    """A card by its name in any spelling ("gtx1060", "3060 12GB"). Raises ConfigError."""
    model, size = model_and_size(name)
    for card in CARDS:
        own_model, own_size = model_and_size(card.name)
        if model in (own_model, re.sub("^[gr]tx", "", own_model)) and size in ("", own_size):
            return card
    raise ConfigError(f"card {name!r} is not known; known cards: {', '.join(card.name for card in CARDS)}")


def card_notes(card: DeviceProfile) -> list[str]:
    """Where the figures of a card come from, and what serves on a card that our kernels don't know."""
    share = (
        f"{card.name}: figures of its data sheet. Its INT8 rate here is {INT8_SHARE:.0%} of the data sheet's "
        f"peak of {card.int8_gops / 1000 / INT8_SHARE:.4g} TOPS, the share that products are assumed to reach"
    )
    if card.compute_capability >= DP4A:
        return [share]
    major, minor = card.compute_capability
    return [
        f"{card.name}: figures of its data sheet. It has compute capability {major}.{minor} and no dp4a, "
        "which our CUDA kernels need. torch's kernels serve there; they copy weights to float64. The INT8 "
        f"rate is therefore {INT8_SHARE:.0%} of twice the peak of float64. Compare with --device cpu"
    ]


def model_and_size(name: str) -> tuple[str, str]:
    """("gtx1060", "6") of "NVIDIA GeForce GTX 1060 6GB"; the size is "" if there is none."""
    words = re.sub(r"nvidia|geforce|tesla|[-_]", " ", name.lower())
    found = re.search(r"(?:^|\s)(\d+)\s*gi?b?\s*$", words)
    model = words[: found.start()] if found else words
    return re.sub(r"\s", "", model), found[1] if found else ""
