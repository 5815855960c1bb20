"""Kept uses: how often each expert of a model was used, in a file from one start to the next."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from penstock.memory.planning.popularity import learned_weights
from penstock.spec import ModelFootprint, UnitKey

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1


def path_of(cache_folder: Path, model: Path) -> Path:
    """The file of a model's folder. Folders with one name in different places have different files."""
    place = hashlib.sha256(str(model.resolve()).encode()).hexdigest()[:8]
    return cache_folder / "experts" / f"{model.name}-{place}.json"


def read(path: Path) -> dict[UnitKey, float]:
    """Uses by expert. A file that is missing, broken or of another format gives {}: uses are learned
    anew."""
    try:
        content = json.loads(path.read_text())
        if content["format_version"] != FORMAT_VERSION:
            return {}
        return {
            UnitKey(stack, int(layer), number): float(count)
            for stack, layers in content["uses"].items()
            for layer, counts in layers.items()
            for number, count in enumerate(counts)
            if 0 < count < math.inf
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write(path: Path, uses: Mapping[UnitKey, float]) -> None:
    """Write the file as a whole or not at all. Where the folder can't be written, the next start learns
    anew."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"format_version": FORMAT_VERSION, "uses": _by_layer(uses)}))
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        logger.warning("the uses of experts can't be kept in %s: %s", path, error.strerror)


def _by_layer(uses: Mapping[UnitKey, float]) -> dict[str, dict[int, list[float]]]:
    """Uses by stack, layer and number of the expert."""
    found: dict[str, dict[int, list[float]]] = {}
    for (stack, layer, number, _), count in uses.items():
        assert number is not None
        counts = found.setdefault(stack, {}).setdefault(layer, [])
        counts += [0.0] * (number + 1 - len(counts))
        counts[number] = round(count, 3)
    return found


def learned(size: ModelFootprint, uses: Mapping[UnitKey, float]) -> ModelFootprint:
    """The footprint with the popularity of experts that the uses show."""
    if not uses:
        return size
    return replace(size, experts=replace(size.experts, weights=learned_weights(uses, size.experts)))
