"""What lies where: pure arithmetic on plain numbers, no device, no clock, no file.

The memory in which layers are computed holds what a step needs at once (head, staging, keys and values,
activations) and as many layers as fit beside them; the others are streamed. A lane with a memory of its own
(a GPU) gets them from pinned host memory or from disk, the processor from disk. Experts, if there are any,
share what the dense layers leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from penstock.config import EngineConfig
from penstock.errors import CapacityError, ConfigError
from penstock.memory.hardware import HardwareProfile
from penstock.memory.pages import round_up
from penstock.spec import ModelFootprint

Home = Literal["device", "host", "disk"]

#: One layer is computed while the next one arrives.
NUM_STAGING_SLOTS = 2
#: Left to others when a budget is "auto": a share of what is free, and at least so much.
SPARE_SHARE, MIN_SPARE_BYTES = 0.1, 512 << 20
#: What a CUDA context takes of the device before anything is allocated.
CUDA_CONTEXT_BYTES = 400 << 20
#: What kernels on a GPU hold beside activations: sums of INT8 products, partial results of attention.
GPU_SCRATCH_BYTES = (32 + 16) << 20
#: Tokens that a sequence is given room for when nobody says how many.
USUAL_TOKENS = 2048
#: When not all layers fit, keys and values take at most this share of the budget, but hold one sequence.
KV_SHARE = 0.125


class TierPlan(NamedTuple):
    """What stays in one of a lane's memories."""

    #: Layers, counted over all stacks in the order of a sweep.
    resident: frozenset[int]
    #: For the layers that don't stay.
    num_slots: int
    num_expert_slots: int = 0


@dataclass(frozen=True)
class LayerPlacement:
    """Where a layer's bytes wait, and whether they stay where they are computed."""

    home: Home
    is_resident: bool
    num_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes are those that will be allocated."""

    layers: tuple[LayerPlacement, ...]
    #: On the host: it is looked up row by row.
    embedding_bytes: int
    #: Where layers are computed; with a copy of the embedding if the head shares it and that is a GPU.
    head_bytes: int
    #: Where layers are computed; and on the host, where layers pass from disk to a GPU.
    num_staging_slots: int
    num_host_slots: int
    staging_slot_bytes: int
    block_size: int
    num_kv_blocks: int
    kv_bytes: int
    #: Activations at the largest step, and rope's tables.
    workspace_bytes: int
    #: Such a step was computed; otherwise it is an upper estimate.
    is_workspace_measured: bool
    has_gpu: bool
    host_budget_bytes: int
    #: 0 without a GPU.
    device_budget_bytes: int
    #: What was traded for what, for people.
    notes: tuple[str, ...] = ()
    #: What will probably not be as planned.
    warnings: tuple[str, ...] = ()
    #: Experts that have room where layers are computed, and on the host where that is a GPU; bytes of one.
    num_expert_slots: int = 0
    num_host_expert_slots: int = 0
    expert_slot_bytes: int = 0

    @property
    def tiers(self) -> tuple[TierPlan, ...]:
        """Of each memory through which layers come; they are computed in the last one."""
        computing = TierPlan(self.resident, self.num_staging_slots, self.num_expert_slots)
        if not self.has_gpu:
            return (computing,)
        return TierPlan(self.at_home("host"), self.num_host_slots, self.num_host_expert_slots), computing

    @property
    def resident(self) -> frozenset[int]:
        return frozenset(index for index, layer in enumerate(self.layers) if layer.is_resident)

    @property
    def num_kv_tokens(self) -> int:
        return self.num_kv_blocks * self.block_size

    def at_home(self, home: Home) -> frozenset[int]:
        return frozenset(index for index, layer in enumerate(self.layers) if layer.home == home)

    def layer_bytes(self, home: Home) -> int:
        """Of the layers of a home."""
        return sum(layer.num_bytes for layer in self.layers if layer.home == home)

    @property
    def streamed_bytes(self) -> int:
        """Per step."""
        return sum(layer.num_bytes for layer in self.layers if not layer.is_resident)

    @property
    def device_used_bytes(self) -> int:
        if not self.has_gpu:
            return 0
        return (
            CUDA_CONTEXT_BYTES + self.head_bytes + self.layer_bytes("device") + self.kv_bytes
            + self.workspace_bytes + self.num_staging_slots * self.staging_slot_bytes
            + self.num_expert_slots * self.expert_slot_bytes
        )  # fmt: skip

    @property
    def host_used_bytes(self) -> int:
        used = self.embedding_bytes + self.layer_bytes("host")
        if self.has_gpu:
            used += self.num_host_expert_slots * self.expert_slot_bytes
            return used + self.num_host_slots * self.staging_slot_bytes
        staging = self.num_staging_slots * self.staging_slot_bytes
        staging += self.num_expert_slots * self.expert_slot_bytes
        return used + self.head_bytes + self.kv_bytes + self.workspace_bytes + staging


def resident_layers(num_layers: int, num_resident: int | None) -> frozenset[int]:
    """Which layers stay in memory, None meaning all: the streamed ones are spread evenly among them, so
    that reading the next streamed layer has the computing of the layers before it to hide behind."""
    if num_resident is None or num_resident >= num_layers:
        return frozenset(range(num_layers))
    num_streamed = num_layers - num_resident
    streamed = {(i * num_layers + num_layers - 1) // num_streamed for i in range(num_streamed)}
    return frozenset(range(num_layers)) - streamed


def plan_memory(
    footprint: ModelFootprint,
    hardware: HardwareProfile,
    config: EngineConfig,
    activation_bytes: int | None = None,
    workspace_factor: float = 1.0,
) -> MemoryPlan:
    """Decide where everything lies. `activation_bytes` is what the largest step takes on the compute device,
    if that was measured; otherwise it is estimated, `workspace_factor` times what the native kernels take.
    Raises CapacityError, which says what is the least that would work, and ConfigError
    for a budget of a device that is not there."""
    if config.device_memory_bytes is not None and not hardware.lane.has_own_memory:
        raise ConfigError("there is no GPU here whose memory --device-memory could limit")
    is_measured = activation_bytes is not None
    if activation_bytes is None:
        activation_bytes = int(workspace_factor * estimate_activations(footprint, config))
    return _Planner(footprint, hardware, config, activation_bytes, is_measured).plan()


def estimate_activations(footprint: ModelFootprint, config: EngineConfig) -> int:
    """An upper estimate of what activations take at the largest step, for models that are not here, with the
    native kernels.

    Per token some eight rows of hidden size (residual, normed, q, k, v, attention's output and integers of
    each) and three of the widest matrix's outputs; per sampled sequence four rows of the vocabulary. The
    native kernels take half to three quarters of it.
    """
    per_token = 4 * (8 * footprint.hidden_size + 3 * footprint.widest_layer)
    per_seq = 4 * 4 * footprint.vocab_size
    return config.max_num_batched_tokens * per_token + config.max_num_seqs * per_seq


def context(footprint: ModelFootprint, config: EngineConfig) -> int:
    """Tokens of the longest sequence, if its keys and values have room."""
    return min(config.max_model_len or footprint.max_position_embeddings, footprint.max_position_embeddings)


class _Planner:
    """One model on one machine."""

    def __init__(
        self,
        footprint: ModelFootprint,
        hardware: HardwareProfile,
        config: EngineConfig,
        activation_bytes: int,
        is_measured: bool,
    ) -> None:
        self.footprint = footprint
        self.hardware = hardware
        self.config = config
        self.block_bytes = footprint.kv_bytes_per_token * config.block_size
        self.sizes = [round_up(size) for size in footprint.layer_bytes]
        self.slot_bytes = max(self.sizes, default=0)
        self.expert_bytes = round_up(footprint.experts.num_bytes)
        self.embedding_bytes = round_up(footprint.embedding_bytes)
        self.lane = lane = hardware.lane
        shared = footprint.shared_head_bytes if lane.has_own_memory else 0
        self.head_bytes = round_up(footprint.head_bytes + shared)
        self.context = context(footprint, config)
        self.is_measured = is_measured
        self.workspace = activation_bytes
        self.workspace += footprint.rope.table_bytes(self.context) if footprint.rope else 0
        self.workspace += GPU_SCRATCH_BYTES if lane.has_own_memory else 0
        self.host_budget = config.host_memory_bytes or _auto(hardware.free_ram_bytes)
        self.device_budget = (config.device_memory_bytes or lane.free_bytes) if lane.has_own_memory else 0
        #: Of the memory in which layers are computed.
        self.budget = self.device_budget if lane.has_own_memory else self.host_budget

    def plan(self) -> MemoryPlan:
        budget = self.budget
        fixed = self.head_bytes + self.workspace
        fixed += CUDA_CONTEXT_BYTES if self.lane.has_own_memory else self.embedding_bytes
        wanted, least = self._kv_blocks_wanted(), self._kv_blocks_least()
        num_blocks = wanted
        config = self.config
        sizes = (config.kv_cache_bytes, config.num_kv_tokens, config.kv_cache_share)
        is_explicit = any(size is not None for size in sizes)
        if not is_explicit and fixed + sum(self.sizes) + wanted * self.block_bytes > budget:
            affordable = int(KV_SHARE * budget) // self.block_bytes
            num_blocks = max(least, min(wanted, affordable))
        num_resident = self._num_resident(budget - fixed - num_blocks * self.block_bytes)
        if num_resident is None and not is_explicit:
            num_blocks = least
            num_resident = self._num_resident(budget - fixed - num_blocks * self.block_bytes)
        left = budget - fixed - num_blocks * self.block_bytes
        if num_resident is None:
            raise self._refusal(budget, fixed + num_blocks * self.block_bytes)
        resident = resident_layers(len(self.sizes), num_resident)
        num_slots = NUM_STAGING_SLOTS if len(resident) < len(self.sizes) else 0
        num_slots = min(num_slots, len(self.sizes) - len(resident))
        rest = left - sum(self.sizes[i] for i in resident) - num_slots * self.slot_bytes
        num_expert_slots = self._num_expert_slots(rest)
        rest -= num_expert_slots * self.expert_bytes
        if not is_explicit:  # what no layer and no expert fits into
            num_blocks = min(wanted, num_blocks + rest // self.block_bytes)
        placements, num_host_slots, num_host_expert_slots = self._place(resident)
        return MemoryPlan(
            layers=placements,
            embedding_bytes=self.embedding_bytes,
            head_bytes=self.head_bytes,
            num_staging_slots=num_slots,
            num_host_slots=num_host_slots,
            staging_slot_bytes=self.slot_bytes if num_slots or num_host_slots else 0,
            block_size=self.config.block_size,
            num_kv_blocks=num_blocks,
            kv_bytes=num_blocks * self.block_bytes,
            workspace_bytes=self.workspace,
            is_workspace_measured=self.is_measured,
            has_gpu=self.lane.has_own_memory,
            host_budget_bytes=self.host_budget,
            device_budget_bytes=self.device_budget,
            notes=tuple(self._notes(budget - fixed, num_blocks, wanted, len(resident))),
            warnings=tuple(self._warnings()),
            num_expert_slots=num_expert_slots,
            num_host_expert_slots=num_host_expert_slots,
            expert_slot_bytes=self.expert_bytes,
        )

    def _kv_blocks_wanted(self) -> int:
        config = self.config
        if config.kv_cache_bytes is not None:
            return config.kv_cache_bytes // self.block_bytes
        if config.kv_cache_share is not None:
            return int(config.kv_cache_share * self.budget) // self.block_bytes
        if config.num_kv_tokens is not None:
            return -(-config.num_kv_tokens // config.block_size)
        tokens = max(config.max_num_seqs * min(self.context, USUAL_TOKENS), self.context)
        return -(-tokens // config.block_size)

    def _kv_blocks_least(self) -> int:
        return -(-(self.config.max_model_len or min(self.context, USUAL_TOKENS)) // self.config.block_size)

    def _num_resident(self, left: int) -> int | None:
        """As many as fit beside the staging slots that the others then need; None if not even those."""
        return next((count for count in self._counts() if self._needed(count) <= left), None)

    def _counts(self) -> range:
        """Numbers of resident layers to choose from, most first."""
        most, forced = len(self.sizes), self.config.num_resident_layers
        return range(most, -1, -1) if forced is None else range(min(forced, most), min(forced, most) - 1, -1)

    def _needed(self, num_resident: int) -> int:
        """Bytes of so many resident layers and of staging for the others."""
        resident = resident_layers(len(self.sizes), num_resident)
        num_slots = min(NUM_STAGING_SLOTS, len(self.sizes) - len(resident))
        experts = self._least_expert_slots() * self.expert_bytes
        return sum(self.sizes[index] for index in resident) + num_slots * self.slot_bytes + experts

    def _least_expert_slots(self) -> int:
        """One expert is computed while the next one arrives."""
        return min(NUM_STAGING_SLOTS, self.footprint.experts.count)

    def _num_expert_slots(self, left: int) -> int:
        """As many as fit. Every sweep needs all dense layers and few of the experts, so those came first."""
        if not self.footprint.experts.count:
            return 0
        return max(self._least_expert_slots(), min(self.footprint.experts.count, left // self.expert_bytes))

    def _place(self, resident: frozenset[int]) -> tuple[tuple[LayerPlacement, ...], int, int]:
        """Homes of all layers, and slots on the host for layers and experts. Raises CapacityError."""
        streamed = [index for index in range(len(self.sizes)) if index not in resident]
        if not self.lane.has_own_memory:
            homes: dict[int, Home] = dict.fromkeys(streamed, "disk")
            homes |= dict.fromkeys(resident, "host")
            return self._placements(homes, resident), 0, 0
        left = min(self.host_budget - self.embedding_bytes, self.lane.pinnable_bytes)
        least_experts = self._least_expert_slots() * self.expert_bytes
        for num_pinned in range(len(streamed), -1, -1):
            pinned = {streamed[i] for i in resident_layers(len(streamed), num_pinned)}
            # The device's resident layers pass through them as well, once.
            num_slots = min(NUM_STAGING_SLOTS, len(self.sizes) - num_pinned)
            rest = left - sum(self.sizes[index] for index in pinned) - num_slots * self.slot_bytes
            if rest >= least_experts:
                homes = {index: "host" if index in pinned else "disk" for index in streamed}
                homes |= dict.fromkeys(resident, "device")
                return self._placements(homes, resident), num_slots, self._num_expert_slots(rest)
        raise self._host_refusal(min(NUM_STAGING_SLOTS, len(self.sizes)) * self.slot_bytes + least_experts)

    def _placements(self, homes: dict[int, Home], resident: frozenset[int]) -> tuple[LayerPlacement, ...]:
        return tuple(
            LayerPlacement(homes[index], index in resident, size) for index, size in enumerate(self.sizes)
        )

    def _refusal(self, budget: int, fixed: int) -> CapacityError:
        least = fixed + min(self._needed(count) for count in self._counts())
        name = "device" if self.lane.has_own_memory else "host"
        return CapacityError(
            f"this model needs at least {least} bytes ({gib(least)}) of {name} memory as it is set up, and "
            f"the budget is {budget} ({gib(budget)}): {gib(fixed)} for embedding, head, activations and keys "
            f"and values, the rest for layers and staging. Raise --{name}-memory, or lower --kv-tokens, "
            "--max-num-batched-tokens or --max-num-seqs"
        )

    def _host_refusal(self, staging: int) -> CapacityError:
        """With a GPU, when not even staging fits into the host."""
        least = self.embedding_bytes + staging
        if self.host_budget >= least:
            return CapacityError(
                f"streaming to the GPU needs at least {staging} bytes ({gib(staging)}) of pinned memory, and "
                f"the system lets this process pin {self.lane.pinnable_bytes}; raise its limit"
            )
        return CapacityError(
            f"this model needs at least {least} bytes ({gib(least)}) of host memory as it is set up, for the "
            f"embedding and staging, and the budget is {self.host_budget} ({gib(self.host_budget)}). Raise "
            "--host-memory"
        )

    def _warnings(self) -> list[str]:
        """A budget beyond what there is ends in swapping, or with the process killed."""
        budgets = [("host", self.host_budget, self.hardware.free_ram_bytes)]
        if self.lane.has_own_memory:
            budgets.append(("device", self.device_budget, self.lane.free_bytes))
        return [
            f"the {name} budget of {gib(budget)} is more than what is free there now, {gib(free)}"
            for name, budget, free in budgets
            if budget > free
        ]

    def _notes(self, left: int, num_blocks: int, wanted: int, num_resident: int) -> list[str]:
        """`left` is what there is for layers, staging, keys and values."""
        notes = []
        size = self.config.block_size
        if num_blocks < wanted:
            notes.append(
                f"keys and values have room for {num_blocks * size} tokens instead of {wanted * size}: "
                "the rest of the memory is for layers; --kv-tokens decides otherwise"
            )
        fewer = max(self._kv_blocks_least(), num_blocks // 2)
        more = (self._num_resident(left - fewer * self.block_bytes) or 0) - num_resident
        if fewer < num_blocks and more > 0:
            notes.append(
                f"{more} more layer{'s' if more > 1 else ''} would stay in memory with --kv-tokens "
                f"{fewer * size} instead of {num_blocks * size}"
            )
        return notes


def _auto(free_bytes: int) -> int:
    return max(0, free_bytes - max(MIN_SPARE_BYTES, int(SPARE_SHARE * free_bytes)))


def gib(num_bytes: float) -> str:
    """For people: GiB, or MiB where there is less than a tenth of one."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:.2f} MiB"
