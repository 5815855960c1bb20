"""What Ollama's clients ask about models: /api/tags, /api/show, /api/ps, /api/version."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from fastapi import APIRouter, Depends

from penstock_server.facade.engine import ServedEngine
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
from penstock_server.protocol.engine_bodies import ServedPlanBody
from penstock_server.protocol.wire import Wire
from penstock_server.routing.checks import find_model, require_json
from penstock_server.routing.descriptions import errors_as
from penstock_server.settings.settings import Settings
from penstock_server.tools.reasoning import detect_format

#: The version of Ollama whose API this is. Clients ask for it to know what the server can do.
API_VERSION = "0.40.12"
#: The end of a model that stays loaded, as Ollama writes "never".
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
    def __init__(self, engine: ServedEngine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._since = now()

    def router(self) -> APIRouter:
        router = APIRouter(tags=["ollama"], responses=errors_as(OllamaError), route_class=JsonRoute)
        router.get("/version")(self.version)
        router.get("/tags")(self.tags)
        router.get("/ps")(self.running)
        router.post("/show", dependencies=[Depends(require_json)])(self.show)
        return router

    async def version(self) -> ApiVersion:
        return ApiVersion(version=API_VERSION)

    async def tags(self) -> ModelListing:
        """All names of the model, and its adapters; none while the model loads, since nothing is known of
        it."""
        if not self._engine.is_ready:
            return ModelListing(models=[])
        names = (*self._settings.model_names, *self._engine.loaded.adapters)
        return ModelListing(models=[self._listed(name) for name in names])

    async def running(self) -> RunningModels:
        if not self._engine.is_ready:
            return RunningModels(models=[])
        plan, loaded = self._engine.loaded.plan(), self._engine.loaded
        listed = self._listed(self._settings.model_names[0])
        running = RunningModel(
            **listed.model_dump(include={"name", "model", "size", "digest", "details"}),
            expires_at=_NEVER,
            size_vram=plan.device_used_bytes if plan.has_gpu else 0,
            context_length=loaded.model.max_model_len,
        )
        return RunningModels(models=[running])

    async def show(self, body: ShowRequest) -> ShownModel:
        name = known_name(body.model or body.name or "", self._settings)
        model = find_model(name, self._engine, self._settings)
        architecture = model.architecture
        info = {
            "general.architecture": architecture,
            "general.basename": name,
            f"{architecture}.context_length": model.max_model_len,
            f"{architecture}.embedding_length": model.hidden_size,
            f"{architecture}.vocab_size": model.vocab_size,
        }
        return ShownModel(
            modelfile=f"FROM {name}\n",
            parameters="\n".join(f"{key} {value}" for key, value in model.default_sampling.items()),
            template=model.tokenizer.tool_template if model.tokenizer.has_chat_template else "{{ .Prompt }}",
            details=self._details(),
            model_info=info,
            capabilities=self._capabilities(),
            modified_at=self._since,
        )

    def _listed(self, name: str) -> ListedModel:
        return ListedModel(
            name=name,
            model=name,
            modified_at=self._since,
            size=weight_bytes(self._engine.loaded.plan()),
            digest=hashlib.sha256(name.encode()).hexdigest(),
            details=self._details(),
            capabilities=self._capabilities(),
        )

    def _details(self) -> Details:
        family = self._engine.loaded.model.architecture
        return Details(
            format="safetensors",
            family=family,
            families=[family],
            parameter_size="",
            quantization_level="",
        )

    def _capabilities(self) -> list[str]:
        model = self._engine.loaded.model
        if model.pooling is not None:
            return ["embedding"] if model.task == "embed" else []
        tokenizer = model.tokenizer
        found = ["completion"]
        if model.forms.max_blanks:
            found.append("insert")
        if re.search(r"\btools\b", tokenizer.tool_template or ""):
            found.append("tools")
        if detect_format(tokenizer) is not None:
            found.append("thinking")
        return found


def weight_bytes(plan: ServedPlanBody) -> int:
    """Bytes of the layers, the embedding and the head."""
    return sum(layer.num_bytes for layer in plan.layers) + plan.embedding_bytes + plan.head_bytes
