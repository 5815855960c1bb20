"""What Ollama's clients ask about models: /api/tags, /api/show, /api/ps, /api/version."""

from __future__ import annotations

import hashlib
import re
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

from penstock_server.facade.model import ServedModel
from penstock_server.facade.needs import ModelNeeds
from penstock_server.models.pooled_model import PooledModel, engine_of
from penstock_server.models.served_models import ServedModels, raise_while_loading
from penstock_server.ollama_api.any_content_type import JsonRoute
from penstock_server.ollama_api.bodies import (
    ApiVersion,
    Details,
    ListedModel,
    ModelListing,
    RunningModel,
    RunningModels,
    ShownModel,
    now,
)
from penstock_server.ollama_api.errors import OllamaError
from penstock_server.ollama_api.names import known_name
from penstock_server.protocol.errors import ApiError
from penstock_server.protocol.wire import Wire
from penstock_server.routing.checks import known_model
from penstock_server.routing.descriptions import errors_as
from penstock_server.tools.reasoning import detect_format

if TYPE_CHECKING:
    from penstock import WeightFacts

#: The version of Ollama whose API this is. Clients ask for it to know what the server can do.
API_VERSION = "0.40.12"
#: The end of a model that stays loaded, as Ollama writes "never".
_CENTURY_S = 100 * 365 * 86400
_NEVER = "2318-01-01T00:00:00Z"


class ShowRequest(Wire):
    """Body of POST /api/show. `name` is the former name of `model`."""

    model: str | None = None
    name: str | None = None

    # accepted without effect
    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: dict[str, Any] | None = None


class CatalogRoutes:
    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._since = now()

    def router(self) -> APIRouter:
        router = APIRouter(tags=["ollama"], responses=errors_as(OllamaError), route_class=JsonRoute)
        router.get("/version")(self.version)
        router.get("/tags")(self.tags)
        router.get("/ps")(self.running)
        router.post("/show")(self.show)
        return router

    async def version(self) -> ApiVersion:
        return ApiVersion(version=API_VERSION)

    async def tags(self) -> ModelListing:
        """All names of the models of which something is known, and their adapters."""
        return ModelListing(
            models=[
                self._listed(name, model)
                for model in self._models.models
                if self._architecture(model) is not None
                for name in (*model.names, *model.adapters)
            ]
        )

    async def running(self) -> RunningModels:
        return RunningModels(models=[self._running(model) for model in self._models.models if model.is_ready])

    def _running(self, model: PooledModel) -> RunningModel:
        loaded = engine_of(model).loaded
        plan = loaded.plan()
        listed = self._listed(model.name, model).model_dump(
            include={"name", "model", "size", "digest", "details"}
        )
        return RunningModel(
            **listed,
            expires_at=_end_of(model),
            size_vram=plan.device_used_bytes if plan.has_gpu else 0,
            context_length=loaded.model.max_model_len,
        )

    async def show(self, body: ShowRequest) -> ShownModel:
        """What the model's files say, and more if it was loaded before. Nothing is loaded for it."""
        if not (given := body.model or body.name):
            message = "model is missing: send the name of a model that /api/tags lists."
            raise ApiError(400, message, code="missing_required_parameter", param="model")
        name = known_name(given, self._models)
        model = known_model(self._models, name)
        raise_while_loading(self._models.status)
        seen, needs = self._seen(model), model.needs
        details, weights = self._details(model), _weights(model)
        size = seen or needs
        info = {
            "general.architecture": details.family,
            "general.basename": name,
            "general.parameter_count": weights.num_parameters if weights else 0,
            f"{details.family}.context_length": (
                seen.max_model_len if seen else needs.max_position_embeddings if needs else 0
            ),
            f"{details.family}.embedding_length": size.hidden_size if size else 0,
            f"{details.family}.vocab_size": size.vocab_size if size else 0,
        }
        sampling = seen.default_sampling if seen else {}
        has_template = seen is not None and seen.tokenizer.has_chat_template
        return ShownModel(
            modelfile=f"FROM {name}\n",
            parameters="\n".join(f"{key} {value}" for key, value in sampling.items()),
            template=seen.tokenizer.tool_template if seen and has_template else "{{ .Prompt }}",
            details=details,
            model_info=info,
            capabilities=_capabilities(seen, needs),
            modified_at=self._since,
        )

    def _listed(self, name: str, model: PooledModel) -> ListedModel:
        return ListedModel(
            name=name,
            model=name,
            modified_at=self._since,
            size=weights.num_bytes if (weights := _weights(model)) else 0,
            digest=hashlib.sha256(name.encode()).hexdigest(),
            details=self._details(model),
            capabilities=_capabilities(self._seen(model), model.needs),
        )

    def _seen(self, model: PooledModel) -> ServedModel | None:
        """What the model is, if it is loaded or was."""
        return engine_of(model).loaded.model if model.is_ready else model.seen

    def _details(self, model: PooledModel) -> Details:
        """An adapter has its model's."""
        weights, family = _weights(model), self._architecture(model) or ""
        if weights is None:
            return Details(format="", family=family, families=[family])
        family = weights.family or family
        return Details(
            format=weights.file_format,
            family=family,
            families=[family],
            parameter_size=_in_words(weights.num_parameters),
            quantization_level=weights.quantization,
        )

    def _architecture(self, model: PooledModel) -> str | None:
        """None while nothing is known of the model."""
        known = self._seen(model) or model.needs
        return None if known is None else known.architecture


def _weights(model: PooledModel) -> WeightFacts | None:
    """None while nothing is known of the model."""
    if model.is_ready:
        return engine_of(model).loaded.weights()
    return None if model.needs is None else model.needs.weights


def _in_words(num_parameters: int) -> str:
    """As Ollama writes it: "8B", "1.1B", "494.03M", "26K"; "" for 0, which is not known."""
    for unit, name, digits in ((1e9, "B", 1), (1e6, "M", 2), (1e3, "K", 0)):
        if num_parameters >= unit:
            number = num_parameters / unit
            return f"{number:.{0 if number.is_integer() else digits}f}{name}"
    return str(num_parameters or "")


def _capabilities(model: ServedModel | None, needs: ModelNeeds | None) -> list[str]:
    known = model or needs
    if known is not None and known.task != "generate":
        return ["embedding"] if known.task == "embed" else []
    found = ["completion"]
    if model is None:
        return found
    tokenizer = model.tokenizer
    if model.forms.max_blanks:
        found.append("insert")
    if re.search(r"\btools\b", tokenizer.tool_template or ""):
        found.append("tools")
    if detect_format(tokenizer) is not None:
        found.append("thinking")
    return found


def _end_of(model: PooledModel) -> str:
    """When a model goes if nobody asks for it. While requests have it, their time begins at their end."""
    left_s = model.keep_alive_s if model.num_users else model.expires - time.monotonic()
    if left_s > _CENTURY_S:  # dates end some time
        return _NEVER
    end = datetime.now(UTC) + timedelta(seconds=max(0.0, left_s))
    return end.isoformat().replace("+00:00", "Z")
