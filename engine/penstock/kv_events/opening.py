"""From a config to the publisher of its engine's events."""

from __future__ import annotations

from penstock.config import EngineConfig
from penstock.kv_events.publisher import Publisher


def open_publisher(config: EngineConfig) -> Publisher | None:
    """None if the config asks for none. Raises ConfigError."""
    return None if config.kv_events is None else Publisher(config.kv_events, config.block_size)
