"""pooling_config(): what an engine's settings become for a model that pools. Numbers only."""

from __future__ import annotations

from dataclasses import replace

from penstock.config import EngineConfig
from penstock.goes_with import Feature, check_together
from penstock.model.pooling.pooling_spec import PoolingSpec
from penstock.spec import ModelSpec


def pooling_config(config: EngineConfig, spec: ModelSpec, pooling: PoolingSpec) -> EngineConfig:
    """The settings without guesses of tokens, in which a step has room for the longest text where every token
    sees the whole text; keys and values are needed for one step alone then. Blocks that other texts computed
    serve only where nothing but the last token's row is wanted. Raises ConfigError."""
    is_whole = spec.sees_prompt_both_ways
    kinds = {Feature.POOLED, *([Feature.WHOLE_TEXTS] if is_whole or pooling.kind != "last" else [])}
    check_together(config.features | kinds, spec.architecture)
    config = replace(config, speculation="off")
    if Feature.WHOLE_TEXTS in kinds:
        config = replace(config, enable_prefix_caching=False)
    if not is_whole:
        return config
    num_step = max(config.max_num_batched_tokens, config.max_model_len or spec.max_position_embeddings)
    sizes = (config.kv_cache_bytes, config.num_kv_tokens, config.kv_cache_share)
    if all(size is None for size in sizes):
        # The last block of each sequence may be nearly empty.
        config = replace(config, num_kv_tokens=num_step + config.max_num_seqs * config.block_size)
    return replace(config, max_num_batched_tokens=num_step)
