"""Checks of a request or of the engine that several routes share."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import Request

from penstock.errors import DeadlineExceeded, QueueFull, QueueTimeout
from penstock_server.answers.streaming import unless_disconnected
from penstock_server.facade.loaded_engine import LoadedEngine
from penstock_server.models.pooled_model import ModelInUse, PooledModel, engine_of
from penstock_server.models.served_models import ServedModels, raise_while_loading
from penstock_server.protocol.errors import MAX_SHOWN_CHARS, ApiError, api_error, cut, unavailable
from penstock_server.settings.settings import Settings
from penstock_server.telemetry.request_info import current_request

#: Characters or tokens that a route accepts, however small the model's context is.
LEAST_LIMIT = 1 << 16


def require_json(content_type: str) -> None:
    """Raises 415 for a content type that is not JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"The content type is {kind or 'missing'!r}; send application/json."
        raise ApiError(415, message, code="unsupported_media_type")


async def use_model(
    models: ServedModels, name: str | None, request: Request, keep_alive_s: float | None = None
) -> ModelInUse:
    """The model that a request calls by `name`, until the request's end. keep_alive_s: see use(). Raises 404
    for an unknown name, what ServedModels.use() raises, and ClientDisconnect if the client does not wait."""
    model, info = known_model(models, name), current_request.get()
    if model.is_ready or not models.swaps:
        used = await models.use(model, keep_alive_s)
    else:
        used = await unless_disconnected(request.receive, _wait(models, model, keep_alive_s))
    used.choose(name)
    if info is None:
        used.close()  # nobody would; a model that stays loaded does not mind
        return used
    info.at_end.append(used.close)
    info.model = model.name if models.swaps else None
    return used


async def _wait(models: ServedModels, model: PooledModel, keep_alive_s: float | None) -> ModelInUse:
    """ServedModels.use(), within the request's time. Raises DeadlineExceeded if the time for the whole
    request ends first."""
    info = current_request.get()
    try:
        return await models.use(model, keep_alive_s, None if info is None else info.left_s)
    except (QueueFull, QueueTimeout, ApiError) as error:
        if isinstance(error, QueueTimeout) and info is not None and info.limits.total_ends_first:
            raise DeadlineExceeded(f"{model.name} could not be loaded before its time was up") from None
        models.count_refused(model.name, str(api_error(error).code))
        raise


def known_model(models: ServedModels, name: str | None) -> PooledModel:
    """The model of a name; the first model where a request names none. Raises 404 for a name that this server
    does not have."""
    if (model := models.find(name or None)) is not None:
        return model
    names = [*models.names, *(adapter for model in models.models for adapter in model.adapters)]
    message = (
        f"There is no model {cut(str(name), MAX_SHOWN_CHARS)!r} here; this server has {', '.join(names)}."
    )
    raise ApiError(404, message, code="model_not_found", param="model")


def loaded_engine(models: ServedModels, name: str | None) -> LoadedEngine:
    """The engine of a model, or of the model that was used last; never loads one. Raises 404 for an unknown
    name, 503 for a model that is not loaded, EngineDead if the engine has ended."""
    raise_while_loading(models.status)
    model = known_model(models, name) if name else models.current
    if models.swaps and not model.is_ready:
        message = f"{model.name} is not loaded now; a request to it loads it."
        raise unavailable(message, "model_not_loaded")
    return engine_of(model).loaded


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
