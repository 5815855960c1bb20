"""TiersObserver: has an engine wait for blocks from its tiers where nothing else can be computed."""

from __future__ import annotations

from penstock.cache.host.kv_tiers import KVTiers
from penstock.generation.step_observer import StepObserver


class TiersObserver(StepObserver):
    """The other calls of an observer say nothing to tiers: the block manager offers and reads blocks."""

    def __init__(self, tiers: KVTiers) -> None:
        self.tiers = tiers

    def stalled(self) -> None:
        self.tiers.wait()
