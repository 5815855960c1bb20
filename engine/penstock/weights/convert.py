"""A checkpoint -> a Penstock folder: INT8 once and for all, one file per stack of tensors, each read at once.

The folder is a Hugging Face folder in the compressed-tensors `int-quantized` layout. It becomes one only with
its last file, config.json; until then `penstock.json` tells what is done, and the next run goes on there. A
file has its real name only when all of it is on the disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CapacityError, CheckpointError, ConfigError, CorruptFile
from penstock.spec import LayerLayout, TensorSpec
from penstock.text.tokenizer import Tokenizer
from penstock.weights import layer_file
from penstock.weights.checkpoint import read_json
from penstock.weights.store import TIED_HEAD, ModelTensors, WeightStore, stored_parts

logger = logging.getLogger(__name__)

MANIFEST = "penstock.json"
INDEX = "model.safetensors.index.json"
FORMAT_VERSION = 1
#: Files beside the weights that a converted folder needs as well: tokenizer, templates, licence.
COMPANIONS = (
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "*.tiktoken",
    "*.spm",
    "LICENSE*",
    "NOTICE*",
    "README.md",
)
#: A larger file than this is not a tokenizer.
MAX_COMPANION_BYTES = 256 << 20
#: Beyond what the files take: directory entries, the file system's own needs.
SPARE_BYTES = 64 << 20


@dataclass
class ConversionReport:
    """What a run did."""

    num_files: int = 0
    num_resumed: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    #: Seconds of reading and quantizing, of writing (both at the same time), and altogether.
    quantize_s: float = 0.0
    write_s: float = 0.0
    total_s: float = 0.0
    #: Relative error of each tensor that was quantized.
    errors: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Stack:
    file: str
    tensors: tuple[TensorSpec, ...]
    #: What they are called in the file, where that differs.
    stored: tuple[TensorSpec, ...]

    @property
    def num_bytes(self) -> int:
        return LayerLayout.of(self.tensors).num_bytes


def stacks(tensors: ModelTensors) -> list[_Stack]:
    """The files of a converted model."""
    found = [("model-embedding", tensors.embedding)]
    found += [(f"model-layer-{index:05d}", layer) for index, layer in enumerate(tensors.layers)]
    found += [("model-head", tensors.head)]
    files = [_Stack(f"{name}.safetensors", stack, stack) for name, stack in found]
    if is_tied(tensors):
        # transformers can't share an INT8 matrix between embedding and head, so the file has it twice.
        (matrix,) = (tensor for tensor in tensors.embedding if tensor.name == "embedding")
        head = replace(matrix, parts=("lm_head.weight",))
        files.append(_Stack("model-tied-head.safetensors", (matrix,), (head,)))
    return files


def is_tied(tensors: ModelTensors) -> bool:
    """Whether the embedding's matrix serves as the head's."""
    return all(tensor.name != "head" for tensor in tensors.head)


def convert(
    store: WeightStore,
    target: Path,
    report_progress: Callable[[int, int], None] | None = None,
) -> ConversionReport:
    """Convert the checkpoint that `store` has opened, or go on where a run was stopped.

    report_progress(done, total) is called with bytes after each file. Raises ConfigError (the target holds
    something else), CapacityError (the disk is too small), CheckpointError (the source is at fault).
    """
    started = time.perf_counter()
    files = stacks(store.tensors)
    manifest = _begin(store, target)
    report = ConversionReport(num_files=len(files))
    done = {file: entry for file, entry in manifest["files"].items() if _is_whole(target / file, entry)}
    manifest["files"] = done
    missing = [stack for stack in files if stack.file not in done]
    report.num_resumed = len(done)
    if store.checkpoint.folder.is_file():
        # Its tokenizer first: if that can't be read, nobody waits for the weights.
        Tokenizer.load(store.checkpoint.folder).backend.save_pretrained(target)
    check_space(target, sum(stack.num_bytes for stack in missing))
    total = sum(stack.num_bytes for stack in files)
    finished = sum(stack.num_bytes for stack in files if stack.file in done)
    for stack, entry in _write_stacks(store, target, missing, report):
        done[stack.file] = entry
        layer_file.write_json(target / MANIFEST, manifest)
        finished += stack.num_bytes
        if report_progress is not None:
            report_progress(finished, total)
    report.errors = {name: error for entry in done.values() for name, error in entry["errors"].items()}
    _finish(store, target, files, manifest)
    report.total_s = time.perf_counter() - started
    return report


def verify(folder: Path, report_progress: Callable[[int, int], None] | None = None) -> int:
    """Read a converted folder and compare the checksums; returns the number of files.

    Raises CorruptFile naming the first file that is not what was written.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {MANIFEST}, so it was not made by penstock convert")
    files = read_json(path)["files"]
    for index, (name, entry) in enumerate(files.items(), 1):
        try:
            is_good = layer_file.data_checksum(folder / name) == entry[layer_file.CHECKSUM]
        except OSError as error:
            raise CorruptFile(f"{folder / name} can't be read: {error.strerror}") from error
        if not is_good:
            raise CorruptFile(
                f"{folder / name} is not what was written: its checksum differs. Delete it and run penstock "
                "convert again"
            )
        if report_progress is not None:
            report_progress(index, len(files))
    return len(files)


def check_finished(folder: Path) -> None:
    """Raises CheckpointError for a folder whose conversion was stopped."""
    if (folder / MANIFEST).is_file() and not (folder / "config.json").is_file():
        source = read_json(folder / MANIFEST).get("source", {}).get("folder", "MODEL")
        raise CheckpointError(
            f"the conversion to {folder} is not finished; run `penstock convert {source} {folder}` again: it "
            "goes on where it stopped"
        )


def _begin(store: WeightStore, target: Path) -> dict[str, Any]:
    """The manifest of a run that was stopped, or a new one."""
    source = _identity(store)
    path = target / MANIFEST
    if path.is_file():
        manifest = read_json(path)
        if manifest.get("format_version") == FORMAT_VERSION and manifest.get("source") == source:
            return manifest
        other = manifest.get("source", {}).get("folder")
        raise ConfigError(
            f"{target} holds a conversion of {other}, which is something else or has changed since; choose "
            "another folder or delete this one"
        )
    # A run that was killed at its very beginning leaves the half-written manifest.
    if target.exists() and any(path.name != f"{MANIFEST}.part" for path in target.iterdir()):
        raise ConfigError(f"{target} is not empty; choose a new folder")
    target.mkdir(parents=True, exist_ok=True)
    manifest = {"format_version": FORMAT_VERSION, "source": source, "files": {}}
    layer_file.write_json(path, manifest)
    return manifest


def _identity(store: WeightStore) -> dict[str, Any]:
    """What tells a source from another: its config, and names, sizes and times of its files."""
    checkpoint = store.checkpoint
    config = json.dumps(checkpoint.config, sort_keys=True).encode()
    files = sorted({entry.file for entry in checkpoint.entries.values()})
    return {
        "folder": str(checkpoint.folder.resolve()),
        "config_sha256": hashlib.sha256(config).hexdigest(),
        "group_size": max(
            (tensor.group_size for layer in store.tensors.layers for tensor in layer), default=0
        ),
        "files": {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files},
    }


def _is_whole(path: Path, entry: dict[str, Any]) -> bool:
    return path.is_file() and path.stat().st_size == entry["file_bytes"]


def check_space(target: Path, needed: int) -> None:
    """Raises CapacityError if the disk has no room for so many bytes."""
    free = shutil.disk_usage(target).free
    if needed and needed + SPARE_BYTES > free:
        raise CapacityError(
            f"the converted model needs {needed / 1e9:.1f} GB more, but only {free / 1e9:.1f} GB are free "
            f"where {target} lies; make room or choose another disk"
        )


def _write_stacks(
    store: WeightStore, target: Path, missing: list[_Stack], report: ConversionReport
) -> Iterator[tuple[_Stack, dict[str, Any]]]:
    """Quantize one stack while the one before is written: two buffers, however many stacks."""
    size = max((stack.num_bytes for stack in missing), default=0)
    buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(min(2, len(missing)))]
    with ThreadPoolExecutor(1, "penstock-writer") as writer:
        pending: tuple[_Stack, dict[str, float], Future[dict[str, Any]]] | None = None
        for index, stack in enumerate(missing):
            started, before = time.perf_counter(), store.bytes_read
            buffer = buffers[index % 2][: stack.num_bytes]
            errors = store.read_stack(stack.tensors, buffer)
            report.quantize_s += time.perf_counter() - started
            report.bytes_read += store.bytes_read - before
            if pending is not None:
                yield pending[0], _entry(pending, report)
            head = layer_file.header(stack.stored, _part_rows(store, stack.tensors))
            pending = stack, errors, writer.submit(_write, target / stack.file, head, buffer)
        if pending is not None:
            yield pending[0], _entry(pending, report)


def _write(path: Path, head: bytes, buffer: Tensor) -> dict[str, Any]:
    started = time.perf_counter()
    checksum = layer_file.write(path, head, buffer)
    return {
        "file_bytes": len(head) + buffer.numel(),
        layer_file.CHECKSUM: checksum,
        "seconds": time.perf_counter() - started,
    }


def _entry(
    pending: tuple[_Stack, dict[str, float], Future[dict[str, Any]]], report: ConversionReport
) -> dict[str, Any]:
    """Wait for a file; what the manifest says about it. Raises CapacityError if the disk is full."""
    stack, errors, written = pending
    try:
        entry = written.result()
    except OSError as error:
        raise CapacityError(
            f"writing {stack.file} failed: {error.strerror}. What was written before is kept: run the same "
            "command again when this is mended"
        ) from error
    report.write_s += entry.pop("seconds")
    report.bytes_written += entry["file_bytes"]
    return entry | {"errors": errors}


def _part_rows(store: WeightStore, tensors: tuple[TensorSpec, ...]) -> dict[str, int]:
    """Rows of the parts of fused tensors."""
    parts = [part for tensor in tensors if len(tensor.parts) > 1 for part in tensor.parts]
    return {part: store.entry(part).shape[0] for part in parts}


def _finish(store: WeightStore, target: Path, files: list[_Stack], manifest: dict[str, Any]) -> None:
    """Everything that is not weights; config.json, which makes the folder a model, last of all."""
    folder = store.checkpoint.folder
    for path in sorted({path for pattern in COMPANIONS for path in folder.glob(pattern)}):
        is_ours = path.name in ("config.json", MANIFEST, INDEX) or path.name.endswith(".index.json")
        if path.is_file() and not is_ours and path.stat().st_size <= MAX_COMPANION_BYTES:
            shutil.copyfile(path, target / path.name)
    names = {name: stack.file for stack in files for name, _ in stored_parts(stack.stored)}
    total = sum(stack.num_bytes for stack in files)
    layer_file.write_json(target / INDEX, {"metadata": {"total_size": total}, "weight_map": names})
    config = store.checkpoint.config | {"quantization_config": quantization_config(store.tensors)}
    if is_tied(store.tensors):
        config |= {"tie_word_embeddings": False, TIED_HEAD: True}
    layer_file.write_json(target / "config.json", config)


def quantization_config(tensors: ModelTensors) -> dict[str, Any]:
    """What compressed-tensors calls our INT8; modules that stay float32 are named. Embeddings have scales per
    channel whatever the layers have."""
    floats = [
        part.removesuffix(".weight")
        for tensor in tensors.embedding
        if tensor.kind == "float32" and len(tensor.shape) == 2
        for part in tensor.parts
    ]
    per_channel = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    group_size = max((tensor.group_size for layer in tensors.layers for tensor in layer), default=0)
    groups = {"Linear Embedding": per_channel}
    if group_size:
        per_group = per_channel | {"strategy": "group", "group_size": group_size}
        groups = {"Linear": per_group, "Embedding lm_head" if is_tied(tensors) else "Embedding": per_channel}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{index}": {
                "targets": targets.split(),
                "weights": weights,
                "format": "int-quantized",  # else compressed-tensors takes weight-only INT8 for packed
            }
            for index, (targets, weights) in enumerate(groups.items())
        },
        "ignore": floats,
    }
