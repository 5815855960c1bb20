"""The capacities and rates of this machine: measured once, and kept in the cache folder."""

from __future__ import annotations

import dataclasses
import os
import sys
from datetime import datetime
from pathlib import Path

from penstock.errors import CapacityError
from penstock.measure import measure_hardware
from penstock.memory.hardware import DiskProfile, HardwareProfile, KernelProfile
from penstock.memory.other_work import is_busy
from penstock_server.settings.settings import Settings

#: The file's name in the cache folder.
CACHE_FILE = "hardware.json"
#: The disk that is assumed if none can be measured: an ordinary NVMe drive.
ASSUMED_DISK = DiskProfile(2.0, 4 << 20, 4, True)


def profile(
    settings: Settings,
    folder: Path | None,
    is_forced: bool = False,
    keeps_better: bool = True,
    measures_disk: bool = True,
) -> HardwareProfile:
    """The profile of this machine and of the disk under `folder` (None: no disk). The first measurement takes
    some seconds. For the flags see measure_hardware(): without `measures_disk`, the disk has a kept rate or
    none."""
    cache = settings.cache_dir / CACHE_FILE
    if is_forced or not os.path.exists(cache):
        what = "disk and memory" if measures_disk and folder is not None else "memory"
        print(f"measuring {what}, which takes some seconds", file=sys.stderr)
    config = settings.engine_config()
    return measure_hardware(folder, config, cache, is_forced, keeps_better, measures_disk)


def profile_or_assume(settings: Settings, folder: Path) -> tuple[HardwareProfile, list[str]]:
    """The result of profile(), and a list of assumptions in place of what can't be measured."""
    try:
        return profile(settings, folder), []
    except (CapacityError, OSError) as error:
        hardware = profile(settings, None)
        reason = f"the disk under {folder} can't be measured ({error}): {ASSUMED_DISK.read_gbps} GB/s assumed"
        return dataclasses.replace(hardware, disk=ASSUMED_DISK), [reason]


def hardware_lines(hardware: HardwareProfile, source: str = "measured") -> list[str]:
    """source: where the rates of memory and products come from."""
    lines = [
        f"{hardware.num_cores} cores, {hardware.ram_bytes / 2**30:.1f} GiB of memory, "
        f"{hardware.free_ram_bytes / 2**30:.1f} GiB free",
        f"memory {hardware.memory_read_gbps:.1f} GB/s, INT8 {hardware.int8_gops:.0f} GOPS ({source})",
    ]
    if hardware.kernels is not None:
        lines += kernel_lines(hardware.kernels)
    for name, disk in (("disk", hardware.disk), ("disk of --kv-spill", hardware.spill_disk)):
        if disk is not None:
            way = "direct" if disk.is_direct else "through the page cache"
            asked = f"{disk.block_bytes >> 20} MiB blocks, {disk.depth} in flight"
            lines.append(f"{name} {disk.read_gbps:.2f} GB/s ({way}, {asked})")
    if hardware.kept_since_s is not None:
        when = datetime.fromtimestamp(hardware.kept_since_s)
        lines.append(
            f"these rates were measured on {when:%Y-%m-%d} at {when:%H:%M} and kept; "
            "`penstock hardware --remeasure` measures them again: run it while nothing else runs"
        )
    if hardware.device is not None:
        card = hardware.device
        lines.append(
            f"{card.name}: {card.total_bytes / 2**30:.0f} GiB, memory {card.memory_gbps:.0f} GB/s, from host "
            f"{card.host_to_device_gbps:.0f} GB/s, INT8 {card.int8_gops / 1000:.0f} TOPS, to the processor "
            f"and back {1e6 * hardware.lane.crossing_s:.0f} us{'' if card.crossing_s else ' (assumed)'}"
            + (f", a launch {1e6 * card.launch_s:.1f} us" if card.launch_s else "")
        )
    return lines


def kernel_lines(kernels: KernelProfile) -> list[str]:
    lines = [
        f"kernels of the processor: {f'{kernels.build} build' if kernels.build else 'not compiled ones'}"
    ]
    if kernels.tuning is not None:
        lines.append(f"tuning {kernels.tuning} ({_source(kernels.others_share)})")
    return lines


def _source(others_share: float | None) -> str:
    if others_share is None:
        return "as given"
    return disturbed(others_share) if is_busy(others_share) else "measured"


def disturbed(others_share: float) -> str:
    return f"the usual values: other work took {others_share:.0%} of the cores while the kernels were tuned"
