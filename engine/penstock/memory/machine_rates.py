"""Rates of this machine: measured once, kept in a file, and put into a HardwareProfile."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from penstock.errors import CapacityError, HandoverError
from penstock.memory import kept_rates
from penstock.memory.hardware import (
    RECURRENCE,
    DeviceProfile,
    DiskProfile,
    FormatRates,
    HardwareProfile,
    ProductRates,
    free_memory_bytes,
    num_physical_cores,
    total_memory_bytes,
)
from penstock.memory.kept_rates import Circumstances, Rates
from penstock.memory.other_work import Moment, is_busy, now, others_share

logger = logging.getLogger(__name__)

MeasureDisk = Callable[[Path], DiskProfile] | None


@dataclass(frozen=True)
class Measure:
    """How rates are measured. The functions are handed in, because arithmetic belongs to another room and
    tests have no time to measure."""

    #: Fingerprint of the processor's kernels: other kernels have other rates.
    kernels: str
    memory_read_gbps: Callable[[int], float]
    products: Callable[[int], ProductRates]
    #: None: the disk is not measured, and only kept rates count.
    disk: MeasureDisk
    #: Fingerprint of the GPU's kernels.
    device_kernels: str = ""
    #: Gives kept_rates.DEVICE_RATES.
    device: Callable[[], dict[str, float]] = dict
    #: Seconds from the GPU to the processor and back; None: they are not measured.
    crossing_s: Callable[[], float] | None = None
    #: Seconds in which a kernel is launched; None: they are not measured.
    launch_s: Callable[[], float] | None = None
    #: Rates of products in other formats than plain INT8, by the names of the formats; None: not measured.
    formats: Callable[[int], dict[str, ProductRates]] | None = None
    #: The rates of RECURRENCE.
    recurrence: Callable[[int], ProductRates] | None = None
    #: The clock that sees other work.
    now: Callable[[], Moment] = now


def hardware_profile(
    folder: Path | None,
    measure: Measure,
    cache: Path | None = None,
    is_forced: bool = False,
    device: DeviceProfile | None = None,
    keeps_better: bool = True,
    spill_folder: Path | None = None,
) -> HardwareProfile:
    """This machine with the GPU `device` and the disk under `folder` (None: without a disk), and that under
    `spill_folder` if this is another one. Capacities are looked up each time. Rates are measured once and
    kept in the file `cache`: for each machine and card with its kernels, and for each disk. If measuring is
    forced, the profile has the rates that were just measured; the file keeps the better of old and new rates
    or, without `keeps_better`, the new ones."""
    num_cores = num_physical_cores()
    rates = _Rates(cache, is_forced, measure.now, num_cores)
    machine, measure_disk = machine_key(num_cores, measure.kernels), measure.disk
    found = rates.of(machine, lambda: _machine_rates(measure, num_cores))
    formats = _format_rates(rates, machine, measure, num_cores)
    disk = spill_disk = None
    if folder is not None:
        disk = _disk(rates, folder, measure_disk)
        spill_disk = _spill_disk(rates, folder, spill_folder, measure_disk)
    if device is not None:
        key = f"{device.name} with {measure.device_kernels} in {machine}"
        device = replace(device, **rates.of(key, measure.device))
        if (crossing_s := measure.crossing_s) is not None:
            # Under a key of its own, so that files that were kept before it was measured stay good.
            try:
                crossing = rates.of(f"crossing, {key}", lambda: {"crossing_s": crossing_s()})
            except (HandoverError, RuntimeError) as error:
                logger.warning(
                    "%s: the way to the processor and back is not measured: %s", device.name, error
                )
            else:
                device = replace(device, **crossing)
        if (launch_s := measure.launch_s) is not None:
            device = replace(device, **rates.of(f"launch, {key}", lambda: {"launch_s": launch_s()}))
    rates.keep(keeps_better)
    return HardwareProfile(
        num_cores=num_cores,
        ram_bytes=total_memory_bytes(),
        free_ram_bytes=free_memory_bytes(),
        memory_read_gbps=found["memory_read_gbps"],
        int8_gops=found["int8_gops"],
        disk=disk,
        spill_disk=spill_disk,
        device=device,
        products=_without_dips(found["products"]),
        formats=formats,
        kept_since_s=rates.kept_since_s,
        others_share=rates.others_share,
    )


def _format_rates(rates: _Rates, machine: str, measure: Measure, num_cores: int) -> FormatRates:
    """Under a key of their own, so that files that were kept before they were measured stay good."""
    if (of_formats := measure.formats) is None:
        return ()

    def measured() -> Rates:
        return {f"{kept_rates.FORMAT}{name}": found for name, found in of_formats(num_cores).items()}

    found = rates.of(f"formats, {machine}", measured)
    if (recurrence := measure.recurrence) is not None:
        name = f"{kept_rates.FORMAT}{RECURRENCE}"
        found = found | rates.of(f"recurrence, {machine}", lambda: {name: recurrence(num_cores)})
    return tuple((name.removeprefix(kept_rates.FORMAT), _without_dips(each)) for name, each in found.items())


def _disk(rates: _Rates, folder: Path, measure_disk: MeasureDisk) -> DiskProfile | None:
    """The disk under a folder; None if it is not measured, and no rate is kept."""
    key = disk_key(folder)
    if measure_disk is not None:
        return DiskProfile(**rates.of(key, lambda: asdict(measure_disk(folder))))
    kept = rates.kept_of(key)
    return None if kept is None else DiskProfile(**kept)


def _spill_disk(
    rates: _Rates, folder: Path, spill_folder: Path | None, measure_disk: MeasureDisk
) -> DiskProfile | None:
    """The disk under `spill_folder`, which may have to be made, if it is not the disk under `folder`. A disk
    that can't be measured is taken for as fast as that one."""
    if spill_folder is None:
        return None
    above = (spill_folder.absolute(), *spill_folder.absolute().parents)
    there = next(each for each in above if each.exists())
    if disk_key(there) == disk_key(folder):
        return None
    try:
        return _disk(rates, there, measure_disk)
    except (CapacityError, OSError) as error:
        logger.warning(
            "the disk of --kv-spill can't be measured (%s): plans take it for as fast as that of the weights",
            error,
        )
        return None


def kept_shares(cache: Path, folder: Path, kernels: str) -> list[float | None]:
    """The share of other work beside each of the kept rates that plans of this machine use: those of memory
    and processor, of cards, and of the disk under `folder`. None: not known."""
    machine, disk = machine_key(num_physical_cores(), kernels), disk_key(folder) if folder.exists() else ""
    known, rates = kept_rates.read_circumstances(cache), kept_rates.read(cache)
    return [
        each.others_share
        for key, each in known.items()
        if key == disk or (key.endswith(machine) and set(rates[key]) != kept_rates.TUNING)
    ]


class _Rates:
    """The rates of one profile: those that the file `cache` has, and those that are measured now."""

    def __init__(
        self, cache: Path | None, is_forced: bool, now: Callable[[], Moment], num_cores: int
    ) -> None:
        self._cache, self._is_forced, self._now, self._num_cores = cache, is_forced, now, num_cores
        self._kept = kept_rates.read(cache) if cache is not None else {}
        self._known = kept_rates.read_circumstances(cache) if cache is not None else {}
        self._new: dict[str, Rates] = {}
        #: The circumstances of all rates in _new, and of the kept rates that are in the profile.
        self._circumstances: dict[str, Circumstances] = {}

    def of(self, key: str, measure: Callable[[], Rates]) -> Rates:
        """The kept rates, or else rates that are measured now."""
        if not self._is_forced and (kept := self.kept_of(key)) is not None:
            return kept
        before = self._now()
        self._new[key] = measure()
        share = others_share(before, self._now(), self._num_cores)
        self._circumstances[key] = Circumstances(time.time(), share)
        return self._new[key]

    def kept_of(self, key: str) -> Rates | None:
        if key in self._kept:
            self._circumstances[key] = self._known[key]
        return self._kept.get(key)

    @property
    def others_share(self) -> float | None:
        """The largest known share of other work."""
        shares = (each.others_share for each in self._circumstances.values())
        return max((share for share in shares if share is not None), default=None)

    @property
    def kept_since_s(self) -> float | None:
        """When the oldest of the kept rates was measured."""
        kept = (each.measured_s for key, each in self._circumstances.items() if key not in self._new)
        return min(kept, default=None)

    def keep(self, keeps_better: bool) -> None:
        """Write the measured rates, and warn of rates that are far below the kept ones."""
        if self._cache is None or not self._new:
            return
        lower = [
            text for key, new in self._new.items() for text in kept_rates.far_below(self._kept.get(key), new)
        ]
        kept_rates.tell(lower, not keeps_better, self._disturbance())
        rates, known = dict(self._kept), dict(self._known)
        for key in self._new:
            merged = self._better(key) if keeps_better else (self._new[key], self._circumstances[key])
            rates[key], known[key] = merged
        kept_rates.write(self._cache, rates, known)

    def _disturbance(self) -> float:
        """The largest share of other work beside a new measurement, of rates of which an undisturbed
        measurement was kept; 0 if there are none."""
        shares = (
            self._circumstances[key].others_share or 0.0
            for key in self._new
            if key in self._kept and not is_busy(self._known[key].others_share)
        )
        return max(shares, default=0.0)

    def _better(self, key: str) -> tuple[Rates, Circumstances]:
        """The better of kept and new rates, with the circumstances of the quieter measurement."""
        new, now, kept = self._new[key], self._circumstances[key], self._kept.get(key)
        if kept is None or not kept_rates.is_same(kept, new):
            return new, now
        then, rates = self._known[key], kept_rates.better(kept, new)
        share = kept_rates.quieter(then.others_share, now.others_share or 0.0)
        is_new = not kept_rates.equal(rates, kept) or is_busy(share) != is_busy(then.others_share)
        return rates, Circumstances(now.measured_s if is_new else then.measured_s, share)


def _machine_rates(measure: Measure, num_cores: int) -> Rates:
    products = measure.products(num_cores)
    return {
        # A good product reads weights faster than a sum reads numbers.
        "memory_read_gbps": max(measure.memory_read_gbps(num_cores), *(gbps for _, gbps in products)),
        "int8_gops": max(2 * rows * gbps for rows, gbps in products),
        "products": products,
    }


def _without_dips(measured: Sequence[tuple[int, float]]) -> ProductRates:
    """The measured rates, where no product is slower than a product with more rows: more rows are more work,
    so something disturbed the slower measurement. The scheduler relies on steps that take no less time with
    more tokens."""
    return tuple((rows, max(gbps for other, gbps in measured if other >= rows)) for rows, _ in measured)


def disk_key(folder: Path) -> str:
    """The key of the rates of the disk under `folder`."""
    return f"disk {os.stat(folder).st_dev}"


def machine_key(num_cores: int, kernels: str) -> str:
    """The key of a machine's rates: another processor, memory size, number of cores or kernel has other
    rates."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")
    return f"{model}, {num_cores} cores, {total_memory_bytes() >> 20} MiB, kernels {kernels}"
