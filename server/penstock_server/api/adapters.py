"""vLLM's routes for adapters, which are there only if the owner of the server wants them: clients name
folders of this machine."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field

from penstock.errors import CapacityError, CheckpointError, CheckpointNotFound, ConfigError
from penstock_server.models.served_models import ServedModels
from penstock_server.protocol.errors import ApiError
from penstock_server.routing.body_route import BodyRoute
from penstock_server.routing.checks import loaded_engine
from penstock_server.routing.descriptions import ERRORS


class AdapterToLoad(BaseModel):
    """The body of /v1/load_lora_adapter."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    #: The adapter takes the place of one of the same name.
    load_inplace: bool = False


class AdapterToUnload(BaseModel):
    """The body of /v1/unload_lora_adapter."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1)
    #: vLLM's number of an adapter, which has no meaning here.
    lora_int_id: int | None = None


class AdapterRoutes:
    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def router(self) -> APIRouter:
        router = APIRouter(tags=["adapters"], responses=ERRORS, route_class=BodyRoute)
        for path, route in (("/load_lora_adapter", self.load), ("/unload_lora_adapter", self.unload)):
            router.post(path, response_class=PlainTextResponse)(route)
        return router

    async def load(self, body: AdapterToLoad) -> str:
        """Loads an adapter from a folder of the server's machine."""
        loaded, name = loaded_engine(self._models, None), body.lora_name
        known = self._models.find(name)
        if known is not None and name not in known.adapters:
            raise _taken(f"{name!r} is a name of the model; take another one.")
        try:
            await asyncio.to_thread(loaded.load_adapter, name, body.lora_path, replaces=body.load_inplace)
        except ConfigError as error:
            raise _taken(str(error)) from error
        except CapacityError as error:
            raise ApiError(400, str(error), code="no_room_for_adapter", param="lora_path") from error
        except CheckpointNotFound as error:
            raise ApiError(404, str(error), code="adapter_not_found", param="lora_path") from error
        except CheckpointError as error:
            raise ApiError(400, str(error), code="invalid_adapter", param="lora_path") from error
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload(self, body: AdapterToUnload) -> str:
        """Unloads an adapter. Requests that have it go on."""
        try:
            loaded_engine(self._models, None).unload_adapter(body.lora_name)
        except ConfigError as error:
            raise ApiError(404, str(error), code="adapter_not_found", param="lora_name") from error
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."


def _taken(message: str) -> ApiError:
    return ApiError(400, message, code="adapter_name_taken", param="lora_name")
