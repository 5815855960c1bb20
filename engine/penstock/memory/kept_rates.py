"""Rates of a machine, kept in a file from one start to the next, and which of two measurements counts."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

CACHE_VERSION = 2
MACHINE_RATES = {"memory_read_gbps", "int8_gops", "products"}
DEVICE_RATES = {"memory_gbps", "host_to_device_gbps", "int8_gops"}
DISK_RATES = {"read_gbps", "block_bytes", "depth", "is_direct"}
#: A rate below this share of the one before is more than the noise of an idle machine.
FAR_BELOW = 0.75
_UNITS = {"int8_gops": "GOPS of INT8"}

#: Of one disk, one card or one machine.
Rates = dict[str, Any]


def read(path: Path) -> dict[str, Rates]:
    """{} for a file that is missing, broken or of another format: then it is measured again."""
    try:
        content = json.loads(path.read_text())
        rates = content["rates"] if content["format_version"] == CACHE_VERSION else {}
        is_known = all(set(value) in (MACHINE_RATES, DEVICE_RATES, DISK_RATES) for value in rates.values())
        return dict(rates) if is_known else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write(path: Path, rates: dict[str, Rates]) -> None:
    """As a whole or not at all; a folder that can't be written costs the next start some seconds."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"format_version": CACHE_VERSION, "rates": rates}, indent=2))
        os.replace(temporary, path)
    except OSError as error:
        logger.warning("what was measured can't be kept in %s: %s", path, error.strerror)


def better(kept: Rates | None, new: Rates) -> Rates:
    """Of two measurements of the same thing the better: other work on a machine makes it slower, and nothing
    makes it faster than it is. A disk that is read in another way is another thing."""
    if kept is None or kept.get("is_direct") != new.get("is_direct"):
        return new
    if "read_gbps" in new:  # block size and depth belong to the rate
        return max(kept, new, key=lambda rates: float(rates["read_gbps"]))
    return {name: _better(kept[name], new[name]) for name in new}


def _better(kept: Any, new: Any) -> Any:
    """Of a number, or of (rows, rate) pairs."""
    if not isinstance(new, Sequence):
        return max(kept, new)
    before = {rows: rate for rows, rate in kept}
    return [(rows, max(rate, before.get(rows, rate))) for rows, rate in new]


def far_below(kept: Rates | None, new: Rates) -> list[str]:
    """For people: the rates that are far below those of before, with both."""
    if kept is None or kept.get("is_direct") != new.get("is_direct"):
        return []
    return [
        f"{new[name]:.1f} {_UNITS.get(name, f'GB/s ({name})')} instead of {kept[name]:.1f}"
        for name in sorted(new)
        if name.endswith(("_gbps", "_gops")) and new[name] < FAR_BELOW * kept[name]
    ]


def tell(lower: list[str], replaces: bool) -> None:
    """Warn of rates that far_below() found."""
    if not lower:
        return
    what = "the new ones are kept, as asked for" if replaces else "the ones of before are kept for plans"
    logger.warning(
        "measured far below an earlier measurement: %s; %s. Other work on the machine may have disturbed it: "
        "`penstock hardware --remeasure` when it is idle measures again and keeps what it finds",
        "; ".join(lower), what,
    )  # fmt: skip
