"""What an engine sets for its whole process: the threads of the processor's kernels and of torch, and the
kernels' tuning. Whoever makes an engine, or computes a part of one for a leader, calls this once, first: the
plan and the reading of weights set nothing."""

from __future__ import annotations

from dataclasses import replace

import torch

from penstock.config import EngineConfig, card_number
from penstock.kernels import expected_traits, use_processor
from penstock.memory.hardware import HardwareProfile, num_physical_cores, threads_beside_a_card
from penstock.memory.lane import gpu_trouble


def settle_processor(config: EngineConfig, hardware: HardwareProfile | None = None) -> None:
    """By the config, and by what was measured of the kernels. Raises ConfigError if the kernels refuse a
    tuning."""
    number = card_number(config.device) or 0
    has_card = config.device != "cpu" and gpu_trouble(number) is None
    capability = torch.cuda.get_device_capability(number) if has_card else None
    num_threads = threads_of(config, has_card)
    has_own_threads = expected_traits(config, capability).has_own_threads
    torch.set_num_threads(1 if has_own_threads else num_threads)
    # A card has the config's choice of kernels, and the processor computes some products beside it.
    own = replace(config, kernels="auto") if has_card else tuned(config, hardware)
    use_processor(own, num_threads)


def threads_of(config: EngineConfig, has_card: bool) -> int:
    """Threads of the processor's kernels."""
    return config.num_threads or (threads_beside_a_card() if has_card else num_physical_cores())


def tuned(config: EngineConfig, hardware: HardwareProfile | None) -> EngineConfig:
    """The config of the processor's kernels with the tuning that was measured, unless it has its own."""
    if config.kernels not in ("auto", "native") or hardware is None or hardware.kernels is None:
        return config
    return replace(config, kernel_tuning=config.kernel_tuning or hardware.kernels.tuning)
