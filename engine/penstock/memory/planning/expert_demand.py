"""ExpertDemand: the experts that a step asks for, and what of them has to be read. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from penstock.memory.planning.plan import MemoryPlan
from penstock.spec import ExpertFootprint


@dataclass(frozen=True)
class ExpertDemand:
    """Experts of all layers together; an expert that several tokens chose counts once."""

    num_asked: float = 0.0
    #: Those that are not where they are computed, and those of them that are not in RAM either.
    num_missing: float = 0.0
    num_from_disk: float = 0.0
    #: Those that the processor computes where they lie, beside a card.
    num_in_ram: float = 0.0

    @property
    def hit_rate(self) -> float:
        return 1 - self.num_missing / self.num_asked if self.num_asked else 1.0


NO_DEMAND = ExpertDemand()
#: Seconds of an expert's calls beside its products: 30 us in the kernels' calls, measured with an expert of
#: 64 by 64, and the rest for finding and adding up.
EXPERT_OVERHEAD_S = 45e-6


class ExpertWindow(NamedTuple):
    """The experts of a step, of all layers together. Seconds of lanes and links overlap."""

    demand: ExpertDemand = NO_DEMAND
    #: In which the missing ones arrive.
    reading_s: float = 0.0
    #: In which the processor computes those in RAM, beside a card; and how often a token passes through one.
    processor_s: float = 0.0
    num_passes: float = 0.0
    #: The products of the others, by measured rates of products or by what memory and arithmetic allow.
    products_s: float = 0.0

    @property
    def waiting_s(self) -> float:
        return max(self.reading_s, self.processor_s)

    @property
    def seconds(self) -> float:
        """From the first router to the last expert, without what lies between layers."""
        return max(self.waiting_s, self.products_s) + EXPERT_OVERHEAD_S * self.demand.num_asked


def expert_demand(plan: MemoryPlan, experts: ExpertFootprint, num_tokens: int) -> ExpertDemand:
    """What a step of `num_tokens` tokens should ask for when the slots are full, by the experts'
    popularity."""
    if not experts.count or not num_tokens:
        return NO_DEMAND
    host = plan.num_host_expert_slots if plan.has_gpu else plan.num_expert_slots
    return _demand(experts, num_tokens, plan.num_expert_slots, max(host, plan.num_expert_slots))


@lru_cache(maxsize=256)
def _demand(experts: ExpertFootprint, num_tokens: int, num_slots: int, num_host_slots: int) -> ExpertDemand:
    from penstock.memory.planning.popularity import chosen_shares, hit_rate, step_shares, weights_of

    num_layers = experts.count / experts.per_layer
    shares = chosen_shares(weights_of(experts), experts.count_per_token / num_layers)
    asked = step_shares(shares, num_tokens)
    total = num_layers * sum(asked)
    missing = total * (1 - hit_rate(asked, num_slots / num_layers))
    from_disk = total * (1 - hit_rate(asked, num_host_slots / num_layers))
    return ExpertDemand(total, missing, min(missing, from_disk))
