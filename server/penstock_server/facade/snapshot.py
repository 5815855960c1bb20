"""EngineSnapshot: how an engine stands, for /metrics, /v1/engine/stats and the page."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_server.protocol.engine_bodies import StatsBody


@dataclass(frozen=True)
class EngineSnapshot:
    """At one moment: each number is whole, though not all of them need be of the same step."""

    stats: StatsBody
    #: Upper bounds of stats.steps_by_tokens; the last count is of what lies beyond.
    step_token_bounds: tuple[int, ...]
    #: Tokens per block of keys and values, and their type.
    block_size: int
    kv_dtype: str
    max_model_len: int
