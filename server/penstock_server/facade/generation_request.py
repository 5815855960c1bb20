"""GenerationRequest: what is asked of the engine, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from penstock import SamplingParams


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt, and how it is to be answered."""

    prompt_token_ids: list[int]
    params: SamplingParams
    #: What its outputs carry; None: one of the engine's own.
    request_id: str | None = None
    #: Lower runs earlier.
    priority: int = 0
    #: Whose share of the engine it takes.
    client: str = ""
    #: Keys and values are shared only among requests with the same one.
    cache_salt: str = ""
    #: Seconds from now until which its first step must have begun, and all must have ended. None: no limit.
    queue_timeout_s: float | None = None
    deadline_s: float | None = None
