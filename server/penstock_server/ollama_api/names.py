"""Names of models as Ollama's users write them."""

from __future__ import annotations

from penstock_server.settings.settings import Settings

#: The tag that a name without a tag has at Ollama.
_USUAL_TAG = ":latest"


def known_name(name: str, settings: Settings) -> str:
    """`name` without the usual tag, unless a model of this server has the tag in its name."""
    return name if name in settings.model_names else name.removesuffix(_USUAL_TAG)
