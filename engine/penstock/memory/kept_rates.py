"""Kept rates: what was measured of a machine, in a file from one start to the next; and which of two
measurements counts."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.config import TUNING_RANGES

logger = logging.getLogger(__name__)

CACHE_VERSION = 2
MACHINE_RATES = {"memory_read_gbps", "int8_gops", "products"}
DEVICE_RATES = {"memory_gbps", "host_to_device_gbps", "int8_gops"}
TUNING = {*TUNING_RANGES, "others_share"}
DISK_RATES = {"read_gbps", "block_bytes", "depth", "is_direct"}
#: The noise of an idle machine does not bring a rate below this share of an earlier measurement.
FAR_BELOW = 0.75
#: Other work that takes a larger share of the cores disturbs a tuning.
BUSY_SHARE = 0.1
_UNITS = {"int8_gops": "GOPS of INT8"}

#: Rates of one disk, one card or one machine, by name.
Rates = dict[str, Any]


def read(path: Path) -> dict[str, Rates]:
    """The rates by key. A file that is missing, broken or of another format gives {}, and everything is
    measured again."""
    try:
        content = json.loads(path.read_text())
        rates = content["rates"] if content["format_version"] == CACHE_VERSION else {}
        is_known = all(
            set(value) in (MACHINE_RATES, DEVICE_RATES, DISK_RATES, TUNING) for value in rates.values()
        )
        return dict(rates) if is_known else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def read_times(path: Path) -> dict[str, float]:
    """When the rates of each key were measured, in seconds since 1970. Where the file doesn't say, the time
    at which the file was written counts."""
    rates = read(path)
    try:
        times = json.loads(path.read_text()).get("measured_s", {}) if rates else {}
        return {key: float(times.get(key, path.stat().st_mtime)) for key in rates}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def write(path: Path, rates: dict[str, Rates], measured_s: dict[str, float] | None = None) -> None:
    """Write the file as a whole or not at all. Where the folder can't be written, the next start measures
    again, which takes some seconds."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"format_version": CACHE_VERSION, "rates": rates, "measured_s": measured_s or {}}
        temporary.write_text(json.dumps(content, indent=2))
        os.replace(temporary, path)
    except OSError as error:
        logger.warning("measured rates can't be kept in %s: %s", path, error.strerror)


def better(kept: Rates | None, new: Rates) -> Rates:
    """The better of two measurements of the same thing: other work makes a machine slower, and nothing makes
    it faster than it is. A disk that is now read in another way (directly or not) counts as another thing."""
    if kept is None or kept.get("is_direct") != new.get("is_direct"):
        return new
    if "others_share" in new:  # of a tuning, which is no rate: a disturbed one replaces none that was not
        return new if new["others_share"] <= max(BUSY_SHARE, kept["others_share"]) else kept
    if "read_gbps" in new:  # block size and depth stay with the rate at which they were measured
        return max(kept, new, key=lambda rates: float(rates["read_gbps"]))
    return {name: _better(kept[name], new[name]) for name in new}


def _better(kept: Any, new: Any) -> Any:
    """The better of two numbers, or of two lists of (rows, rate) pairs."""
    if not isinstance(new, Sequence):
        return max(kept, new)
    before = {rows: rate for rows, rate in kept}
    return [(rows, max(rate, before.get(rows, rate))) for rows, rate in new]


def equal(new: Rates, kept: Rates | None) -> bool:
    """Whether nothing changes if `new` is kept. JSON makes lists of tuples."""
    return json.dumps(new, sort_keys=True) == json.dumps(kept, sort_keys=True)


def far_below(kept: Rates | None, new: Rates) -> list[str]:
    """For people: each rate that is far below the kept rate, with both numbers."""
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
    what = "the new rates are kept, as asked for" if replaces else "plans keep the earlier rates"
    logger.warning(
        "measured far below an earlier measurement: %s; %s. Other work on the machine may have disturbed the "
        "measurement: run `penstock hardware --remeasure` on the idle machine to measure again and keep the "
        "new rates",
        "; ".join(lower), what,
    )  # fmt: skip
