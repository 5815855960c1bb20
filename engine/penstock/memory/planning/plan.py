"""MemoryPlan: what lies where, to the byte. Plain numbers, which planner.py decides.

The memory in which layers are computed holds what a step needs at once (head, staging, keys and values,
activations) and as many layers as fit beside them. The other layers are streamed: to a lane with a memory of
its own (a GPU) from pinned host memory or from disk, to the processor from disk. Experts, if there are any,
share what the dense layers leave.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from penstock.state_layout import NO_ROOM, GuessRoom

if TYPE_CHECKING:
    from penstock.memory.planning.splits_in_ram import AttendsInRam

Home = Literal["device", "host", "disk"]

#: What a CUDA context takes of the device before anything is allocated.
CUDA_CONTEXT_BYTES = 400 << 20
#: Pinned memory through which a card and the processor hand activations and results to each other.
HANDOVER_BYTES = 16 << 20
#: Pinned memory through which a step's inputs come to a card.
INLET_BYTES = 1 << 20


class TierPlan(NamedTuple):
    """What stays in one of a lane's memories, and the slots for the rest."""

    #: Dense units (layers, or planes of layers), counted over all stacks in the order of a sweep.
    resident: frozenset[int]
    #: Staging slots for the layers that don't stay.
    num_slots: int
    num_expert_slots: int = 0


@dataclass(frozen=True)
class LayerPlacement:
    """Where a layer's bytes wait, and whether they stay where they are computed."""

    home: Home
    is_resident: bool
    num_bytes: int
    #: These are the lower planes of the layer before.
    is_lower: bool = False


@dataclass(frozen=True)
class MemoryPlan:
    """All bytes are bytes that will be allocated."""

    #: Each layer; a layer whose lower planes lie apart has a second placement for these.
    layers: tuple[LayerPlacement, ...]
    #: The embedding lies on the host, where its rows are looked up.
    embedding_bytes: int
    #: Where layers are computed. On a GPU, a head that shares the embedding is a copy of it.
    head_bytes: int
    #: Slots where layers are computed.
    num_staging_slots: int
    #: Slots on the host, for layers on their way from disk to a GPU.
    num_host_slots: int
    staging_slot_bytes: int
    block_size: int
    #: Blocks of keys and values, spilled ones included.
    num_kv_blocks: int
    #: What they take of the memory in which layers are computed.
    kv_bytes: int
    #: Activations at the largest step, and rope's tables.
    workspace_bytes: int
    #: The largest step was computed and its memory measured; otherwise `workspace_bytes` is an upper
    #: estimate.
    is_workspace_measured: bool
    has_gpu: bool
    host_budget_bytes: int
    #: 0 without a GPU.
    device_budget_bytes: int
    #: For people: what was traded for what.
    notes: tuple[str, ...] = ()
    #: For people: what will probably not be as planned.
    warnings: tuple[str, ...] = ()
    #: Experts that have room where layers are computed.
    num_expert_slots: int = 0
    #: Experts that have room on the host, on their way to a GPU.
    num_host_expert_slots: int = 0
    expert_slot_bytes: int = 0
    #: The first so many of `layers` are swept once for each request, the others in each step.
    num_encoder_layers: int = 0
    #: The last so many of these are the projections that make keys and values of the encoded input for the
    #: decoder's cross-attention.
    num_cross_layers: int = 0
    #: Recurrent states, where layers are computed; 0 for models without.
    state_bytes: int = 0
    #: How many states these are, and how many of their sequences run at a time.
    num_state_slots: int = 0
    num_state_sequences: int = 0
    #: Room for guesses, in `state_bytes`.
    guess_room: GuessRoom = NO_ROOM
    #: Adapters (LoRA), on the host.
    adapter_bytes: int = 0
    #: A card and the processor share the products: the card keeps this share of each matrix's output channels
    #: in its memory. Each layer of a step has two placements then: what is kept, and the rest. None: layers
    #: are computed by the card alone, or there is none.
    kept_share: float | None = None
    #: The card keeps all upper planes beside that share: they guess.
    keeps_upper: bool = False
    #: The host's memory for blocks of keys and values that have left a GPU's.
    kv_host_bytes: int = 0
    #: Experts that lie in RAM are computed by the processor, at once with a card, unless moving them is
    #: faster.
    shares_experts: bool = False
    #: Hidden states of a model, on the host, of which a head that came with it or was trained for it guesses.
    heard_bytes: int = 0
    #: The last so many blocks of keys and values lie elsewhere, and come to where layers are computed when a
    #: layer needs them: on disk, or beside a GPU in the host's memory.
    num_spilled_blocks: int = 0
    #: The host's memory for these; 0: they lie on disk, or there are none.
    kv_spill_bytes: int = 0
    #: How the processor attends to these beside a card; None: it does not.
    attends_in_ram: AttendsInRam | None = None

    @property
    def tiers(self) -> tuple[TierPlan, ...]:
        """One tier for each memory through which layers come. Layers are computed in the last one."""
        computing = TierPlan(self.resident, self.num_staging_slots, self.num_expert_slots)
        if not self.has_gpu:
            return (computing,)
        return TierPlan(self.at_home("host"), self.num_host_slots, self.num_host_expert_slots), computing

    @property
    def resident(self) -> frozenset[int]:
        return frozenset(index for index, layer in enumerate(self.layers) if layer.is_resident)

    @property
    def num_resident_layers(self) -> int:
        """Layers of which everything stays where they are computed."""
        streamed = {self._layer_of(index) for index in range(len(self.layers)) if index not in self.resident}
        return sum(not layer.is_lower for layer in self.layers) - len(streamed)

    def _layer_of(self, index: int) -> int:
        """The place of the layer to which a placement belongs."""
        return index - 1 if self.layers[index].is_lower else index

    @property
    def num_kv_tokens(self) -> int:
        return self.num_kv_blocks * self.block_size

    @property
    def num_spilled_tokens(self) -> int:
        """Tokens whose keys and values have no room where layers are computed."""
        return self.num_spilled_blocks * self.block_size

    def at_home(self, home: Home) -> frozenset[int]:
        return frozenset(index for index, layer in enumerate(self.layers) if layer.home == home)

    def layer_bytes(self, home: Home) -> int:
        """Bytes of the layers of a home."""
        return sum(layer.num_bytes for layer in self.layers if layer.home == home)

    @property
    def step_layers(self) -> tuple[LayerPlacement, ...]:
        """The layers that each step sweeps."""
        return self.layers[self.num_encoder_layers :]

    @property
    def streamed_bytes(self) -> int:
        """Bytes of layers that each step streams."""
        return sum(layer.num_bytes for layer in self.step_layers if not layer.is_resident)

    @property
    def device_used_bytes(self) -> int:
        if not self.has_gpu:
            return 0
        return (
            CUDA_CONTEXT_BYTES + self.head_bytes + self.layer_bytes("device") + self.kv_bytes
            + self.state_bytes + self.workspace_bytes + self.num_staging_slots * self.staging_slot_bytes
            + self.num_expert_slots * self.expert_slot_bytes
        )  # fmt: skip

    @property
    def has_handover(self) -> bool:
        """Whether a card hands work over to the processor: products, experts, or keys and values in RAM."""
        shares = self.kept_share is not None or self.shares_experts
        return self.has_gpu and (shares or self.attends_in_ram is not None)

    @property
    def attended_share(self) -> float:
        """The share of keys and values in RAM beside a card to which the processor attends there."""
        return 0.0 if self.attends_in_ram is None else self.attends_in_ram.share

    @property
    def host_used_bytes(self) -> int:
        used = self.embedding_bytes + self.layer_bytes("host") + self.adapter_bytes + self.kv_host_bytes
        used += self.heard_bytes + self.kv_spill_bytes
        if self.has_gpu:
            used += INLET_BYTES
            used += HANDOVER_BYTES if self.has_handover else 0
            used += self.num_host_expert_slots * self.expert_slot_bytes
            return used + self.num_host_slots * self.staging_slot_bytes
        staging = self.num_staging_slots * self.staging_slot_bytes
        staging += self.num_expert_slots * self.expert_slot_bytes
        return used + self.head_bytes + self.kv_bytes + self.state_bytes + self.workspace_bytes + staging


def resident_layers(
    num_layers: int,
    num_resident: int | None,
    num_encoder: int = 0,
    lower_planes: Collection[int] = (),
) -> frozenset[int]:
    """Which layers stay in memory; `num_resident` None means all. The streamed layers are spread evenly among
    the others, so that reading a streamed layer hides behind the computing of the layers before it.

    The first `num_encoder` layers are an encoder's: a request sweeps them once, and the decoder's layers for
    each of its tokens. So an encoder's layer stays only if all layers of the decoder do.

    Lower planes count as layers, and a lower plane stays only if all upper ones do. A step streams the same
    bytes whichever planes stay, and the upper planes of all layers are a model by themselves."""
    num_left = num_layers if num_resident is None else min(num_resident, num_layers)
    resident: set[int] = set()
    for places in (range(num_encoder, num_layers), range(num_encoder)):
        upper = [index for index in places if index not in lower_planes]
        lower = [index for index in places if index in lower_planes]
        for kind in (upper, lower):
            kept = _spread(len(kind), min(num_left, len(kind)))
            resident |= {kind[index] for index in kept}
            num_left -= len(kept)
    return frozenset(resident)


def _spread(num_layers: int, num_resident: int) -> set[int]:
    """So many resident layers, with the others spread evenly among them."""
    num_streamed = num_layers - num_resident
    streamed = {(i * num_layers + num_layers - 1) // num_streamed for i in range(num_streamed)}
    return set(range(num_layers)) - streamed


def plane_notes(num_units: int, lower_planes: frozenset[int], resident: frozenset[int]) -> list[str]:
    """Which planes of a model stay in memory, for people. [] for a model without planes, or if all stay."""
    streamed, num_lower = frozenset(range(num_units)) - resident, len(lower_planes)
    if not lower_planes or not streamed:
        return []
    if streamed <= lower_planes:
        return [
            f"the upper planes of all layers stay in memory, and {len(streamed)} of {num_lower} lower planes "
            "are streamed"
        ]
    return [
        f"{len(streamed - lower_planes)} of {num_units - num_lower} upper planes don't fit, and are "
        "streamed with the lower ones"
    ]


def gib(num_bytes: float) -> str:
    """For people: GiB, or a smaller unit for less than a tenth of the larger one."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size / 10:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 2**10:.2f} KiB"
