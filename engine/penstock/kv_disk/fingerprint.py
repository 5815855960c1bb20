"""Fingerprint: what makes blocks of two starts the same.

A block's own key stands for its tokens and all before them (block_keys.py). Everything else that decides its
bits is in the fingerprint of its shelf: weights, config, layout, arithmetic, the code that computes, and the
machine.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from penstock.config import ResolvedConfig, card_number
from penstock.kernels import cpu_builds
from penstock.kernels.protocol import unwrapped
from penstock.loader import Model

#: Sources that decide the bits of keys and values: everything in these folders and files of the package.
COMPUTING = (
    *("kernels", "model", "weights", "spec.py", "state_layout.py"),
    *(
        "generation/executor.py",
        "generation/layer_caches.py",
        "generation/ram_attention.py",
        "generation/model_inputs.py",
    ),
    *("cache/kv_cache.py", "cache/spill/spilled_cache.py"),
)


def description(model: Model, config: ResolvedConfig, weights: dict[str, str]) -> dict[str, Any]:
    """Everything that blocks of a shelf have in common, by name, and its "fingerprint". `weights`: the
    SHA-256 of each file."""
    spec, cache = model.spec, model.executor.kv_cache
    found: dict[str, Any] = {
        "model": str(model.store.checkpoint.folder),
        "architecture": spec.architecture,
        "block_size": cache.block_size,
        "block_bytes": cache.block_bytes,
        "kv_layout": cache.layout.name,
    }
    deciding = found | {
        "model": weights,
        "config": model.store.checkpoint.config,
        "spec": repr(spec),
        "layout": repr(cache.layout),
        "settings": {
            name: getattr(config, name)
            for name in ("activations", "group_size", "weights", "kernels", "model_impl")
        },
        # A card whose own kernels fail their check is served by torch's.
        "computing": type(unwrapped(model.executor.family.kernels)).__name__,
        "arithmetic": arithmetic(config, spec.implementation),
    }
    text = json.dumps(deciding, sort_keys=True, default=str)
    return found | {"fingerprint": hashlib.sha256(text.encode()).hexdigest()}


def arithmetic(config: ResolvedConfig, implementation: str) -> dict[str, str]:
    """What rounds: our code, the libraries under it, and the processor or card."""
    found = {
        "code": code_digest(),
        "kernels": cpu_builds.build_fingerprint(),
        "torch": torch.__version__,
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_processor()}",
    }
    if config.kernels != "native":  # torch divides its sums by threads
        found["threads"] = str(config.num_threads)
    if (card := card_number(config.device)) is not None:
        found["card"] = f"{torch.cuda.get_device_name(card)}, CUDA {torch.version.cuda}"
    if implementation == "transformers":
        found["transformers"] = version("transformers")
    return found


@functools.cache
def code_digest() -> str:
    """SHA-256 of the sources that decide the bits of keys and values."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for source in _sources(package, COMPUTING):
        digest.update(os.fsencode(source.relative_to(package)) + b"\0" + source.read_bytes())
    return digest.hexdigest()


def _sources(package: Path, names: Iterable[str]) -> Iterable[Path]:
    for name in names:
        path = package / name
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (each for each in found if each.suffix in (".py", ".c", ".h", ".cu"))


def _processor() -> str:
    """The processor's name: libraries choose their code by it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
