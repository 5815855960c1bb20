"""Prompts with vectors in place of tokens: those that a request brings, and soft prompts of the server."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from penstock.errors import InvalidParameter
from penstock_server.facade.model import ServedModel

if TYPE_CHECKING:
    from penstock import PromptEmbeds


def read_embeds(text: str) -> PromptEmbeds:
    """Base64 of a file. Raises InvalidParameter."""
    from penstock import PromptEmbeds  # this import loads torch

    try:
        raw = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise InvalidParameter("prompt_embeds", f"prompt_embeds is not base64: {error}") from error
    return PromptEmbeds.read(raw)


def find_soft_prompt(model: ServedModel, name: str) -> PromptEmbeds:
    """Raises InvalidParameter for a name that the server does not have."""
    if name not in model.soft_prompts:
        there = f"; there are: {', '.join(model.soft_prompts)}" if model.soft_prompts else ""
        raise InvalidParameter(
            "soft_prompt",
            f"this server has no soft prompt {name!r}{there}. It is started with --soft-prompt NAME=FILE",
        )
    return model.soft_prompts[name]
