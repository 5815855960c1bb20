"""From a model's name to the parts of an engine."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from penstock.config import EngineConfig
from penstock.kernels import Kernels
from penstock.loader.advice import read_advice
from penstock.loader.parts import LoadedModel, Share
from penstock.loader.planning import plan_model
from penstock.loader.reading import begin_reading
from penstock.memory.hardware import (
    HardwareProfile,
)
from penstock.memory.lane import Lane, find_lane
from penstock.memory.spare_memory import SpareMemory
from penstock.model.pooling.find_pooling import wish_of
from penstock.model.registry import OpenModel, open_model
from penstock.spec import KVLayout
from penstock.text.tokenizer import Tokenizer
from penstock.weights.adapters.loaded_adapters import with_adapter_bytes
from penstock.weights.checkpoints.checksums import Checksums
from penstock.weights.checkpoints.hub import find_model


def load_model(
    model: str | Path,
    config: EngineConfig,
    offline: bool,
    revision: str | None,
    tokenizer: Tokenizer | None,
    hardware: HardwareProfile | None,
    cache_folder: Path | None,
    spare: SpareMemory | None = None,
    share: Share | None = None,
) -> LoadedModel:
    """Load a model by its name. Engine.load() describes the arguments and the errors. The tokenizer is made
    while weights are read. `share` says which layers are this machine's."""
    config = with_adapter_bytes(config)
    folder = find_model(model, revision, offline, allow_pickle=config.allow_pickle)
    opened = open_folder(folder, config)
    try:
        found = tokenizer or begin_tokenizer(folder, config)
        advice = read_advice(folder)  # read before there is a lane, which would have to be closed
        lane = find_lane(config.device, spare)
        if share is not None:
            opened, config = share(opened, config, lane, hardware)
        return assemble(opened, found, config, lane, hardware, cache_folder, advice)
    except BaseException:
        opened.store.close()
        raise


def open_folder(folder: Path, config: EngineConfig) -> OpenModel:
    """Open a model's files as the config says. Raises what open_model() raises."""
    opened = open_model(
        folder,
        config.ignore_unexpected_tensors,
        config.group_size,
        config.allow_pickle,
        config.weights,
        model_impl=config.model_impl,
        wish=wish_of(config),
    )
    if files := opened.store.checkpoint.pickles:
        Checksums(files, is_logged=True)
    return opened


def begin_tokenizer(folder: Path, config: EngineConfig) -> Future[Tokenizer]:
    """The tokenizer of a folder or file, which a thread makes."""
    making = ThreadPoolExecutor(1, "penstock-tokenizer")
    found = making.submit(Tokenizer.load, folder, config.guess_tokenizer)
    making.shutdown(wait=False)
    return found


def assemble(
    opened: OpenModel,
    tokenizer: Tokenizer | Future[Tokenizer],
    config: EngineConfig,
    lane: Lane,
    hardware: HardwareProfile | None = None,
    cache_folder: Path | None = None,
    default_sampling: dict[str, object] | None = None,
    kernels: Kernels | None = None,
    kv_layout: KVLayout | None = None,
) -> LoadedModel:
    """Plan the memory for a model whose files are open, as plan_model() does, allocate the memory and begin
    to read. If assemble() raises, the lane is closed; the store stays open."""
    with contextlib.ExitStack() as undo:
        undo.callback(lane.close)
        planned = plan_model(opened, config, lane, hardware, cache_folder, kernels, kv_layout)
        undo.pop_all()
    return begin_reading(planned, tokenizer, cache_folder, default_sampling)
