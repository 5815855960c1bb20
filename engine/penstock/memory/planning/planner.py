"""plan_memory() decides what lies where: pure arithmetic on plain numbers, without a device, a clock or a
file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.config import EngineConfig
from penstock.goes_with import Feature, check_together
from penstock.memory.hardware import HardwareProfile
from penstock.memory.pages import round_up
from penstock.memory.planning.budgets import Budgets
from penstock.memory.planning.cost import Predictor
from penstock.memory.planning.kv_blocks import KVBlocks, context
from penstock.memory.planning.plan import (
    CUDA_CONTEXT_BYTES,
    HANDOVER_BYTES,
    INLET_BYTES,
    Home,
    LayerPlacement,
    MemoryPlan,
    TierPlan,
    gib,
    plane_notes,
    resident_layers,
)
from penstock.memory.planning.state_slots import StateSlots
from penstock.spec import ModelFootprint

if TYPE_CHECKING:
    from penstock.memory.planning.splits_in_ram import AttendsInRam

#: One layer is computed while the next one arrives.
NUM_STAGING_SLOTS = 2
#: What kernels on a GPU hold beside activations: sums of INT8 products, partial results of attention.
GPU_SCRATCH_BYTES = (32 + 16) << 20
#: The inner numbers of adapters: 64 rows of the largest ranks of three modules, for each 1024 of 32768
#: inputs.
ADAPTER_SCRATCH_BYTES = 64 * 3 * 256 * 4 * 32
#: Tokens that an encoder's MLP computes at a time.
ENCODER_ROWS = 512
#: The note of a plan for a model that no family of our own computes.
FOREIGN = (
    "the layers are computed by transformers' modules, with our products and attention in them; whether a "
    "request gets the same bits in any company is tried when the model is loaded (GET /v1/models)"
)


def plan_memory(
    footprint: ModelFootprint,
    hardware: HardwareProfile,
    config: EngineConfig,
    activation_bytes: int | None = None,
    workspace_factor: float = 1.0,
) -> MemoryPlan:
    """Decide where everything lies. `activation_bytes` is what the largest step takes on the compute device,
    if this was measured; otherwise activations are estimated, as `workspace_factor` times what the native
    kernels take. Raises CapacityError, which says the least budget that would work, and ConfigError for
    features that can't be used together, or with this model or machine."""
    machine = Feature.GPU if hardware.lane.has_own_memory else Feature.NO_GPU
    check_together(config.features | footprint.features | {machine})
    is_measured = activation_bytes is not None
    if activation_bytes is None:
        activation_bytes = int(workspace_factor * estimate_activations(footprint, config))

    def make_plan(size: ModelFootprint, more_bytes: int) -> MemoryPlan:
        return _Planner(size, hardware, config, activation_bytes + more_bytes, is_measured).plan()

    plan = make_plan(footprint, 0)
    if machine is Feature.GPU:
        from penstock.memory.planning.two_lanes import with_processor

        plan = with_processor(plan, Predictor(footprint, hardware, config), make_plan)
    return plan if footprint.implementation == "penstock" else replace(plan, notes=(FOREIGN, *plan.notes))


def estimate_activations(footprint: ModelFootprint, config: EngineConfig) -> int:
    """An upper estimate of what activations take at the largest step with the native kernels, for models
    whose files are not here.

    A token takes some eight rows of hidden size (residual, normed, q, k, v, attention's output and integers
    of each) and three rows of the widest matrix's outputs; a sampled sequence takes four rows of the
    vocabulary. The native kernels take half to three quarters of this estimate.

    An encoder has the longest input in memory at once. Only its MLP computes ENCODER_ROWS tokens at a time,
    and one row of the widest matrix is enough for attention.
    """
    hidden, widest = 4 * 8 * footprint.hidden_size, 4 * footprint.widest_layer
    activations = config.max_num_batched_tokens * (hidden + 3 * widest)
    if footprint.num_encoder_layers:
        num_encoded = max(config.max_num_batched_tokens, context(footprint, config))
        activations = max(activations, num_encoded * (hidden + widest) + ENCODER_ROWS * 2 * widest)
    return activations + config.max_num_seqs * 4 * 4 * footprint.vocab_size


def _attends_in_ram(
    footprint: ModelFootprint, hardware: HardwareProfile, config: EngineConfig
) -> AttendsInRam | None:
    """How the processor attends to keys and values in RAM beside a card, if there are any. Torch's kernels
    leave nothing to it."""
    lane = hardware.lane
    if not lane.has_own_memory or config.kernels not in ("auto", "native"):
        return None
    from penstock.memory.planning.splits_in_ram import AttendsInRam, ram_share

    share = ram_share(hardware.memory_read_gbps, lane.link_gbps)
    return AttendsInRam.of(footprint.attended_heads, config.block_size, share)


class _Layers:
    """A model's layers and experts in whole pages, and the tiers that fit into so many bytes."""

    def __init__(self, footprint: ModelFootprint, num_forced: int | None) -> None:
        """`num_forced` layers stay, if the config says how many."""
        self.sizes = [round_up(size) for size in footprint.layer_bytes]
        #: A staging slot holds any layer.
        self.slot_bytes = max(self.sizes, default=0)
        self.expert_bytes = round_up(footprint.experts.num_bytes)
        self._num_experts = footprint.experts.count
        self.num_encoder_layers, self.num_cross = footprint.num_encoder_layers, footprint.num_cross_units
        self.lower_planes, self.is_split = footprint.lower_planes, footprint.is_split
        most = len(self.sizes)
        # As many planes stay as that number of layers has.
        forced = most if num_forced is None else min(num_forced * most // max(1, footprint.num_layers), most)
        counts = range(most, -1, -1) if num_forced is None else (forced,)
        if self.is_split:  # what a card keeps, and nothing of the rest
            counts = (len(self.lower_planes),)
        #: Sets of resident layers to choose from, the largest first.
        self._choices = [
            resident_layers(most, count, self.num_encoder_layers, self.lower_planes) for count in counts
        ]

    @property
    def least_bytes(self) -> int:
        """Bytes of the smallest tier that will do."""
        return min(map(self.bytes_around, self._choices))

    def bytes_around(self, resident: frozenset[int]) -> int:
        """Bytes of the smallest tier in which the `resident` layers stay."""
        return self.tier_bytes(TierPlan(resident, self._num_slots(resident), self._least_expert_slots))

    def tier_bytes(self, tier: TierPlan) -> int:
        layers = sum(self.sizes[index] for index in tier.resident)
        return layers + tier.num_slots * self.slot_bytes + tier.num_expert_slots * self.expert_bytes

    def tier(self, resident: frozenset[int], room: int) -> TierPlan | None:
        """The tier in which the `resident` layers stay. The other layers pass through staging slots, and as
        many experts as fit have slots: every sweep needs all dense layers and few of the experts. None if
        `room` bytes are too few."""
        rest = room - self.bytes_around(resident)
        if rest < 0:
            return None
        num_expert_slots = self._least_expert_slots
        if self._num_experts:
            num_expert_slots = min(self._num_experts, num_expert_slots + rest // self.expert_bytes)
        return TierPlan(resident, self._num_slots(resident), num_expert_slots)

    def best_tier(self, room: int) -> TierPlan | None:
        """The tier in which most layers stay. None if `room` bytes are too few for any."""
        return self._first(self._choices, room)

    def pinned_tier(self, streamed: Sequence[int], room: int) -> TierPlan | None:
        """The tier that feeds a GPU and keeps as many as possible of the `streamed` layers. The layers that
        the GPU keeps pass through this tier once."""
        num_encoder = sum(index < self.num_encoder_layers for index in streamed)
        lower = [place for place, index in enumerate(streamed) if index in self.lower_planes]
        choices = (
            frozenset(streamed[index] for index in resident_layers(len(streamed), count, num_encoder, lower))
            for count in range(len(streamed), -1, -1)
        )
        return self._first(choices, room)

    def _first(self, choices: Iterable[frozenset[int]], room: int) -> TierPlan | None:
        tiers = (self.tier(resident, room) for resident in choices)
        return next((tier for tier in tiers if tier is not None), None)

    def _num_slots(self, resident: frozenset[int]) -> int:
        """A layer of which both planes are streamed takes two slots."""
        streamed = [index for index in range(len(self.sizes)) if index not in resident]
        planes = (
            2 if self.lower_planes and not self.is_split and not self.lower_planes.issuperset(streamed) else 1
        )
        return min(NUM_STAGING_SLOTS * planes, len(streamed))

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers and experts."""
        return sum(self.sizes) + self._num_experts * self.expert_bytes

    @property
    def _least_expert_slots(self) -> int:
        """One expert is computed while the next one arrives."""
        return min(NUM_STAGING_SLOTS, self._num_experts)


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
        self.config = config
        self.budgets, self.hardware_notes = Budgets(hardware, config), hardware.notes
        self.has_gpu = self.budgets.lane.has_own_memory
        self.layers = _Layers(footprint, config.num_resident_layers)
        self.kv = KVBlocks(footprint, config, self.budgets.computing, self.has_gpu)
        self.kv_host_bytes = self.kv.host_bytes()
        self.attends_in_ram = _attends_in_ram(footprint, hardware, config)
        self.embedding_bytes = round_up(footprint.embedding_bytes)
        shared = footprint.shared_head_bytes if self.has_gpu else 0
        self.head_bytes = round_up(footprint.head_bytes + shared)
        self.is_measured = is_measured
        self.workspace = activation_bytes
        longest = context(footprint, config)
        self.workspace += sum(rope.table_bytes(longest) for rope in footprint.ropes)
        self.workspace += GPU_SCRATCH_BYTES if self.has_gpu else 0
        self.adapter_bytes = round_up(config.adapter_bytes or 0)
        self.workspace += ADAPTER_SCRATCH_BYTES if self.adapter_bytes else 0
        #: What lies beside layers, keys and values in the memory in which layers are computed.
        self.fixed = self.head_bytes + self.workspace + self.adapter_bytes
        self.fixed += CUDA_CONTEXT_BYTES if self.has_gpu else self.embedding_bytes
        self.states = StateSlots.of(footprint, config, self.budgets.computing)
        self.fixed += self.states.num_bytes
        self.room = self.budgets.computing - self.fixed

    def plan(self) -> MemoryPlan:
        num_blocks, tier = self._search()
        if not self.kv.is_explicit:  # room for which every layer and expert is too large
            rest = self.room - self.kv.num_bytes(num_blocks) - self.layers.tier_bytes(tier)
            num_blocks = min(self.kv.wanted, num_blocks + rest // self.kv.block_bytes)
        num_spilled = self.kv.num_spilled(num_blocks)
        kv_spill_bytes = self.kv.spilled_host_bytes(num_spilled)
        attends = self.attends_in_ram if kv_spill_bytes else None
        crossing = INLET_BYTES + (HANDOVER_BYTES if attends else 0)
        host = TierPlan(frozenset(), 0)
        if self.has_gpu:
            host = self._host_tier(tier, kv_spill_bytes, crossing)
        return MemoryPlan(
            layers=self._placements(tier, host),
            embedding_bytes=self.embedding_bytes,
            head_bytes=self.head_bytes,
            num_staging_slots=tier.num_slots,
            num_host_slots=host.num_slots,
            staging_slot_bytes=self.layers.slot_bytes if tier.num_slots or host.num_slots else 0,
            block_size=self.config.block_size,
            num_kv_blocks=num_blocks + num_spilled,
            kv_bytes=self.kv.num_bytes(num_blocks),
            workspace_bytes=self.workspace,
            is_workspace_measured=self.is_measured,
            has_gpu=self.has_gpu,
            host_budget_bytes=self.budgets.host,
            device_budget_bytes=self.budgets.device,
            notes=tuple(
                [
                    *self._notes(num_blocks, len(tier.resident)),
                    *self.states.notes(self.config),
                    *self._plane_notes(tier.resident),
                    *self.hardware_notes,
                ]
            ),
            warnings=tuple(self.budgets.warnings()),
            num_expert_slots=tier.num_expert_slots,
            num_host_expert_slots=host.num_expert_slots,
            expert_slot_bytes=self.layers.expert_bytes,
            num_encoder_layers=self.layers.num_encoder_layers,
            num_cross_layers=self.layers.num_cross,
            state_bytes=self.states.num_bytes,
            num_state_slots=self.states.num_slots,
            num_state_sequences=self.states.num_sequences,
            guess_room=self.states.guesses,
            adapter_bytes=self.adapter_bytes,
            kv_host_bytes=self.kv_host_bytes,
            num_spilled_blocks=num_spilled,
            kv_spill_bytes=kv_spill_bytes,
            attends_in_ram=attends,
        )

    def _plane_notes(self, resident: frozenset[int]) -> list[str]:
        planes = frozenset[int]() if self.layers.is_split else self.layers.lower_planes
        return plane_notes(len(self.layers.sizes), planes, resident)

    def _search(self) -> tuple[int, TierPlan]:
        """Blocks of keys and values, and the tier beside them. Raises CapacityError."""
        num_blocks = 0
        for num_blocks in self.kv.choices(self.room, self.layers.num_bytes):
            tier = self._tier_beside(num_blocks)
            if tier is not None:
                return num_blocks, tier
        raise self.budgets.refusal(self.fixed + self.kv.num_bytes(num_blocks), self.layers.least_bytes)

    def _tier_beside(self, num_blocks: int) -> TierPlan | None:
        return self.layers.best_tier(self.room - self.kv.num_bytes(num_blocks))

    def _host_tier(self, device: TierPlan, kv_spill_bytes: int, crossing: int) -> TierPlan:
        """What waits in pinned memory for a GPU that has the tier `device`. Keys and values are pinned, too,
        as far as the least of the layers leaves room: layers can't be copied from anywhere else. `crossing`:
        pinned bytes of the ways to the GPU and back. Raises CapacityError."""
        streamed = [index for index in range(len(self.layers.sizes)) if index not in device.resident]
        beside = self.embedding_bytes + self.kv_host_bytes + kv_spill_bytes + crossing
        least, pinnable = self.layers.bytes_around(frozenset()), self.budgets.lane.pinnable_bytes - crossing
        room = min(self.budgets.host - beside, pinnable, max(least, pinnable - kv_spill_bytes))
        tier = self.layers.pinned_tier(streamed, room)
        if tier is None:
            raise self.budgets.host_refusal(beside, least)
        return tier

    def _placements(self, tier: TierPlan, host: TierPlan) -> tuple[LayerPlacement, ...]:
        homes: dict[int, Home] = dict.fromkeys(host.resident, "host")
        homes |= dict.fromkeys(tier.resident, "device" if self.has_gpu else "host")
        return tuple(
            LayerPlacement(
                homes.get(index, "disk"), index in tier.resident, size, index in self.layers.lower_planes
            )
            for index, size in enumerate(self.layers.sizes)
        )

    def _notes(self, num_blocks: int, num_resident: int) -> list[str]:
        notes, size, kv = [], self.config.block_size, self.kv
        if spilled := kv.num_spilled(num_blocks):
            where = "on disk" if not kv.spilled_host_bytes(spilled) else "in RAM"
            flag = "--kv-spill: a step reads" if where == "on disk" else "--kv-spill-memory: a step copies"
            notes.append(
                f"keys and values of {spilled * size} of {(num_blocks + spilled) * size} tokens lie {where} "
                f"({gib(spilled * kv.block_bytes)}, {flag} those of its sequences)"
            )
        elif num_blocks < kv.wanted:
            notes.append(
                f"keys and values have room for {num_blocks * size} tokens instead of {kv.wanted * size}: "
                "the rest of the memory is for layers; --kv-tokens decides otherwise"
            )
        fewer = max(1 if spilled else kv.least, num_blocks // 2)
        tier = self._tier_beside(fewer)
        more = len(tier.resident) - num_resident if tier is not None else 0
        if fewer < num_blocks and more > 0:
            kind = "plane" if self.layers.lower_planes else "layer"
            notes.append(
                f"{more} more {kind}{'s' if more > 1 else ''} would stay in memory with --kv-tokens "
                f"{fewer * size} instead of {num_blocks * size}"
            )
        return notes
