"""Well-known cards as data, so that one can plan before buying.

Sources: capacities, memory rates and FP32 rates are the vendor's data sheets. INT8 rates: dp4a does four
multiplications and additions where FP32 does one (GTX 10xx); tensor cores as the data sheets state them for
dense INT8. Host-to-device: pinned copies reach 75-85% of PCIe's nominal rate (12.1 GB/s were measured on a
Tesla P100 with PCIe 3.0 x16); the RTX 4060 has eight lanes. None of these was measured by this project.
"""

from __future__ import annotations

import re

from penstock.errors import ConfigError
from penstock.memory.hardware import DeviceProfile

GIB = 1 << 30


def _card(
    name: str, capability: tuple[int, int], gib: float, memory_gbps: float, link_gbps: float, int8_tops: float
) -> DeviceProfile:
    num_bytes = int(gib * GIB)
    # How much can be pinned depends on the machine, not on the card.
    return DeviceProfile(
        name, capability, num_bytes, num_bytes, memory_gbps, link_gbps, int8_tops * 1000, 1 << 62
    )


CARDS = tuple(
    _card(*row)
    for row in (
        ("GTX 1060 6 GB", (6, 1), 6, 192.2, 12.0, 17.5),
        ("GTX 1080 Ti", (6, 1), 11, 484.4, 12.0, 45.0),
        ("RTX 2060", (7, 5), 6, 336.0, 12.0, 103.0),
        ("RTX 3060", (8, 6), 12, 360.0, 24.0, 102.0),
        ("RTX 4060", (8, 9), 8, 272.0, 12.0, 121.0),
        ("T4", (7, 5), 15, 320.0, 12.0, 130.0),
        ("RTX 3090", (8, 6), 24, 936.0, 24.0, 284.0),
        ("H200", (9, 0), 139, 4800.0, 52.0, 1979.0),
    )
)


def find_card(name: str) -> DeviceProfile:
    """A card by its name, however it is spelt ("gtx1060", "RTX 3060 12GB"). Raises ConfigError."""
    wanted = _key(name)
    for card in CARDS:
        if _key(card.name) == wanted:
            return card
    raise ConfigError(f"card {name!r} is not known here; there are: {', '.join(card.name for card in CARDS)}")


def _key(name: str) -> str:
    words = re.sub(r"[-_]|nvidia|geforce|tesla", " ", name.lower()).strip()
    return re.sub(r"\s+\d+\s*gi?b$", "", words).replace(" ", "")
