"""StepWork: what each feature of a step brings, at the limits of a machine. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from penstock.memory.hardware import HardwareProfile
from penstock.memory.planning.plan import LayerPlacement, MemoryPlan
from penstock.memory.planning.product_times import recurrence_s
from penstock.memory.planning.work import Work
from penstock.spec import ModelFootprint

if TYPE_CHECKING:
    from penstock.memory.planning.expert_demand import ExpertDemand, ExpertWindow
    from penstock.memory.planning.split_cost import SplitWork

#: What waits until missing experts have come.
EXPERTS = "experts"


class StepLoad(NamedTuple):
    """What a step has to do: `num_tokens` tokens, of which `num_sampled` are sampled."""

    num_tokens: int
    num_sampled: int
    #: Tokens of the prompts that the step encodes, together.
    num_encoded: int = 0
    #: The experts that the step asked for, if they are known.
    demand: ExpertDemand | None = None
    #: Keys and values that come from elsewhere or go there: over a GPU's link, or from the disk of the
    #: weights or, if they have one, a disk of their own. Writing is taken for as fast as reading.
    spilled_bytes: int = 0
    #: Keys and values to which the processor attends beside a GPU, where they lie (SpilledKeys.parts()).
    attended_bytes: int = 0
    #: A card computes all products of dense layers, whatever the plan says.
    is_alone: bool = False
    #: Paths of guesses in a model with recurrent states: each goes on from a copy of its sequence's states.
    num_paths: int = 0

    @classmethod
    def decode(cls, num_tokens: int) -> StepLoad:
        """So many tokens, all of which are sampled."""
        return cls(num_tokens, num_tokens)


def rates_of(hardware: HardwareProfile) -> dict[str, float]:
    """Resource -> bytes or operations a second; 0: not known. RAM is the host's memory where the lane has one
    of its own, and the processor then reads weights, keys and values from there."""
    lane, disk, spill_disk = hardware.lane, hardware.disk, hardware.spill_disk
    rates = {
        "memory": lane.memory_gbps,
        "arithmetic": lane.int8_gops,
        "disk": disk.read_gbps if disk else 0.0,
        "spill disk": spill_disk.read_gbps if spill_disk else 0.0,
        "host to device": lane.link_gbps,
        "processor": hardware.memory_read_gbps,
        "host memory": hardware.memory_read_gbps if lane.has_own_memory else 0.0,
    }
    return {name: 1e9 * rate for name, rate in rates.items()}


@dataclass(frozen=True)
class StepWork:
    """A step of a model on a machine by a plan."""

    plan: MemoryPlan
    size: ModelFootprint
    hardware: HardwareProfile
    rows_per_token: int
    load: StepLoad
    window: ExpertWindow

    @cached_property
    def rates(self) -> dict[str, float]:
        return rates_of(self.hardware)

    def at(self, resource: str, amount: float, *after: Work) -> Work:
        return Work(resource, amount, self.rates[resource], after)

    # ------------------------------------------------------------ amounts

    @property
    def dense_bytes(self) -> int:
        """Of weights that are multiplied, but for experts."""
        encoder = self.size.encoder_bytes if self.load.num_encoded else 0
        return self.size.decoder_bytes + self.size.head_elements + encoder

    @property
    def num_elements(self) -> float:
        """Elements of layers' matrices that tokens pass through on the lane, each token counted."""
        load, size, experts = self.load, self.size, self.size.experts
        passes = load.num_tokens * experts.count_per_token - self.window.num_passes
        elements = load.num_tokens * size.layer_elements + load.num_encoded * size.encoder_elements
        return elements + max(0.0, passes) * experts.elements

    @property
    def attended_bytes(self) -> int:
        return self.load.attended_bytes if self.hardware.memory_read_gbps else 0

    @property
    def attended_s(self) -> float:
        """In which the processor attends beside a card. It shares its memory with the link, each layer
        crosses once, and a layer's attention is between its products."""
        if not self.attended_bytes:
            return 0.0
        num_bytes = self.load.spilled_bytes + self.attended_bytes
        num_layers = self.size.num_layers - self.size.num_encoder_layers
        return num_bytes / self.rates["processor"] + num_layers * self.hardware.lane.crossing_s

    @property
    def recurrence_s(self) -> float:
        """In which the lane brings states up to date. A step without logits has one sequence."""
        num_sequences = max(1, self.load.num_sampled)
        return recurrence_s(self.hardware.lane, self.size.state_bytes, num_sequences, self.load.num_tokens)

    # ------------------------------------------------------------ work

    @cached_property
    def weights(self) -> Work:
        """Reading all weights but experts where they are computed."""
        return self.at("memory", self.dense_bytes)

    @cached_property
    def written(self) -> Work:
        """What comes to where it is computed is written to memory before it is read."""
        return self.at("memory", self._streamed[0] + self._missing_bytes + 2 * self.load.spilled_bytes)

    @cached_property
    def copied_states(self) -> Work:
        """Copying states for paths of guesses. Such a copy is changed in the cache, one layer at a time."""
        return self.at("memory", 2 * self.load.num_paths * self.size.state_bytes)

    def alone(self) -> list[Work]:
        """If the lane computes all dense products."""
        demand, size = self.window.demand, self.size.experts.num_bytes
        in_ram = self.at("processor", size * demand.num_in_ram)
        works = [
            self.weights,
            self._multiplied(self.num_elements + self.load.num_sampled * self.size.head_elements),
            self.written,
            self.copied_states,
            *self._moving(*self._streamed),
            *self._keys(),
            *self._experts(),
            in_ram,
        ]
        if self.weights.seconds:  # missing experts are known when their layer's other weights were read
            works.append(Work(EXPERTS, max(self.window.reading_s, in_ram.seconds), after=(self.weights,)))
        return works

    def shared(self, split: SplitWork) -> list[Work]:
        """If a card and the processor share dense products."""
        step, streamed = split.step, split.share * split.step.rest_bytes
        brought, left = step.link_share * streamed, step.rest_bytes - streamed
        card_s = (step.kept_bytes + streamed) / step.card_bps + self.window.products_s + self.head_s
        return [
            self.at("memory", step.kept_bytes + streamed + brought + self.size.head_elements),
            self.at("memory", self._missing_bytes + 2 * self.load.spilled_bytes),
            Work("arithmetic", card_s),
            self.at("host to device", brought),
            Work("processor", left / step.processor_bps + self.window.processor_s),
            self.at("host memory", left + brought),
            *self._keys(),
            *self._experts(),
        ]

    @property
    def head_s(self) -> float:
        """In which a card computes the head."""
        elements = self.size.head_elements
        return max(
            self.at("memory", elements).seconds, self._multiplied(self.load.num_sampled * elements).seconds
        )

    def encoder(self) -> list[Work]:
        """A sweep of the encoder's layers alone, if there is one."""
        if not self.load.num_encoded:
            return []
        moved = _streamed(self.plan.layers[: self.plan.num_encoder_layers])
        return [
            self.at("memory", self.size.encoder_bytes + moved[0]),
            self._multiplied(self.load.num_encoded * self.size.encoder_elements),
            *self._moving(*moved),
        ]

    def _experts(self) -> list[Work]:
        """Experts that move, and those whose weights are read, on the lane or in RAM beside it."""
        demand, size = self.window.demand, self.size.experts.num_bytes
        if not demand.num_asked:
            return []
        return [
            *self._moving(self._missing_bytes, size * demand.num_from_disk),
            self.at("memory", size * (demand.num_asked - demand.num_in_ram)),
            self.at("host memory", size * demand.num_in_ram),
        ]

    def _keys(self) -> list[Work]:
        """Keys and values that lie elsewhere."""
        spilled, attended = self.load.spilled_bytes, self.attended_bytes
        if not spilled and not attended:
            return []
        over_link = spilled if self.hardware.lane.has_own_memory else 0
        return [
            self.at("host to device", over_link),
            self.at("disk" if self.hardware.spill_disk is None else "spill disk", spilled - over_link),
            self.at("host memory", over_link + attended),
            self.at("processor", attended),
        ]

    def _moving(self, num_bytes: float, from_disk: float) -> list[Work]:
        """Weights on their way. Copying to a GPU reads the host's memory, into which the disk writes."""
        if not (num_bytes or from_disk):
            return []
        return [
            self.at("host to device", num_bytes),
            self.at("disk", from_disk),
            self.at("host memory", num_bytes + from_disk),
        ]

    def _multiplied(self, elements: float) -> Work:
        """The multiplications and additions of so many elements, each with a token's rows."""
        return self.at("arithmetic", 2 * self.rows_per_token * elements)

    @cached_property
    def _streamed(self) -> tuple[int, int]:
        return _streamed(self.plan.layers if self.load.num_encoded else self.plan.step_layers)

    @property
    def _missing_bytes(self) -> float:
        return self.size.experts.num_bytes * self.window.demand.num_missing


def _streamed(layers: Iterable[LayerPlacement]) -> tuple[int, int]:
    """Bytes that come to where layers are computed, and from the disk."""
    streamed = [layer for layer in layers if not layer.is_resident]
    from_disk = sum(layer.num_bytes for layer in streamed if layer.home == "disk")
    return sum(layer.num_bytes for layer in streamed), from_disk
