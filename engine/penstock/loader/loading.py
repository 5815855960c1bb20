"""From a model's name to the parts of an engine."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from penstock.config import EngineConfig
from penstock.kernels import Kernels
from penstock.loader.advice import read_advice
from penstock.loader.parts import LoadedModel, ModelSource, PlannedModel, Share
from penstock.loader.planning import plan_model
from penstock.loader.reading import begin_reading
from penstock.memory.hardware import (
    HardwareProfile,
)
from penstock.memory.lane import Lane, find_lane
from penstock.model.pooling.find_pooling import wish_of
from penstock.model.registry import OpenModel, open_model
from penstock.text.tokenizer import Tokenizer
from penstock.weights.adapters.loaded_adapters import with_adapter_bytes
from penstock.weights.checkpoints.checksums import Checksums


def load_model(
    source: ModelSource,
    config: EngineConfig,
    hardware: HardwareProfile | None = None,
    share: Share | None = None,
) -> LoadedModel:
    """Load a model by its name. Engine.load() describes the arguments and the errors. The tokenizer is made
    while weights are read. `share` says which layers are this machine's."""
    from penstock.weights.checkpoints.hub import find_model

    config = with_adapter_bytes(config)
    folder = find_model(source.model, source.revision, source.offline, allow_pickle=config.allow_pickle)
    opened = open_folder(folder, config)
    try:
        tokenizer = source.tokenizer or begin_tokenizer(folder, config)
        advice = read_advice(folder)  # read before there is a lane, which would have to be closed
        lane = find_lane(config.device, source.spare)
        if share is not None:
            opened, config = share(opened, config, lane, hardware)
        planned = plan_on(lane, opened, config, hardware, source.cache_folder)
        return begin_reading(planned, tokenizer, source.cache_folder, advice)
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


def plan_on(
    lane: Lane,
    opened: OpenModel,
    config: EngineConfig,
    hardware: HardwareProfile | None = None,
    cache_folder: Path | None = None,
    kernels: Kernels | None = None,
) -> PlannedModel:
    """plan_model(), which closes the lane if it raises."""
    with contextlib.ExitStack() as undo:
        undo.callback(lane.close)
        planned = plan_model(opened, config, lane, hardware, cache_folder, kernels)
        undo.pop_all()
    return planned
