"""ExpertTables: the tables of all layers by which compiled kernels find experts in memory."""

from __future__ import annotations

from penstock.kernels.expert_records import ExpertRecord
from penstock.spec import UnitKey
from penstock.weights.expert_table import ExpertTable
from penstock.weights.expert_views import ExpertViews
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tiers.demand_tier import DemandTier, Group


class ExpertTables:
    """Of the experts of one tier, which has the tables, since experts leave it."""

    def __init__(self, tier: DemandTier, views: ExpertViews) -> None:
        self._tier, self._views = tier, views
        #: The most bytes of scratch memory that compiled kernels need for a row of an expert.
        self.row_bytes = 0

    def of(self, layer: UnitKey) -> ExpertTable:
        tables, place = self._tier.slots.tables, layer[:2]
        if place not in tables:
            tables[place] = ExpertTable(self._tier.num_units[place])
        return tables[place]

    def put(self, group: Group) -> None:
        """Enter those of these experts into their tables that are in memory and not there yet. None may give
        its slot up meanwhile, as it may when another thread's read ends."""
        missing = [pair for pair in group if not self.of(pair[0]).keeps(pair[0].expert or 0)]
        if not missing:  # nearly always
            return
        with self._tier.arrivals:
            for key, each in missing:
                if self._tier.holds(key, each) and each.has_ended and not each.has_failed:
                    weights = each.views or self._views.of(key, each)
                    if (record := self.record(weights)) is not None:
                        self.of(key).put(key.expert or 0, weights, record)

    def record(self, weights: LayerWeights) -> ExpertRecord | None:
        """None: compiled kernels don't know the expert."""
        record = weights.gated.native if "gate_up" in weights else None
        if record is not None and record.row_bytes > self.row_bytes:
            self.row_bytes = record.row_bytes
        return record
