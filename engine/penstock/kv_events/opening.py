"""From a config to the publisher of its engine's events."""

from __future__ import annotations

from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.kv_events.publisher import Publisher
from penstock.spec import ModelSpec


def open_publisher(config: EngineConfig) -> Publisher | None:
    """None if the config asks for none. Raises ConfigError."""
    return None if config.kv_events is None else Publisher(config.kv_events, config.block_size)


def check_events(config: EngineConfig, spec: ModelSpec) -> None:
    """Raises ConfigError for a model whose blocks say nothing to a router: the tokens of a block don't tell
    which prompts find it."""
    if config.kv_events is None:
        return
    if spec.decoder_start:
        kind = "encodes its prompts"
    elif spec.sees_prompt_both_ways:
        kind = "sees its prompts both ways"
    else:
        return
    raise ConfigError(
        f"--kv-events-config tells routers which prompts begin alike, and {spec.architecture} {kind}, so "
        "that only equal prompts share anything: leave it out"
    )
