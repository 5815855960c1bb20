"""The memory that requests may take beside the model."""

from __future__ import annotations

from penstock.memory.hardware import total_memory_bytes
from penstock_server.settings.settings import Settings

#: The share of the machine's memory, or of the container's: a third of what a plan leaves to all others
#: (SPARE_SHARE).
_SHARE = 1 / 32
#: The body and its values: see BodyReader.
_LEAST_BODIES = 4


def request_memory_bytes(settings: Settings) -> int:
    """What the owner of the server says, or a share of the memory in which one largest request has room."""
    if settings.request_memory is not None:
        return settings.request_memory
    return max(_LEAST_BODIES * settings.max_request_size, int(_SHARE * total_memory_bytes()))
