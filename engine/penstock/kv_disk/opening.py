"""From a config to the stores that keep its engine's blocks on the host and on disk, and how fast they
write."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from penstock.cache.disk.block_shelf import Tier
from penstock.cache.disk.kv_folder import KVFolder, usable
from penstock.cache.disk.kv_store import KVStore
from penstock.cache.disk.shelf import Shelf
from penstock.cache.disk.state_pieces import StatePieces
from penstock.cache.host.host_shelf import HostShelf
from penstock.cache.host.kv_tiers import KVTiers
from penstock.cache.host.through_host import ThroughHost
from penstock.cache.kv_cache import BlockCache, KVCache
from penstock.config import ResolvedConfig
from penstock.errors import ConfigError
from penstock.kv_disk.fingerprint import description
from penstock.loader import Model
from penstock.memory.hardware import DiskProfile
from penstock.memory.lane import Memory
from penstock.memory.pages import round_up
from penstock.memory.planning.plan import MemoryPlan
from penstock.weights.checkpoints.kept_checksums import KeptChecksums

#: The most bytes on disk where the config has no number.
DEFAULT_BYTES = 16 << 30
#: Bytes a second that are written for each core while the engine works: copying and checking them takes
#: some 2% of the core.
RATE_PER_CORE = 16e6
#: Bytes a second between a card and the host, until the first blocks were moved.
HOST_RATE = 2e9
#: The part of the disk's rate that writing may take from the reading of weights.
DISK_SHARE = 0.02
#: Weights of so many bytes get their checksums while the engine starts; those of larger ones are computed
#: once, beside the first requests.
QUICK_BYTES = 256 << 20


def open_kv_tiers(
    model: Model, plan: MemoryPlan, config: ResolvedConfig, disk: DiskProfile | None = None
) -> KVTiers:
    """The stores that the config asks for, which are one at least. `disk`: the rate of the disk, if that was
    measured. Raises ConfigError."""
    lane, cache = model.streamer.lane, model.executor.kv_cache
    tier = Tier("disk", threading.Condition())
    if lane.torch_device.type == "cuda":
        tier = replace(tier, make_buffer=functools.partial(_pinned, lane.memories[0]))
    if not plan.kv_host_bytes:
        return KVTiers([_open_disk(model, plan, config, disk, tier)])
    shelf = HostShelf(plan.kv_host_bytes, round_up(cache.block_bytes))
    host_tier = replace(tier, name="host", usual_rate=HOST_RATE)
    host = KVStore(shelf, cache, lambda is_wanted: shelf, True, math.inf, host_tier)
    if config.kv_disk is None:
        return KVTiers([host])
    try:
        below = _open_disk(model, plan, config, disk, replace(tier, above=shelf), ThroughHost(shelf, cache))
    except BaseException:
        host.close()
        raise
    shelf.tell = below.offer
    return KVTiers([host, below])


def _pinned(memory: Memory, num_bytes: int) -> Tensor:
    """Memory from which a card copies at the link's rate."""
    piece = memory.allocate(num_bytes)
    memory.prepare(piece)
    return piece


def _open_disk(
    model: Model,
    plan: MemoryPlan,
    config: ResolvedConfig,
    disk: DiskProfile | None,
    tier: Tier,
    through_host: ThroughHost | None = None,
) -> KVStore[Shelf]:
    """The store on disk, for the model's cache or for what stands before it. Raises ConfigError."""
    assert config.kv_disk is not None
    path = Path(config.kv_disk)
    usable(path)
    folder = KVFolder(path, config.kv_disk_bytes or DEFAULT_BYTES)
    checkpoint = model.store.checkpoint
    files = sorted({entry.file for entry in checkpoint.entries.values()})
    kept = KeptChecksums(path / "weights.json")
    is_quick = kept.known(files) is not None or sum(file.stat().st_size for file in files) <= QUICK_BYTES
    cache = through_host or _with_states(model, plan, folder.limit_bytes)

    def open_shelf(is_wanted: Callable[[], bool]) -> Shelf:
        weights = {file.name: checksum for file, checksum in kept.of(files, is_wanted).items()}
        about = description(model, config, weights)
        if isinstance(cache, StatePieces):
            about["state_blocks"] = cache.numbers.num_pieces
        name = f"{checkpoint.folder.name}-{about['fingerprint'][:16]}"
        return folder.open_shelf(name, about, round_up(cache.block_bytes))

    rate = RATE_PER_CORE * config.num_threads
    if disk is not None and plan.at_home("disk"):
        rate = min(rate, DISK_SHARE * disk.read_gbps * 1e9)
    return KVStore(folder, cache, open_shelf, is_quick, rate, tier)


def _with_states(model: Model, plan: MemoryPlan, limit_bytes: int) -> BlockCache:
    """The cache's blocks, and the pieces of its recurrent states if there are some. Raises ConfigError if no
    state can be kept."""
    cache = model.executor.kv_cache
    if not model.spec.state_bytes:
        return cache
    assert isinstance(cache, KVCache), "a cache that spills has no states"
    if plan.num_state_slots <= plan.num_state_sequences:
        raise ConfigError(
            "--kv-disk keeps copies of recurrent states, and the memory has room for the states of running "
            f"sequences only: give two states or more, --state-memory {2 * model.spec.state_bytes}"
        )
    pieces = StatePieces(cache)
    needed = (pieces.numbers.num_pieces + 1) * round_up(pieces.block_bytes)
    if needed > limit_bytes:
        raise ConfigError(
            f"--kv-disk-size {limit_bytes} has no room for one recurrent state of {needed} bytes: give it "
            "some gigabytes"
        )
    return pieces
