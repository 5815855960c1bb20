"""Names of models as Ollama's users write them."""

from __future__ import annotations

from penstock_server.models.served_models import ServedModels

#: The tag that a name without a tag has at Ollama.
_USUAL_TAG = ":latest"


def known_name(name: str, models: ServedModels) -> str:
    """`name` without the usual tag, unless a model of this server has the tag in its name."""
    return name if name in models.names else name.removesuffix(_USUAL_TAG)
