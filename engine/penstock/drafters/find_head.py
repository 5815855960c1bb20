"""Which head guesses for a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import EngineConfig
from penstock.memory.hardware import HardwareProfile
from penstock.model.registry import may_have_head
from penstock.weights.checkpoints.hub import find_model

if TYPE_CHECKING:
    from penstock.drafters.mtp_plan import PlannedMTP


def find_head(
    model: str | Path,
    config: EngineConfig,
    offline: bool = False,
    revision: str | None = None,
    hardware: HardwareProfile | None = None,
) -> PlannedMTP | None:
    """The head that config.draft_model names, or that came with the model. None if a whole model drafts, the
    upper planes do, or nothing. Raises what PlannedEagle3.open(), PlannedDFlash.open()
    and PlannedMTP.find() raise."""
    if config.speculation == "off":
        return None
    if config.draft_model is not None:
        from penstock.drafters.dflash_plan import PlannedDFlash
        from penstock.drafters.eagle3_plan import PlannedEagle3

        return PlannedEagle3.open(config, offline, hardware) or PlannedDFlash.open(config, offline, hardware)
    if config.mtp == "off" or config.draft_with_planes:
        return None
    folder = find_model(model, revision, offline, allow_pickle=config.allow_pickle)
    if config.mtp == "auto" and not may_have_head(folder):
        return None
    from penstock.drafters.mtp_plan import PlannedMTP

    return PlannedMTP.find(folder, config, offline, revision, hardware)
