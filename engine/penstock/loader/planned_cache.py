"""The KV cache of a plan: all in the memory in which layers are computed, or with blocks in a file or in RAM
beside a card."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cache.kv_cache import KVCache
from penstock.memory.lane import Lane
from penstock.memory.planning.plan import MemoryPlan
from penstock.memory.pools import MemoryPool, whole_lines
from penstock.spec import KVLayout, ModelSpec

if TYPE_CHECKING:
    from penstock.cache.spill.spilled_cache import SpilledKVCache


def planned_cache(
    spec: ModelSpec, plan: MemoryPlan, folder: str | None, layout: KVLayout, lane: Lane, depth: int
) -> KVCache | SpilledKVCache:
    """Blocks that have no room where layers are computed lie in the host's memory beside a card, or else in a
    file in `folder`, of which `depth` reads are in flight at a time. Raises ConfigError if the disk has no
    room for them, and CapacityError if a memory has none."""
    size, num_spilled = plan.block_size, plan.num_spilled_blocks
    pool = MemoryPool("KV cache", whole_lines(plan.kv_bytes) + plan.state_bytes, lane.allocate)
    num_resident = plan.num_kv_blocks - num_spilled
    if plan.kv_spill_bytes:
        from penstock.cache.spill.link_turns import LinkTurns
        from penstock.cache.spill.spill_memory import SpillMemory
        from penstock.cache.spill.spilled_cache import SpilledKVCache

        memory = SpillMemory(plan.kv_spill_bytes, lane.memories[0], lane.link)
        turns = partial(LinkTurns, memory)
        return SpilledKVCache(spec, num_resident, num_spilled, size, layout, pool, memory, turns)
    if not num_spilled or folder is None:
        num_states, guesses = plan.num_state_slots, plan.guess_room
        return KVCache(spec, plan.num_kv_blocks, size, layout, pool, num_states, guesses=guesses)
    from penstock.cache.spill.layer_turns import LayerTurns
    from penstock.cache.spill.spill_file import SpillFile
    from penstock.cache.spill.spilled_cache import SpilledKVCache

    file = SpillFile(Path(folder), num_spilled * size * spec.kv_bytes_per_token(layout), depth=depth)
    return SpilledKVCache(
        spec, num_resident, num_spilled, size, layout, pool, file, partial(LayerTurns, file)
    )
