"""A model that is ready to compute, and a model whose memory is planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from penstock.config import EngineConfig, ResolvedConfig
from penstock.generation.executor import Executor
from penstock.kernels import Kernels, Matrix
from penstock.memory.hardware import (
    HardwareProfile,
)
from penstock.memory.lane import Lane
from penstock.memory.planning.cost import Predict
from penstock.memory.planning.plan import MemoryPlan
from penstock.memory.spare_memory import SpareMemory
from penstock.model.pooling.pooling_spec import PoolingSpec
from penstock.model.registry import OpenModel
from penstock.spec import KVLayout, ModelFootprint, ModelSpec
from penstock.text.tokenizer import Tokenizer
from penstock.weights.store import WeightStore
from penstock.weights.streamer import LayerStreamer


@dataclass(frozen=True)
class Model:
    """A model that is ready to compute: its code, its weights in all memories, its keys and values. Resident
    layers may still be on their way into memory."""

    spec: ModelSpec
    tokenizer: Tokenizer
    store: WeightStore
    streamer: LayerStreamer
    executor: Executor
    #: The longest sequence that model, config and KV cache allow.
    max_model_len: int
    #: The KV cache has room for fewer tokens than the model's context, so that max_model_len is less.
    is_context_cut: bool
    #: A request gets the same bits in any company.
    is_invariant: bool
    #: The model's own advice (generation_config.json), for callers that build SamplingParams.
    default_sampling: dict[str, object]
    #: Where the uses of experts are kept, if they are.
    uses_file: Path | None = None

    @property
    def pooling(self) -> PoolingSpec | None:
        """How it makes vectors or scores; None for a model that writes."""
        return self.executor.family.pooling

    @property
    def max_text_len(self) -> int:
        """Tokens of a prompt and its answer; the model's own soft prompt takes what is left."""
        return self.max_model_len - len(self.spec.soft_prompt)

    def close(self) -> None:
        """Stop reading, close the files, and give back a GPU's memory and what was pinned. The host's memory
        is freed when this object and all views of its weights are gone. Keeps the uses of experts."""
        experts = self.streamer.tiers.nearest_experts
        if experts is not None and self.uses_file is not None and experts.uses.num_uses:
            from penstock.memory import kept_uses

            kept_uses.write(self.uses_file, experts.uses.counts)
        self.streamer.close()
        self.executor.kv_cache.close()
        self.store.close()


#: Says which part of a model this machine computes, and by what config, from the model, the config for all of
#: it, the lane and what the machine has. If it raises, it closes the lane.
Share = Callable[[OpenModel, EngineConfig, Lane, HardwareProfile | None], tuple[OpenModel, EngineConfig]]


@dataclass(frozen=True)
class LoadedModel:
    """The parts of an engine."""

    model: Model
    plan: MemoryPlan
    config: ResolvedConfig
    #: (num_tokens, num_sampled) of a step -> how long it should take.
    predict: Predict


class SharedEnds(NamedTuple):
    """Matrices of a model in memory that a second model has, too. The head's lies where both compute. Without
    a head, that is its own."""

    embedding: Matrix
    head: Matrix | None = None


class PlannedModel(NamedTuple):
    """A model whose files are open, and for which nothing is allocated yet."""

    opened: OpenModel
    kernels: Kernels
    #: "auto" is decided for kernels, device and threads.
    config: EngineConfig
    kv_layout: KVLayout
    lane: Lane
    hardware: HardwareProfile
    size: ModelFootprint
    plan: MemoryPlan


@dataclass(frozen=True)
class ModelSource:
    """A model's name and where its parts are found, as Engine.load() gets them."""

    model: str | Path
    offline: bool = False
    revision: str | None = None
    #: In place of the folder's own.
    tokenizer: Tokenizer | None = None
    #: Keeps kernels that were compiled for a GPU, and the uses of experts.
    cache_folder: Path | None = None
    #: Memory of models that left.
    spare: SpareMemory | None = None
