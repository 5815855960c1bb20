"""From Settings to an Engine, with the progress on stderr."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from penstock.engine import Engine
from penstock.errors import CorruptFile
from penstock_server.inputs import sampling_defaults
from penstock_server.settings import Settings

logger = logging.getLogger(__name__)

#: In a log file, where a bar would be a mess, a line tells of this part of the layers.
_LOGGED_PART = 0.25


class LoadProgress:
    """Shows how many layers are loaded: a bar in a terminal, a few lines elsewhere."""

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


def load_engine(
    settings: Settings, report: Callable[[int, int], None] | None = None
) -> tuple[Engine, dict[str, float]]:
    """The engine, and what its model's generation_config.json says about sampling.

    `report` is told the numbers of loaded and of all layers, beside the user. Raises PenstockError.
    """
    progress = LoadProgress(f"loading {settings.model_names[0]}")

    def tell(num_loaded: int, num_total: int) -> None:
        progress(num_loaded, num_total)
        if report is not None:
            report(num_loaded, num_total)

    try:
        engine = Engine.load(
            settings.model,
            settings.engine_config(),
            report_progress=tell,
            offline=settings.offline,
            revision=settings.revision,
        )
    finally:
        progress.close()
    return engine, sampling_defaults(_generation_config(engine.folder))


def _generation_config(folder: Path) -> Mapping[str, Any]:
    """Empty if there is none. Raises CorruptFile if it is no JSON object."""
    path = folder / "generation_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CorruptFile(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise CorruptFile(f"{path} is no JSON object")
    return config
