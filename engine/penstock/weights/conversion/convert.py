"""A checkpoint -> a Penstock folder: INT8 once and for all, one file per unit of tensors, each read at once.

The folder is a Hugging Face folder in the compressed-tensors `int-quantized` layout. It becomes one only with
its last file, config.json; until then `penstock.json` tells what is done, and the next run goes on there. A
file has its real name only when all of it is on the disk.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.errors import CapacityError
from penstock.memory.hardware import num_physical_cores
from penstock.spec import DECODER
from penstock.text.tokenizer import Tokenizer
from penstock.weights.checkpoints.checkpoint import read_bytes
from penstock.weights.conversion import layer_file, whole_file
from penstock.weights.conversion import manifest as manifests
from penstock.weights.conversion.manifest import CONFIG, MANIFEST
from penstock.weights.store import TIED_HEAD, WeightStore
from penstock.weights.tensors import ModelTensors, TensorSpec, Unit, UnitLayout, stored_arrays
from penstock.weights.weight_format import INT8, Int8

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
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
#: Quantizing threads: four of them outrun the thread that computes checksums and writes, and most disks.
MAX_THREADS = 4
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
    #: By calibration, which the errors don't show.
    is_compensated: bool = False
    #: Relative error of each tensor that was quantized, to the nearest.
    errors: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class UnitFile:
    """A file of a converted model: embedding, a unit, or head."""

    name: str
    tensors: tuple[TensorSpec, ...]
    #: What they are called in the file, where that differs.
    stored: tuple[TensorSpec, ...]

    @property
    def num_bytes(self) -> int:
        return UnitLayout.of(self.tensors).num_bytes


def unit_files(tensors: ModelTensors) -> list[UnitFile]:
    """The files of a converted model, in the order of `ModelTensors.groups`, and one with a tied head."""
    names = ["model-embedding", *map(_unit_name, tensors.units), "model-head"]
    found = zip(names, tensors.groups, strict=True)
    files = [UnitFile(f"{name}.safetensors", group, group) for name, group in found]
    if tensors.is_tied:
        # transformers can't share an INT8 matrix between embedding and head, so the file has it twice.
        matrix = tensors.output_matrix
        head = replace(matrix, parts=("lm_head.weight",))
        files.append(UnitFile("model-tied-head.safetensors", (matrix,), (head,)))
    return files


def _unit_name(unit: Unit) -> str:
    stack, layer, expert = unit.key
    return (
        "model"
        + ("" if stack == DECODER else f"-{stack}")
        + f"-layer-{layer:05d}"
        + ("" if expert is None else f"-expert-{expert:05d}")
    )


class Rounding(Protocol):
    """How weights become INT8. Groups of tensors come in their order: embedding, units, head."""

    @property
    def name(self) -> str | None:
        """The same name, the same integers; None for the nearest."""

    @property
    def looks_back(self) -> bool:
        """Whether it has to see, by look_at(), what an earlier run has converted."""

    def read(self, tensors: tuple[TensorSpec, ...], buffer: Tensor) -> dict[str, float]:
        """WeightStore.read_with_errors()."""

    def look_at(self, tensors: tuple[TensorSpec, ...], buffer: Tensor) -> None: ...


class Nearest:
    """The store's own."""

    name = None
    looks_back = False

    def __init__(self, store: WeightStore, num_threads: int) -> None:
        self.read = partial(store.read_with_errors, num_threads=num_threads)

    def look_at(self, tensors: tuple[TensorSpec, ...], buffer: Tensor) -> None: ...


def convert(
    store: WeightStore,
    target: Path,
    report_progress: Callable[[int, int], None] | None = None,
    rounding: Rounding | None = None,
) -> ConversionReport:
    """Convert the checkpoint that `store` has opened, or go on where a run was stopped.

    report_progress(done, total) is called with bytes after each file. `rounding` takes the place of the
    store's own, to the nearest. Raises ConfigError (the target holds something else), CapacityError (the disk
    is too small), CheckpointError (the source is at fault, or somebody else is converting there).
    """
    started = time.perf_counter()
    way = {"group_size": store.tensors.group_size, "rounding": rounding.name if rounding else None}
    source, files = manifests.source_of(store.checkpoint, way), unit_files(store.tensors)
    report = ConversionReport(
        num_files=len(files), num_resumed=len(files), is_compensated=rounding is not None
    )
    manifest = manifests.find(target, source)
    if manifest is None or not _is_current(store, target, files, manifest):
        with whole_file.lock(target):
            manifest = manifests.find(target, source) or manifests.begin(target, source)
            _convert(
                store,
                target,
                files,
                manifest,
                report,
                report_progress,
                rounding or Nearest(store, min(num_physical_cores(), MAX_THREADS)),
            )
    for entry in manifest["files"].values():
        report.errors |= entry.get("errors", {})
    report.total_s = time.perf_counter() - started
    return report


def _is_current(store: WeightStore, target: Path, files: list[UnitFile], manifest: dict[str, Any]) -> bool:
    """Whether there is nothing to do, so that the folder need not even be writable."""
    if not manifests.is_finished(target, manifest) or any(map(whole_file.is_leftover, target.iterdir())):
        return False
    entries = manifest["files"]
    return manifest["format_version"] != manifests.FORMAT_VERSION or (
        all(unit_file.name in entries for unit_file in files)
        and all(
            entries.get(name) == whole_file.describe_bytes(content)
            for name, content in _companions(store.checkpoint.folder).items()
        )
    )


def _convert(
    store: WeightStore,
    target: Path,
    files: list[UnitFile],
    manifest: dict[str, Any],
    report: ConversionReport,
    report_progress: Callable[[int, int], None] | None,
    rounding: Rounding,
) -> None:
    companions = _companions(store.checkpoint.folder)  # if they can't be read, nobody waits for the weights
    done = manifests.whole_files(target, manifest)
    for name in manifest["files"].keys() - done.keys():
        if (target / name).exists():
            logger.warning("%s is not what was written: it is written again", target / name)
    manifest["files"] = done
    missing = [unit_file for unit_file in files if unit_file.name not in done]
    report.num_resumed = len(files) - len(missing)
    check_space(target, sum(unit_file.num_bytes for unit_file in missing))
    total = sum(unit_file.num_bytes for unit_file in files)
    finished = sum(unit_file.num_bytes for unit_file in files if unit_file.name in done)
    # Calibrating is products and factorizations, which gain by threads.
    threads = nullcontext() if rounding.looks_back else _one_thread()
    with threads, closing(_write_units(store, target, files, done, report, rounding)) as written:
        for unit_file, entry in written:
            done[unit_file.name] = entry
            whole_file.write_json(target / MANIFEST, manifest)
            finished += unit_file.num_bytes
            if report_progress is not None:
                report_progress(finished, total)
    _finish(store, target, files, manifest, companions)


@contextmanager
def _one_thread() -> Iterator[None]:
    """torch's operations on one thread: chunks are so small that threads which meet after each operation wait
    longer than they compute, much longer where other processes want the cores as well."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_space(target: Path, needed: int) -> None:
    """Raises CapacityError if the disk has no room for so many bytes."""
    free = shutil.disk_usage(target).free
    if needed and needed + SPARE_BYTES > free:
        raise CapacityError(
            f"the converted model needs {needed / 1e9:.1f} GB more, but only {free / 1e9:.1f} GB are free "
            f"where {target} lies; make room or choose another disk"
        )


def _write_units(
    store: WeightStore,
    target: Path,
    files: list[UnitFile],
    done: dict[str, Any],
    report: ConversionReport,
    rounding: Rounding,
) -> Generator[tuple[UnitFile, dict[str, Any]], None, None]:
    """Quantize one unit while the one before is written: two buffers, however many units. `done` are files of
    an earlier run."""
    done = dict(done)
    size = max(
        (unit_file.num_bytes for unit_file in files if rounding.looks_back or unit_file.name not in done),
        default=0,
    )
    buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(min(2, len(files)))]
    with ThreadPoolExecutor(1, "penstock-writer") as writer:
        pending: tuple[UnitFile, dict[str, float], Future[dict[str, Any]]] | None = None
        for unit_file in files:
            if unit_file.name in done:
                if rounding.looks_back:
                    layer_file.read(target / unit_file.name, buffers[-1][: unit_file.num_bytes])
                    rounding.look_at(unit_file.tensors, buffers[-1][: unit_file.num_bytes])
                continue
            started, before = time.perf_counter(), store.bytes_read
            buffers.reverse()  # the first one is being written
            buffer = buffers[0][: unit_file.num_bytes]
            errors = rounding.read(unit_file.tensors, buffer)
            report.quantize_s += time.perf_counter() - started
            report.bytes_read += store.bytes_read - before
            if pending is not None:
                yield pending[0], _entry(pending, report)
            head = layer_file.header(unit_file.stored, _part_rows(store, unit_file.tensors))
            pending = unit_file, errors, writer.submit(_write, target / unit_file.name, head, buffer)
        if pending is not None:
            yield pending[0], _entry(pending, report)


def _write(path: Path, head: bytes, buffer: Tensor) -> dict[str, Any]:
    started = time.perf_counter()
    entry = layer_file.write(path, head, buffer)
    return entry | {"seconds": time.perf_counter() - started}


def _entry(
    pending: tuple[UnitFile, dict[str, float], Future[dict[str, Any]]], report: ConversionReport
) -> dict[str, Any]:
    """Wait for a file; what the manifest says about it."""
    unit_file, errors, written = pending
    entry = written.result()
    report.write_s += entry.pop("seconds")
    report.bytes_written += entry["file_bytes"]
    return entry | {"errors": errors}


def _part_rows(store: WeightStore, tensors: tuple[TensorSpec, ...]) -> dict[str, int]:
    """Rows of the parts of fused tensors."""
    parts = [part for tensor in tensors if len(tensor.parts) > 1 for part in tensor.parts]
    return {part: store.entry(part).shape[0] for part in parts}


def _finish(
    store: WeightStore,
    target: Path,
    files: list[UnitFile],
    manifest: dict[str, Any],
    companions: dict[str, bytes],
) -> None:
    """Everything that is not weights; config.json, which makes the folder a model, last of all."""
    entries = manifest["files"]
    for name, content in companions.items():
        if entries.get(name) != whole_file.describe_bytes(content):
            entries[name] = whole_file.write(target / name, [content])
    names = {array.name: unit_file.name for unit_file in files for array in stored_arrays(unit_file.stored)}
    total = sum(unit_file.num_bytes for unit_file in files)
    index = {"metadata": {"total_size": total}, "weight_map": names}
    entries[INDEX] = whole_file.write_json(target / INDEX, index)
    config = whole_file.json_bytes(_config(store))
    entries[CONFIG] = whole_file.describe_bytes(config)
    whole_file.write_json(target / MANIFEST, manifest)
    whole_file.write(target / CONFIG, [config])


def _companions(folder: Path) -> dict[str, bytes]:
    """Files beside the weights, by name; of a model that is one file, its tokenizer as files."""
    if folder.is_file():
        with tempfile.TemporaryDirectory() as temporary:
            Tokenizer.load(folder).backend.save_pretrained(temporary)
            return _companions(Path(temporary))
    found = sorted({path for pattern in COMPANIONS for path in folder.glob(pattern) if path.is_file()})
    return {
        path.name: read_bytes(path)
        for path in found
        if path.name not in (CONFIG, MANIFEST)
        and not path.name.endswith(".index.json")
        and path.stat().st_size <= MAX_COMPANION_BYTES
    }


def _config(store: WeightStore) -> dict[str, Any]:
    """config.json of the converted model."""
    config = store.checkpoint.config | {"quantization_config": quantization_config(store.tensors)}
    if store.tensors.is_tied:
        config |= {"tie_word_embeddings": False, TIED_HEAD: True}
    return config


def quantization_config(tensors: ModelTensors) -> dict[str, Any]:
    """What compressed-tensors calls our INT8; modules that stay float32 are named. Embeddings have scales per
    channel whatever the layers have."""
    floats = [
        part.removesuffix(".weight")
        for tensor in tensors.embedding
        if not tensor.is_matrix and len(tensor.shape) == 2
        for part in tensor.parts
    ]
    groups = {"Linear Embedding": INT8.scheme()}
    if tensors.group_size:
        embeddings = "Embedding lm_head" if tensors.is_tied else "Embedding"
        groups = {"Linear": Int8(tensors.group_size).scheme(), embeddings: INT8.scheme()}
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
