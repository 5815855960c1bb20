"""expert_window(): how long a layer after the other waits for its experts in a step, on each lane. Pure."""

from __future__ import annotations

from penstock.memory.hardware import HardwareProfile
from penstock.memory.planning.expert_demand import ExpertDemand, ExpertWindow, expert_demand
from penstock.memory.planning.expert_lanes import expert_rates
from penstock.memory.planning.plan import MemoryPlan
from penstock.memory.planning.planned_lanes import PlannedLanes, planned_lanes
from penstock.memory.planning.product_times import multiply_s
from penstock.memory.planning.work import Work, simulate
from penstock.spec import ExpertFootprint


def expert_window(
    plan: MemoryPlan,
    experts: ExpertFootprint,
    hardware: HardwareProfile,
    rows_per_token: int,
    num_tokens: int,
    demand: ExpertDemand | None = None,
) -> ExpertWindow:
    """Of a step of `num_tokens` tokens. `demand` are the experts that the step asked for, if they are
    known."""
    if not experts.count:
        return ExpertWindow()
    lanes = _lanes(plan, experts, hardware, rows_per_token, num_tokens) if plan.shares_experts else None
    if demand is None:
        demand = lanes.demand if lanes else expert_demand(plan, experts, num_tokens)
    processor_s, num_passes = lanes.of(demand.num_in_ram) if lanes else (0.0, 0.0)
    disk_gbps = hardware.disk.read_gbps if hardware.disk else 0.0
    link = Work("link", experts.num_bytes * demand.num_missing, 1e9 * hardware.lane.link_gbps)
    disk = Work("disk", experts.num_bytes * demand.num_from_disk, 1e9 * disk_gbps)
    behind_s = lanes.behind_disk_s if lanes else _behind_disk_s(experts, hardware, demand.num_from_disk)
    last = Work("last", behind_s if disk.seconds else 0.0, after=(disk,))
    reading_s = simulate((link, disk, last)).seconds
    products_s = _products_s(experts, hardware, demand, rows_per_token * num_tokens)
    return ExpertWindow(demand, reading_s, processor_s, num_passes, products_s)


def _lanes(
    plan: MemoryPlan, experts: ExpertFootprint, hardware: HardwareProfile, rows: int, num_tokens: int
) -> PlannedLanes | None:
    rates = expert_rates(experts, hardware, rows)
    if rates is None:
        return None
    return planned_lanes(experts, rates, num_tokens, plan.num_expert_slots, plan.num_host_expert_slots)


def _behind_disk_s(experts: ExpertFootprint, hardware: HardwareProfile, num_from_disk: float) -> float:
    """What layers wait for the last expert from the disk, which moves to a card when it is in RAM: meanwhile
    the disk has nothing to do, since the next layer's experts are not known."""
    if not hardware.lane.link_gbps:
        return 0.0
    num_moves = min(num_from_disk, experts.count / experts.per_layer)
    return num_moves * experts.num_bytes / hardware.lane.link_gbps / 1e9


def _products_s(
    experts: ExpertFootprint, hardware: HardwareProfile, demand: ExpertDemand, rows: int
) -> float:
    """Seconds of the products of experts on the lane itself, where `rows` rows pass through count_per_token
    experts each."""
    lane, number = hardware.lane, demand.num_asked - demand.num_in_ram
    if not demand.num_asked:
        return 0.0
    rows_each = max(1, round(rows * experts.count_per_token / demand.num_asked))
    num_bytes, elements = number * experts.num_bytes, number * experts.elements
    return multiply_s(lane, num_bytes, elements, rows_each, experts.formats)
