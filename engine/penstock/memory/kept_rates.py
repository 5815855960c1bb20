"""Kept rates: what was measured of a machine, in a file from one start to the next; and which of two
measurements counts."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.kernel_tuning import TUNING_RANGES
from penstock.memory.other_work import BUSY_SHARE, is_busy

logger = logging.getLogger(__name__)

CACHE_VERSION = 2
MACHINE_RATES = {"memory_read_gbps", "int8_gops", "products"}
DEVICE_RATES = {"memory_gbps", "host_to_device_gbps", "int8_gops"}
TUNING = {*TUNING_RANGES, "others_share"}
CROSSING = {"crossing_s"}
LAUNCH = {"launch_s"}
#: What begins the names of rates of products in other formats, of which each Penstock measures its own.
FORMAT = "format "
DISK_RATES = {"read_gbps", "block_bytes", "depth", "is_direct"}
#: The noise of an idle machine does not bring a rate below this share of an earlier measurement.
FAR_BELOW = 0.75
_UNITS = {"int8_gops": "GOPS of INT8"}

#: Rates of one disk, one card or one machine, by name.
Rates = dict[str, Any]


@dataclass(frozen=True)
class Circumstances:
    """When rates were measured, and beside how much other work."""

    #: Seconds since 1970.
    measured_s: float
    #: The share of the cores that other work took; None: not known.
    others_share: float | None = None


def read(path: Path) -> dict[str, Rates]:
    """The rates by key. A file that is missing, broken or of another format gives {}, and everything is
    measured again."""
    try:
        content = json.loads(path.read_text())
        rates = content["rates"] if content["format_version"] == CACHE_VERSION else {}
        known = (MACHINE_RATES, DEVICE_RATES, CROSSING, LAUNCH, DISK_RATES, TUNING)
        is_known = all(set(value) in known or _is_of_formats(value) for value in rates.values())
        return dict(rates) if is_known else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _is_of_formats(rates: Rates) -> bool:
    return bool(rates) and all(name.startswith(FORMAT) for name in rates)


def read_circumstances(path: Path) -> dict[str, Circumstances]:
    """The circumstances in which the rates of each key were measured. Where a file of an earlier Penstock
    does not say when, the time at which the file was written counts."""
    rates = read(path)
    try:
        content = json.loads(path.read_text()) if rates else {}
        times, shares = content.get("measured_s", {}), content.get("others_share", {})
        written_s = path.stat().st_mtime if rates else 0.0
        return {
            key: Circumstances(float(times.get(key, written_s)), _share(shares.get(key))) for key in rates
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _share(value: object) -> float | None:
    """A share of the cores as the file has it; anything but a number from 0 to 1 is not known."""
    is_share = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
    return float(value) if is_share else None  # type: ignore[arg-type]


def write(path: Path, rates: dict[str, Rates], circumstances: dict[str, Circumstances] | None = None) -> None:
    """Write the file as a whole or not at all. Where the folder can't be written, the next start measures
    again, which takes some seconds."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        known = circumstances or {}
        content = {
            "format_version": CACHE_VERSION,
            "rates": rates,
            "measured_s": {key: each.measured_s for key, each in known.items()},
            "others_share": {key: each.others_share for key, each in known.items()},
        }
        temporary.write_text(json.dumps(content, indent=2))
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        logger.warning("measured rates can't be kept in %s: %s", path, error.strerror)


def better(kept: Rates | None, new: Rates) -> Rates:
    """The better of two measurements of the same thing: other work makes a machine slower, and nothing makes
    it faster than it is."""
    if kept is None or not is_same(kept, new):
        return new
    if "others_share" in new:  # of a tuning, which is no rate: a disturbed one replaces none that was not
        return new if new["others_share"] <= max(BUSY_SHARE, kept["others_share"]) else kept
    if "read_gbps" in new:  # block size and depth stay with the rate at which they were measured
        return max(kept, new, key=lambda rates: float(rates["read_gbps"]))
    for name in CROSSING | LAUNCH:  # seconds, of which fewer are better
        if name in new:
            return min(kept, new, key=lambda rates: float(rates[name]))
    return {name: _better(kept.get(name, new[name]), new[name]) for name in new}


def is_same(kept: Rates, new: Rates) -> bool:
    """Whether two measurements are of the same thing. A disk that is now read in another way (directly or
    not) counts as another thing."""
    return kept.get("is_direct") == new.get("is_direct")


def quieter(kept: float | None, new: float) -> float | None:
    """The share of other work that counts for better() rates: no rate is lower than in the quieter of the
    two measurements. If the kept share is not known, the kept measurement may be the quieter one."""
    if kept is None:
        return None if is_busy(new) else new
    return min(kept, new)


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
    if kept is None or not is_same(kept, new):
        return []
    for name, what in (("crossing_s", "to the processor and back"), ("launch_s", "for a launch")):
        if name in new:
            before, after = kept[name], new[name]
            text = f"{1e6 * after:.0f} us {what} instead of {1e6 * before:.0f}"
            return [text] if before < FAR_BELOW * after else []
    return [
        f"{new[name]:.1f} {_UNITS.get(name, f'GB/s ({name})')} instead of {kept[name]:.1f}"
        for name in sorted(new)
        if name.endswith(("_gbps", "_gops")) and new[name] < FAR_BELOW * kept[name]
    ]


def tell(lower: list[str], replaces: bool, others_share: float) -> None:
    """Warn of rates that far_below() found, or that replace others although they were measured on a busy
    machine. `others_share`: of the new measurement."""
    if not lower and not (replaces and is_busy(others_share)):
        return
    what = "the new rates are kept, as asked for" if replaces else "plans keep the earlier rates"
    found = f"measured far below an earlier measurement: {'; '.join(lower)}; " if lower else ""
    cause = "Other work on the machine may have disturbed the measurement"
    if is_busy(others_share):
        cause = f"Other work took {others_share:.0%} of the cores meanwhile, and the rates may be too low"
    logger.warning(
        "%s%s. %s: run `penstock hardware --remeasure` on the idle machine to measure again and keep the new "
        "rates",
        found, what, cause,
    )  # fmt: skip
