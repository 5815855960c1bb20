"""What this machine has: memory that is really free, cores that this process may use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class DiskProfile:
    """How fast the file system under a model delivers, and how it has to be asked."""

    read_gbps: float
    #: Bytes per read and reads in flight at which it was fastest.
    block_bytes: int
    depth: int
    #: O_DIRECT works there: reads bypass the page cache.
    is_direct: bool


@dataclass(frozen=True)
class DeviceProfile:
    """A GPU and the link that feeds it."""

    name: str
    compute_capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    memory_gbps: float
    #: From pinned RAM.
    host_to_device_gbps: float
    int8_gops: float
    #: RAM that the driver lets a process pin.
    pinnable_bytes: int


@dataclass(frozen=True)
class HardwareProfile:
    """Capacities in bytes; rates in 1e9 bytes (or operations) a second, measured."""

    num_cores: int
    ram_bytes: int
    #: What can be taken without pushing anything out, within the cgroup's limit.
    free_ram_bytes: int
    memory_read_gbps: float
    #: Multiplications and additions of INT8 products on the CPU.
    int8_gops: float
    disk: DiskProfile | None = None
    device: DeviceProfile | None = None


def free_memory_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup_root: Path = CGROUP_ROOT) -> int:
    """Memory that can be taken without pushing anything out: what the system has available, or what is
    left of the cgroup's limit (v2 or v1), whichever is less."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, usage = _number(cgroup_root / limit_name), _number(cgroup_root / usage_name)
        if limit is not None and usage is not None:
            available = min(available, max(0, limit - usage))
    return available


def _number(path: Path) -> int | None:
    """A cgroup file's number; None if it is not there or says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def num_physical_cores() -> int:
    """Physical cores among the processors this process may run on: a second hardware thread of a core
    adds nothing to a kernel that is bound by memory or by the core's multipliers."""
    allowed = os.sched_getaffinity(0)
    cores = set()
    for cpu in allowed:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        package, core = _number(topology / "physical_package_id"), _number(topology / "core_id")
        cores.add((package, core if core is not None else cpu))
    return max(1, len(cores))
