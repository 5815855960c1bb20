"""Errors in the form of Ollama's API: {"error": message}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel


class OllamaError(BaseModel):
    error: str


def ollama_error(status: int, error: Mapping[str, Any], request_id: str = "") -> dict[str, Any]:
    """error: the members of OpenAI's error object."""
    return {"error": str(error["message"])}
