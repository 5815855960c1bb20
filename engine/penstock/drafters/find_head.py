"""Which head guesses for a model."""

from __future__ import annotations

from pathlib import Path

from penstock.config import EngineConfig
from penstock.drafters.dflash_plan import PlannedDFlash
from penstock.drafters.eagle3_plan import PlannedEagle3
from penstock.drafters.mtp_plan import PlannedMTP
from penstock.memory.hardware import HardwareProfile


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
        return PlannedEagle3.open(config, offline, hardware) or PlannedDFlash.open(config, offline, hardware)
    if config.mtp == "off" or config.draft_with_planes:
        return None
    return PlannedMTP.find(model, config, offline, revision, hardware)
