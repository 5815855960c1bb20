"""What several routes ask of a request, or of the engine, before they begin."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header

from penstock_server.facade.engine import ServedEngine
from penstock_server.facade.model import ServedModel
from penstock_server.protocol.errors import ApiError, unavailable
from penstock_server.settings.settings import Settings

#: Characters, or tokens, that are taken whatever the model's context.
LEAST_LIMIT = 1 << 16


async def require_json(content_type: Annotated[str, Header(include_in_schema=False)] = "") -> None:
    """Raises 415 for bodies that don't claim to be JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"The content type is {kind or 'missing'!r}; send application/json."
        raise ApiError(415, message, code="unsupported_media_type")


def ready_model(engine: ServedEngine) -> ServedModel:
    """Raises 503 while the model loads, EngineDead if there will be no engine."""
    status = engine.status
    if status.state == "loading":
        progress = f"{status.loaded_layers} of {status.total_layers} layers"
        raise unavailable(f"The model is loading: {progress}.", "model_loading")
    return engine.model


def check_model(name: str | None, settings: Settings) -> None:
    """Raises 404 for a name that this server does not have."""
    names = settings.model_names
    # What the server was started with is a name, too, though no list shows it.
    if name not in (None, settings.model, *names):
        message = f"There is no model {name!r} here; this server has {' and '.join(names)}."
        raise ApiError(404, message, code="model_not_found", param="model")


def check_length(field: str, number: int, unit: str, limit: int) -> None:
    """Raises 400 for what is far longer than any context here: it would hold up everybody's texts."""
    limit = max(limit, LEAST_LIMIT)
    if number > limit:
        message = f"{field} has {number} {unit}; this route takes {limit}. Send it in parts."
        raise ApiError(400, message, code="string_above_max_length", param=field)
