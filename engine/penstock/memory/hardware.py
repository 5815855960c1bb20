"""HardwareProfile: what this machine has. Memory that is really free and cores that this process may use are
looked up; machine_rates.py adds rates, which are measured and kept from one start to the next."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from penstock.kernel_tuning import KernelTuning
from penstock.memory.other_work import is_busy

CGROUP_ROOT = Path("/sys/fs/cgroup")
#: Pairs (rows of integers, 1e9 bytes of weights a second that pass through a product with so many rows), rows
#: ascending. In a HardwareProfile, more rows never have a higher rate.
ProductRates = tuple[tuple[int, float], ...]
#: By the name of a weight format: the same, with 1e9 elements of weights a second.
FormatRates = tuple[tuple[str, ProductRates], ...]
#: The name by which the rates of recurrences are among FormatRates: by the tokens of a sequence, 1e9 elements
#: of its states a second.
RECURRENCE = "recurrence"
#: Seconds from a card to the processor and back, where no card was measured: an event, a copy of the
#: activations, a function on the host, a worker that wakes up, a copy of the result. Assumed.
CROSSING_S = 100e-6


@dataclass(frozen=True)
class DiskProfile:
    """How fast the file system under a model is read, and how to read it so fast."""

    read_gbps: float
    #: Bytes per read, and reads in flight, at which reading was fastest.
    block_bytes: int
    depth: int
    #: O_DIRECT works on this file system: reads bypass the page cache.
    is_direct: bool


@dataclass(frozen=True)
class DeviceProfile:
    """A GPU and the link that feeds it."""

    name: str
    compute_capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    memory_gbps: float
    #: Copies from pinned RAM to the GPU.
    host_to_device_gbps: float
    int8_gops: float
    #: RAM that the driver lets a process pin.
    pinnable_bytes: int
    #: Rates of products with weights in the GPU's memory; empty where these products are as fast as this
    #: memory and the INT8 rate allow.
    products: ProductRates = ()
    #: Seconds from the GPU to the processor and back, where the processor does nothing; 0: not measured.
    crossing_s: float = 0.0
    #: Seconds in which a kernel is launched; 0: not measured.
    launch_s: float = 0.0


@dataclass(frozen=True)
class KernelProfile:
    """The kernels of the processor."""

    #: Of the native kernels, such as "avx512"; None: other kernels compute.
    build: str | None
    #: The parameters with which rates were measured; None where the kernels have none.
    tuning: KernelTuning | None = None
    #: The share of the cores that other work took while the tuning was measured; None: the tuning was given.
    others_share: float | None = None


@dataclass(frozen=True)
class LaneProfile:
    """The place that computes, as plans see it: the processor, or a GPU. Capacities are bytes, rates 1e9
    bytes or operations a second; a rate of 0 is unknown."""

    #: Layers are computed in a memory of the lane's own, which a link feeds from pinned RAM; else in RAM.
    has_own_memory: bool
    free_bytes: int
    memory_gbps: float
    int8_gops: float
    #: Rates of products with weights that come from memory; empty where nothing was measured.
    products: ProductRates = ()
    #: Likewise of weights in other formats than INT8 with a scale for each output channel.
    formats: FormatRates = ()
    #: Copies from pinned RAM to the lane's own memory.
    link_gbps: float = 0.0
    #: RAM that can be pinned for the link.
    pinnable_bytes: int = 0
    #: Seconds from the lane to the processor and back, measured or assumed.
    crossing_s: float = 0.0
    #: Seconds in which a kernel is launched, of products that the processor shares. 0: not measured; an
    #: assumed crossing has room for launches.
    launch_s: float = 0.0


@dataclass(frozen=True)
class HardwareProfile:
    """Capacities are bytes; rates are measured, in 1e9 bytes (or operations) a second."""

    num_cores: int
    ram_bytes: int
    #: RAM that can be taken without pushing anything out, within the cgroup's limit.
    free_ram_bytes: int
    memory_read_gbps: float
    #: Multiplications and additions of INT8 products on the CPU, with many rows.
    int8_gops: float
    disk: DiskProfile | None = None
    device: DeviceProfile | None = None
    #: Rates of products on the CPU with weights that come from memory; empty where nothing was measured.
    products: ProductRates = ()
    #: Likewise of weights in other formats than INT8 with a scale for each output channel.
    formats: FormatRates = ()
    #: When the oldest of the kept rates was measured, in seconds since 1970; None: every rate is new.
    kept_since_s: float | None = None
    kernels: KernelProfile | None = None
    #: The largest share of the cores that other work took while one of the rates was measured; None: unknown.
    others_share: float | None = None
    #: The disk of keys and values that have no room in memory (--kv-spill), where it is another one.
    spill_disk: DiskProfile | None = None

    @property
    def notes(self) -> list[str]:
        """For people: what is wrong with the rates."""
        if not is_busy(self.others_share):
            return []
        return [
            f"the rates of this machine were measured while other work took {self.others_share:.0%} of the "
            "cores: predicted times may be too long. `penstock hardware --remeasure FOLDER` (FOLDER: where "
            "the models are) measures them again: run it while nothing else runs"
        ]

    @cached_property
    def processor(self) -> LaneProfile:
        free, gbps, gops = self.free_ram_bytes, self.memory_read_gbps, self.int8_gops
        return LaneProfile(False, free, gbps, gops, self.products, self.formats)

    @cached_property
    def lane(self) -> LaneProfile:
        """The place that computes: the GPU if there is one, else the processor."""
        device = self.device
        if device is None:
            return self.processor
        return LaneProfile(
            True,
            device.free_bytes,
            device.memory_gbps,
            device.int8_gops,
            device.products,
            link_gbps=device.host_to_device_gbps,
            pinnable_bytes=device.pinnable_bytes,
            crossing_s=device.crossing_s or CROSSING_S,
            launch_s=device.launch_s,
        )


def total_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory_bytes(
    meminfo: Path = Path("/proc/meminfo"),
    cgroup_root: Path = CGROUP_ROOT,
    own_cgroup: Path = Path("/proc/self/cgroup"),
) -> int:
    """Memory that can be taken without pushing anything out. The least of these counts: what the system has
    available, and what is left of each limit of the process's cgroup and of the cgroups above (v2 or v1).
    What the kernel would take back from a cgroup counts as free."""
    available = total_memory_bytes()
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for folder, limit_names, usage_name in _cgroups(cgroup_root, own_cgroup):
        limits, usage = [_number(folder / name) for name in limit_names], _number(folder / usage_name)
        limit = min((each for each in limits if each is not None), default=None)
        if limit is not None and usage is not None:
            usage -= min(usage, _reclaimable(folder / "memory.stat"))
            available = min(available, max(0, limit - usage))
    return available


def _cgroups(root: Path, own: Path) -> Iterator[tuple[Path, tuple[str, ...], str]]:
    """(folder, names of the limits, name of the usage) of the process's memory cgroups, up to the root."""
    paths = dict[str, str]()
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)  # v1 may join several controllers
    for controller, base, limits, usage in (
        # Beyond memory.high the kernel slows a process down until it has taken enough back.
        ("", root, ("memory.max", "memory.high"), "memory.current"),
        ("memory", root / "memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes"),
    ):
        # Inside a container the path is often the host's path, which does not exist here.
        inner = base / paths.get(controller, "/").lstrip("/")
        for folder in dict.fromkeys((inner, *inner.parents, base)):
            if folder == base or base in folder.parents:
                yield folder, limits, usage


def _reclaimable(stat: Path) -> int:
    """Bytes that the kernel takes back where a cgroup needs them: page cache, whether it was read once
    (inactive) or twice (active), and caches of names and inodes, which v2 alone counts. Pages that still have
    to be written don't count, nor do shared memory and locked pages, which are on other lists."""
    try:
        fields = {name: int(value) for name, value in map(str.split, stat.read_text().splitlines())}
    except (OSError, ValueError):
        return 0
    if "total_inactive_file" in fields:  # v1, where the names without total_ leave the cgroups inside out
        fields = {name.removeprefix("total_"): fields[name] for name in fields if name.startswith("total_")}
    unwritten = sum(fields.get(name, 0) for name in ("dirty", "writeback", "file_dirty", "file_writeback"))
    clean = fields.get("inactive_file", 0) + fields.get("active_file", 0) - unwritten
    return max(0, clean) + fields.get("slab_reclaimable", 0)


def _number(path: Path) -> int | None:
    """The number in a cgroup's file; None if there is no such file or its text is "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def num_physical_cores() -> int:
    """Physical cores among the processors that this process may run on. A core's second hardware thread adds
    nothing to a kernel that is bound by memory or by the core's multipliers."""
    allowed = os.sched_getaffinity(0)
    cores = set()
    for cpu in allowed:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        package, core = _number(topology / "physical_package_id"), _number(topology / "core_id")
        cores.add((package, core if core is not None else cpu))
    return max(1, len(cores))


def threads_beside_a_card() -> int:
    """Threads of the processor's kernels where a card computes, too: one thread launches and one copies, both
    in Python. Six cores and more leave them a core each, three to five leave them one together. (On 16 cores
    beside an H200 a step took 97 ms with 16 threads and 87 ms with 14.)"""
    num_cores = num_physical_cores()
    return num_cores - (2 if num_cores >= 6 else 1 if num_cores >= 3 else 0)


def pinnable_bytes(version: Path = Path("/proc/version")) -> int:
    """RAM that a GPU's driver will lock in memory: all that is free, but under WSL at most half of the RAM
    ("CUDA on WSL User Guide": pinned system memory is limited). Where the driver refuses more than this
    expects, the loader says so."""
    is_wsl = version.exists() and "microsoft" in version.read_text().lower()
    return min(free_memory_bytes(), total_memory_bytes() // 2 if is_wsl else total_memory_bytes())


def capacities() -> HardwareProfile:
    """This machine without a GPU and without measurements: capacities are looked up, rates are 0."""
    return HardwareProfile(num_physical_cores(), total_memory_bytes(), free_memory_bytes(), 0.0, 0.0)
