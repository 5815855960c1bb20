"""The soft prompts that a server offers. They are read before the model is loaded, and checked against it."""

from __future__ import annotations

from collections.abc import Mapping

from penstock import Engine, PromptEmbeds
from penstock.errors import ConfigError
from penstock_server.settings.settings import Settings


def read_soft_prompts(settings: Settings) -> dict[str, PromptEmbeds]:
    """By name. Raises ConfigError, and kinds of CheckpointError for files that can't be read."""
    return {name: PromptEmbeds.load(file) for name, file in settings.soft_prompts.items()}


def fitting(engine: Engine, soft_prompts: Mapping[str, PromptEmbeds]) -> Engine:
    """The engine. Raises ConfigError, and closes the engine, if a soft prompt belongs to another model."""
    size = engine.spec.embedding_size
    for name, vectors in soft_prompts.items():
        if vectors.hidden_size != size:
            engine.close()
            raise ConfigError(
                f"--soft-prompt {name}: its vectors have {vectors.hidden_size} numbers, and this model's "
                f"embedding has {size}: the soft prompt belongs to another model"
            )
    return engine
