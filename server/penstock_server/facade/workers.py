"""A worker: this machine computes some layers of a model for a leader elsewhere."""

from __future__ import annotations

from dataclasses import replace

from penstock.memory.hardware import HardwareProfile
from penstock.memory.rates import is_measurable
from penstock.nodes.worker import Worker
from penstock_server.facade.loading import find_folder
from penstock_server.facade.machine import profile
from penstock_server.settings.settings import Settings


def worker_of(settings: Settings) -> Worker:
    """The worker that the settings describe. Raises ConfigError."""

    def hardware(model: str) -> HardwareProfile:
        folder = find_folder(replace(settings, model=model))
        return profile(settings, folder, measures_disk=is_measurable(folder))

    return Worker(
        settings.worker_config(),
        settings.engine_config(),
        model=settings.model,
        offline=settings.offline,
        hardware=hardware,
        cache_folder=settings.cache_dir,
    )
