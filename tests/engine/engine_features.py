"""The features of an engine that a test looks into: its tiers, its publisher, its machines."""

from __future__ import annotations

from typing import Any

from penstock.cache.disk.kv_store import KVStore
from penstock.engine import Engine
from penstock.kv_disk.tiers_observer import TiersObserver
from penstock.kv_events.publisher import Publisher
from penstock.nodes.piped_executor import PipedExecutor


def stores_of(engine: Engine) -> dict[str, KVStore[Any]]:
    """Its stores of keys and values beyond the KV cache, by their names: "host", "disk"."""
    tiers = (each.tiers for each in engine.observers if isinstance(each, TiersObserver))
    return {store.tier.name: store for stores in tiers for store in stores}


def disk_of(engine: Engine) -> KVStore[Any]:
    """The store on disk of an engine that has one."""
    return stores_of(engine)["disk"]


def publisher_of(engine: Engine) -> Publisher:
    (publisher,) = (each for each in engine.observers if isinstance(each, Publisher))
    return publisher


def pipe_of(engine: Engine) -> PipedExecutor:
    """Of the leader of several machines."""
    assert isinstance(engine.executor, PipedExecutor)
    return engine.executor
