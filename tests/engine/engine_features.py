"""The features of an engine that a test looks into: its tiers, its publisher, its machines."""

from __future__ import annotations

from typing import Any

from penstock.engine import Engine
from penstock.kv_events.publisher import Publisher
from penstock.memory.kv_disk.kv_store import KVStore
from penstock.nodes.piped_executor import PipedExecutor


def disk_of(engine: Engine) -> KVStore[Any]:
    """The store on disk of an engine that has one."""
    store = engine.kv_tiers.find("disk")
    assert store is not None
    return store


def publisher_of(engine: Engine) -> Publisher:
    (publisher,) = (each for each in engine.observers if isinstance(each, Publisher))
    return publisher


def pipe_of(engine: Engine) -> PipedExecutor:
    """Of the leader of several machines."""
    assert isinstance(engine.executor, PipedExecutor)
    return engine.executor
