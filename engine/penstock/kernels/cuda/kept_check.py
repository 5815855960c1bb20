"""Whether the kernels of a card were compared with the reference: once for each card, driver, compiler and
source, kept in a file."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
from pathlib import Path

import torch

from penstock.kernels.cuda.kernels import CudaKernels
from penstock.kernels.cuda.launcher import CudaLauncher
from penstock.kernels.cuda.self_check import mismatches

logger = logging.getLogger(__name__)

FILE = "cuda-checked.json"
DRIVER_FILE = Path("/proc/driver/nvidia/version")


def check_card(
    launcher: CudaLauncher, device: torch.device, activations: str, build: str, cache_folder: Path | None
) -> list[str]:
    """What is wrong with the kernels on a card, by self_check.mismatches(). `build` tells apart what was
    compiled. The answer is kept in `cache_folder`, so that each start but the first one takes no time."""
    key = f"{card_identity(device)}, {driver_version()}, {build}, {activations}"
    path = None if cache_folder is None else cache_folder / FILE
    kept = {} if path is None else _read(path)
    if key in kept:
        return kept[key]
    found = mismatches(CudaKernels(launcher, activations), device, activations, launcher.num_multiprocessors)
    logger.info("the kernels were compared with the reference on %s: %d mismatches", key, len(found))
    if path is not None:
        _keep(path, kept | {key: found})
    return found


def card_identity(device: torch.device) -> str:
    """Tells a card apart from all others, those of the same name too: one of them may be broken, or lie in a
    slower slot. The number would not do: it changes with CUDA_VISIBLE_DEVICES."""
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {properties.uuid}"


def driver_version() -> str:
    """The driver by its own words, and the newest CUDA that it knows."""
    number = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    try:
        line = DRIVER_FILE.read_text().splitlines()[0]
    except (OSError, IndexError):
        line = "driver"
    return f"{line.removeprefix('NVRM version: ')} (CUDA {number.value // 1000}.{number.value % 1000 // 10})"


def _read(path: Path) -> dict[str, list[str]]:
    """What is kept; {} where the file is missing or damaged, so that the card is checked anew."""
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    is_sound = isinstance(kept, dict) and all(isinstance(found, list) for found in kept.values())
    return kept if is_sound else {}


def _keep(path: Path, checked: dict[str, list[str]]) -> None:
    """Write the file as a whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(checked, indent=1))
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        logger.warning("the check of the card can't be kept in %s: %s", path.parent, error.strerror)
