"""A tuning of kernels: measured once for each machine and build, and kept in the file of the rates."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from penstock.errors import ConfigError
from penstock.kernel_tuning import TUNING_RANGES, KernelTuning
from penstock.memory import kept_rates

logger = logging.getLogger(__name__)

#: A tuning, and the share of the cores that other work took meanwhile.
Tuned = tuple[KernelTuning, float]
_KEY = "tuning of "


def tuning_of(
    machine: str,
    measure: Callable[[], Tuned],
    cache: Path | None = None,
    is_forced: bool = False,
    keeps_better: bool = True,
) -> Tuned:
    """The tuning that is kept for the machine (hardware.machine_key()), or a new one. The flags are those of
    hardware_profile()."""
    key = _KEY + machine
    rates = kept_rates.read(cache) if cache is not None else {}
    kept = _tuned(key, rates.get(key))
    if kept is not None and not is_forced:
        return kept
    tuning, share = measure()
    new = asdict(tuning) | {"others_share": share}
    if cache is not None:
        chosen = kept_rates.better(rates[key], new) if kept is not None and keeps_better else new
        then = kept_rates.Circumstances(time.time(), chosen["others_share"])
        kept_rates.write(cache, rates | {key: chosen}, kept_rates.read_circumstances(cache) | {key: then})
    return tuning, share


def tunings_of_build(cache: Path, fingerprint: str) -> list[Tuned]:
    """All kept tunings of one build of the kernels (cpu_builds.build_fingerprint())."""
    rates = kept_rates.read(cache)
    found = (
        _tuned(key, value) for key, value in rates.items() if key.startswith(_KEY) and fingerprint in key
    )
    return [tuned for tuned in found if tuned is not None]


def _tuned(key: str, value: kept_rates.Rates | None) -> Tuned | None:
    """A kept tuning. Values that are out of range are ignored, with a warning."""
    if value is None:
        return None
    try:
        share = float(value["others_share"])
        if not 0 <= share <= 1:
            raise ValueError(f"others_share is {share}")
        return KernelTuning(**{name: value[name] for name in TUNING_RANGES}), share
    except (ConfigError, ValueError, TypeError) as error:
        logger.warning("the kept %s is ignored and measured again: %s", key, error)
        return None
