"""From Settings to an Engine, with the progress on stderr."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from penstock import Engine, EngineConfig, Tokenizer
from penstock.loader.advice import read_advice
from penstock.memory.hardware import HardwareProfile
from penstock.memory.rates import is_measurable
from penstock.memory.spare_memory import SpareMemory
from penstock.model.pooling.find_pooling import PoolingWish
from penstock.model.registry import OpenModel, open_model
from penstock.weights.checkpoints.checksums import Checksums, lines
from penstock.weights.checkpoints.hub import REPOSITORY, find_config, find_model
from penstock.weights.conversion.convert import convert
from penstock.weights.conversion.report import ConversionReport
from penstock.weights.conversion.rounding import Rounding
from penstock.weights.store import WeightStore
from penstock_server.facade.machine import profile
from penstock_server.facade.model_folders import converted_copy
from penstock_server.settings.settings import Settings

logger = logging.getLogger(__name__)

#: The part of the layers after which a log gets a line: a log file can't show a bar.
_LOGGED_PART = 0.25


class LoadProgress:
    """Shows how many layers are loaded: as a bar in a terminal, elsewhere as a few lines."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._bar: Any = None
        self._is_terminal = sys.stderr.isatty()
        self._next_logged = 0

    def __call__(self, num_loaded: int, num_total: int) -> None:
        if self._is_terminal:
            self._draw(num_loaded, num_total)
        elif num_loaded >= self._next_logged:
            self._next_logged = num_loaded + max(1, round(_LOGGED_PART * num_total))
            logger.info("%s: %d of %d layers", self._name, num_loaded, num_total)

    def _draw(self, num_loaded: int, num_total: int) -> None:
        if self._bar is None:
            self._bar = tqdm(total=num_total, desc=self._name, unit="layer", leave=False)
        self._bar.n = num_loaded
        self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def find_converted(cache_dir: Path, model: str) -> Path | None:
    """The copy of a repository that `pull --convert` has made, if there is one."""
    copy = converted_copy(cache_dir, model)
    # os.path says no where a cache may not be read; then it holds nothing for us.
    if not REPOSITORY.fullmatch(model) or os.path.exists(model) or not os.path.isdir(copy):
        return None
    logger.info("%s is the converted copy in %s", model, copy)
    return copy


def _own_copy(settings: Settings) -> Path | None:
    return None if settings.revision else find_converted(settings.cache_dir, settings.model)


def find_folder(settings: Settings) -> Path:
    """The folder or GGUF file of the settings' model, fetched if need be; the copy of a repository that `pull
    --convert` has made, if there is one. Raises PenstockError."""
    return _own_copy(settings) or find_model(
        settings.model, settings.revision, settings.offline, settings.allow_pickle
    )


def find_config_folder(settings: Settings) -> Path:
    """find_folder(), for who needs no weights: none are fetched. Raises PenstockError."""
    return _own_copy(settings) or find_config(settings.model, settings.revision, settings.offline)


def engine_config(settings: Settings) -> EngineConfig:
    """The engine's settings, with the converted copy of the draft model, if there is one. Raises
    ConfigError."""
    config = settings.engine_config()
    copy = find_converted(settings.cache_dir, config.draft_model or "")
    return replace(config, draft_model=str(copy)) if copy else config


def open_source(settings: Settings) -> OpenModel:
    """The model of the settings, opened but not loaded, as it is converted: a folder in planes becomes INT8
    again, unless the settings ask for planes. Raises PenstockError."""
    return open_model(
        find_folder(settings),
        settings.ignore_unexpected_tensors,
        settings.group_size,
        settings.allow_pickle,
        settings.weights,
        keeps_planes=False,
        model_impl=settings.model_impl,
        wish=PoolingWish(settings.runner, settings.pooling, settings.score_tokens),
        keeps_mtp=True,
    )


def load_engine(
    settings: Settings,
    report: Callable[[int, int], None] | None = None,
    hardware: HardwareProfile | None = None,
    is_patient: bool = True,
    spare: SpareMemory | None = None,
) -> Engine:
    """The engine that the settings describe. Raises PenstockError.

    report: gets the number of loaded layers and the number of all layers. An exception that it raises ends
        loading.
    hardware: the machine for which the memory is planned; None: this machine as it is now.
    is_patient: wait until all layers that stay in memory are there; else the first step computes each as it
        arrives.
    spare: memory of models that left.
    """
    progress = LoadProgress(f"loading {settings.model_names[0]}")
    if settings.convert_to is not None:
        _convert(settings, settings.convert_to, report)
        settings = replace(settings, model=str(settings.convert_to), convert_to=None)

    def tell(num_loaded: int, num_total: int) -> None:
        progress(num_loaded, num_total)
        if report is not None:
            report(num_loaded, num_total)

    try:
        folder = find_folder(settings)
        # For a small model the disk is not measured, since measuring writes a file; a kept rate is used.
        hardware = hardware or profile(settings, folder, measures_disk=is_measurable(folder))
        if spare is not None:
            hardware = replace(hardware, free_ram_bytes=hardware.free_ram_bytes + spare.num_bytes)
        return Engine.load(
            folder,
            engine_config(settings),
            report_progress=tell,
            hardware=hardware,
            cache_folder=settings.cache_dir,
            is_patient=is_patient,
            nodes=settings.leader_config(settings.model),
            spare=spare,
        )
    finally:
        progress.close()


def load_tokenizer(settings: Settings, opened: OpenModel) -> Tokenizer:
    """The tokenizer of a model that is open. Raises PenstockError."""
    return Tokenizer.load(opened.store.checkpoint.folder, settings.guess_tokenizer)


def convert_with_checksums(
    settings: Settings,
    store: WeightStore,
    target: Path,
    report_progress: Callable[[int, int], None],
    rounding: Rounding | None = None,
    begun: Checksums | None = None,
) -> tuple[ConversionReport, list[str]]:
    """convert(), and the SHA-256 of the source's files as lines of text if the files are pickles. `begun` are
    taken if they are of these files. Raises as convert() does."""
    files, folder = store.checkpoint.pickles, store.checkpoint.folder
    advice = read_advice(folder) if folder.is_file() else None  # a folder has it in a file that is copied
    with closing(begun if begun and begun.files == files else Checksums(files)) as checksums:
        done = convert(store, target, report_progress, rounding, settings.guess_tokenizer, advice)
        return done, lines(checksums.wait())


def _convert(settings: Settings, target: Path, report: Callable[[int, int], None] | None) -> None:
    """Converts the model to `target`; a conversion that was begun goes on. Raises PenstockError."""
    store = open_source(settings).store
    logger.info("converting %s to %s", settings.model, target)

    def tell(num_done: int, num_total: int) -> None:
        if report is not None:
            report(0, store.num_layers)  # an exception here ends the conversion

    with store.checkpoint:
        done, checksums = convert_with_checksums(settings, store, target, tell)
    for line in checksums:
        logger.info("%s", line)
    if done.num_resumed < done.num_files:
        logger.info("converted %.1f GB in %.0f s", done.bytes_written / 1e9, done.total_s)


def spare_the_collector() -> None:
    """Takes all present objects out of the reach of Python's garbage collector, for a process that keeps what
    it has loaded to its end. The objects of torch and transformers are so many that looking at all of them
    stops the process for 0.3 s."""
    gc.collect()
    gc.freeze()
