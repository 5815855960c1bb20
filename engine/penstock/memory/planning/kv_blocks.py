"""KVBlocks: how many blocks of keys and values have room, and how many are spilled: to a disk, or beside a
GPU to the host's memory. Pure.

A spilled block takes memory where layers are computed, too: while a layer is computed, its blocks lie in one
slot, and those of the next layer arrive in another. With 48 layers that is a 24th of what the block would
take there."""

from __future__ import annotations

import math

from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.goes_with import Feature, refused
from penstock.memory.pages import PAGE, round_up
from penstock.memory.planning.plan import MemoryPlan
from penstock.spec import ModelFootprint, ModelSpec

#: Tokens that a sequence is given room for when nobody says how many.
USUAL_TOKENS = 2048
#: When not all layers fit, keys and values take at most this share of the budget, but have room for at least
#: one sequence, or for what is not spilled.
KV_SHARE = 0.125
#: Slots through which a layer's spilled blocks pass.
NUM_SPILL_SLOTS = 2


def context(footprint: ModelFootprint, config: EngineConfig) -> int:
    """Tokens of the longest sequence, if its keys and values have room."""
    return min(config.max_model_len or footprint.max_position_embeddings, footprint.max_position_embeddings)


def num_together(plan: MemoryPlan, longest: int, config: EngineConfig) -> int:
    """Sequences of the usual length, or of the `longest` one, that a plan lets run at a time."""
    by_tokens = plan.num_kv_tokens // min(longest, USUAL_TOKENS)
    by_states = plan.num_state_sequences or config.max_num_seqs
    return max(1, min(config.max_num_seqs, by_tokens, by_states))


def check_context(config: EngineConfig, model: ModelSpec | ModelFootprint) -> None:
    """Raises ConfigError for a context that is longer than the model's."""
    longest = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; the model was made for {longest} positions"
        )


class KVBlocks:
    """How many blocks a plan tries."""

    def __init__(
        self, footprint: ModelFootprint, config: EngineConfig, budget: int, has_gpu: bool = False
    ) -> None:
        """Raises ConfigError if the config asks for spilled blocks, and the model can't have any."""
        self.block_bytes = footprint.kv_bytes_per_token * config.block_size
        self._config = config
        self._context = context(footprint, config)
        self._budget = budget
        sizes = (config.kv_cache_bytes, config.num_kv_tokens, config.kv_cache_share)
        #: The config says how many blocks, and layers get what is left.
        self.is_explicit = any(size is not None for size in sizes)
        #: Blocks that may lie in the host's memory beside a GPU.
        self._num_in_ram = self._blocks_in_ram()
        #: Blocks that are of any use, spilled ones included: one sequence's, or in RAM those of all. 0: none
        #: are spilled.
        self._useful = self._blocks(self._context) if config.spill_folder is not None else 0
        if self._num_in_ram:
            self._useful = config.max_num_seqs * self._blocks(self._context)
        #: What one spilled block takes where layers are computed.
        self._slot_bytes = NUM_SPILL_SLOTS * self.block_bytes // max(1, footprint.num_layers)
        self.wanted = self._wanted()
        #: Blocks of one sequence.
        self.least = self._blocks(config.max_model_len or min(self._context, USUAL_TOKENS))
        if self._useful and not self._num_in_ram and (trouble := self._trouble(footprint, has_gpu)):
            if config.kv_spill is not None or (self.is_explicit and self.wanted < self._useful):
                raise ConfigError(trouble)
            self._useful = 0  # the folder is there for another purpose, --kv-disk

    def num_bytes(self, num_blocks: int) -> int:
        """Bytes that so many blocks take where layers are computed, and the slots of the spilled ones."""
        return num_blocks * self.block_bytes + self.num_spilled(num_blocks) * self._slot_bytes

    def num_spilled(self, num_blocks: int) -> int:
        """Spilled blocks, beside so many where layers are computed."""
        more = max(0, self._useful - num_blocks)
        return min(more, self._num_in_ram) if self._num_in_ram else more

    def spilled_host_bytes(self, num_spilled: int) -> int:
        """Bytes of the host's memory that so many spilled blocks take: whole pages; 0 for blocks on disk."""
        return round_up(num_spilled * self.block_bytes) if self._num_in_ram else 0

    def host_bytes(self) -> int:
        """Bytes of the host's memory for blocks of a GPU: whole blocks, of whole pages. Raises ConfigError
        if there is no room for one."""
        asked, each = self._config.kv_host_bytes, round_up(self.block_bytes)
        if asked is None:
            return 0
        if asked < each:
            raise ConfigError(f"--kv-host-memory {asked} has no room for one block of {each} bytes")
        return asked // each * each

    def choices(self, room: int, layer_bytes: int) -> tuple[int, ...]:
        """Numbers of blocks in memory to try in this order, where layers, keys and values have `room`
        bytes."""
        if self.is_explicit:
            return (self.wanted,)
        if layer_bytes + self.num_bytes(self.wanted) <= room:
            return self.wanted, self.least
        affordable = self._affordable(int(KV_SHARE * self._budget))
        some = max(1, min(self.wanted, affordable))
        if self._config.kv_spill is not None or self._num_in_ram:
            needed = max(1, self.least - self._num_in_ram) if self._num_in_ram else 1
            return max(some, needed), max(some // 4, needed), needed
        return max(self.least, some), self.least, *((some, 1) if self._useful else ())

    def _wanted(self) -> int:
        config = self._config
        if config.kv_cache_bytes is not None:
            return self._affordable(config.kv_cache_bytes)
        if config.kv_cache_share is not None:
            return self._affordable(int(config.kv_cache_share * self._budget))
        if config.num_kv_tokens is not None:
            return self._blocks(config.num_kv_tokens)
        return self._blocks(max(config.max_num_seqs * min(self._context, USUAL_TOKENS), self._context))

    def _affordable(self, num_bytes: int) -> int:
        """Blocks in memory for so many bytes, in which the slots have room, too: the most for which
        num_bytes() is no more."""
        all_in_memory = num_bytes // self.block_bytes
        if all_in_memory >= self._useful:
            return all_in_memory
        left = num_bytes - self._useful * self._slot_bytes
        beside_all = left // max(1, self.block_bytes - self._slot_bytes)
        beside_ram = (num_bytes - self._num_in_ram * self._slot_bytes) // self.block_bytes
        return max(1, beside_all, beside_ram if self._num_in_ram else 0)

    def _blocks_in_ram(self) -> int:
        """How many blocks --kv-spill-memory has room for; 0 where it is not given. Raises ConfigError."""
        asked = self._config.kv_spill_bytes
        if asked is None:
            return 0
        if asked < self.block_bytes:
            raise ConfigError(
                f"--kv-spill-memory {asked} has no room for one block of {self.block_bytes} bytes"
            )
        return asked // self.block_bytes

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.block_size)

    def _trouble(self, footprint: ModelFootprint, has_gpu: bool) -> str:
        """Why the model's blocks can't lie on disk; "": they can."""
        kinds = footprint.features | {Feature.GPU if has_gpu else Feature.NO_GPU}
        if trouble := refused({Feature.KV_SPILL, *kinds}):
            return trouble[0]
        sizes = footprint.kv_part_bytes
        if any(size * self._config.block_size % PAGE for size in sizes):
            least = math.lcm(16, *(PAGE // math.gcd(PAGE, size) for size in sizes))
            return f"--kv-spill: a layer's block has to be pages of {PAGE} bytes: pass --block-size {least}"
        return ""
