"""Checks of a request or of the engine that several routes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from fastapi import Header

from penstock_server.facade.engine import ServedEngine
from penstock_server.facade.model import ServedModel
from penstock_server.protocol.errors import ApiError, unavailable
from penstock_server.settings.settings import Settings
from penstock_server.telemetry.request_info import current_request

#: Characters or tokens that a route accepts, however small the model's context is.
LEAST_LIMIT = 1 << 16


async def require_json(content_type: Annotated[str, Header(include_in_schema=False)] = "") -> None:
    """Raises 415 for a content type that is not JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"The content type is {kind or 'missing'!r}; send application/json."
        raise ApiError(415, message, code="unsupported_media_type")


def ready_model(engine: ServedEngine) -> ServedModel:
    """The loaded model. Raises 503 while the model loads, EngineDead if the engine has ended."""
    status = engine.status
    if status.state == "loading":
        progress = f"{status.loaded_layers} of {status.total_layers} layers"
        raise unavailable(f"The model is loading: {progress}.", "model_loading")
    return engine.loaded.model


def check_model(name: str | None, settings: Settings) -> None:
    """Raises 404 for a name that this server does not have."""
    names = settings.model_names
    # The MODEL of the command line is a name too, though /v1/models does not list it.
    if name not in (None, settings.model, *names):
        message = f"There is no model {name!r} here; this server has {' and '.join(names)}."
        raise ApiError(404, message, code="model_not_found", param="model")


def find_model(name: str | None, engine: ServedEngine, settings: Settings) -> ServedModel:
    """The loaded model as a request calls it: by a name of its own, or by that of an adapter. Raises what
    check_model() and ready_model() raise."""
    if engine.is_ready and name is not None and (adapter := engine.loaded.adapters.get(name)):
        return replace(ready_model(engine), name=name, adapter=adapter)
    if engine.is_ready or name not in settings.adapters:
        check_model(name, settings)
    return replace(ready_model(engine), name=settings.model_names[0])


def check_length(field: str, number: int, unit: str, limit: int) -> None:
    """Raises 400 for a text far longer than the model's context: reading it would hold up everybody else."""
    limit = max(limit, LEAST_LIMIT)
    if number > limit:
        message = f"{field} has {number} {unit}; this route takes {limit}. Send {field} in parts."
        raise ApiError(400, message, code="string_above_max_length", param=field)


def leave_out(tools: Sequence[str], settings: Settings) -> None:
    """Notes tools that the model can't be offered, by their places and types. Raises 400 for them if the
    server is to refuse them."""
    if tools and settings.refuse_unsupported_tools:
        place = tools[0].partition(" ")[0]
        message = f"This server can't offer these tools to a model: {', '.join(tools)}. Send functions only."
        raise ApiError(400, message, code="unsupported_parameter", param=place)
    note_ignored(tools)


def note_ignored(places: Sequence[str]) -> None:
    """Notes what an answer leaves out of account, for the log and the header X-Penstock-Ignored."""
    if (request := current_request.get()) is not None:
        request.ignored += places
