"""EngineSnapshot: the counters of an engine at one moment, for /metrics, /v1/engine/stats and the page."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_server.protocol.engine_bodies import StatsBody


@dataclass(frozen=True)
class EngineSnapshot:
    """The counters of an engine. Each number is consistent by itself, but two numbers may be of two steps."""

    stats: StatsBody
    #: Upper bounds of stats.steps_by_tokens; the last count there is of steps beyond the last bound.
    step_token_bounds: tuple[int, ...]
    #: Tokens in a block of keys and values, and the type of keys and values.
    block_size: int
    kv_dtype: str
    max_model_len: int
