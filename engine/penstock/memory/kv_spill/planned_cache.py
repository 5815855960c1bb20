"""The KV cache of a plan: all in memory, or with blocks in a file."""

from __future__ import annotations

from pathlib import Path

from penstock.memory.kv_cache import KVCache
from penstock.memory.kv_spill.spill_file import SpillFile
from penstock.memory.kv_spill.spilled_cache import SpilledKVCache
from penstock.memory.planning.plan import MemoryPlan
from penstock.memory.pools import MemoryPool
from penstock.spec import KVLayout, ModelSpec


def planned_cache(
    spec: ModelSpec, plan: MemoryPlan, folder: str | None, layout: KVLayout, pool: MemoryPool, depth: int
) -> KVCache | SpilledKVCache:
    """Blocks that have no room in memory lie in a file in `folder`, of which `depth` reads are in flight at a
    time. Raises ConfigError if the disk has no room for them, and CapacityError if the pool has none."""
    size, num_spilled = plan.block_size, plan.num_spilled_blocks
    if not num_spilled or folder is None:
        return KVCache(spec, plan.num_kv_blocks, size, layout, pool, plan.num_state_slots)
    num_bytes = num_spilled * size * spec.kv_bytes_per_token(layout)
    file = SpillFile(Path(folder), num_bytes, depth=depth)
    return SpilledKVCache(spec, plan.num_kv_blocks - num_spilled, num_spilled, size, layout, pool, file)
