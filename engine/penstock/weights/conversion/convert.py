"""A checkpoint -> a Penstock folder: quantized once and for all, each unit in one range of a file, which is
read at once.

The folder is a Hugging Face folder in compressed-tensors' layouts: `int-quantized` for INT8, `pack-quantized`
for INT4, and layouts of our own for codes of other forms. The last file, config.json, makes the folder a
model; until then `penstock.json` tells what is done, and the next run goes on there. A file has its real name
only when all of it is on the disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from penstock.errors import CapacityError, CorruptFile
from penstock.memory.hardware import num_physical_cores
from penstock.memory.planning.plan import gib
from penstock.weights.checkpoints.checkpoint import CONFIG, MANIFEST
from penstock.weights.conversion import manifest as manifests
from penstock.weights.conversion import whole_file
from penstock.weights.conversion.companions import read_companions
from penstock.weights.conversion.converted_config import (
    converted_config,
    converted_tensors,
    low_formats,
)
from penstock.weights.conversion.report import ConversionReport
from penstock.weights.conversion.rounding import Nearest, Rounding
from penstock.weights.conversion.torch_threads import torch_threads
from penstock.weights.conversion.unit_files import StoredUnit, UnitFile, unit_files
from penstock.weights.conversion.unit_writer import UnitWriter
from penstock.weights.formats.int4_format import Int4
from penstock.weights.formats.model_formats import code_names, has_int4, has_planes
from penstock.weights.formats.stacked_format import has_steps, in_one_format
from penstock.weights.formats.weight_format import rows_of_parts
from penstock.weights.store import WeightStore
from penstock.weights.tensor_source import TensorSource
from penstock.weights.tensors import TensorSpec

logger = logging.getLogger(__name__)

#: The file with packed_shapes().
SHAPES = "model-shapes.safetensors"
INDEX = "model.safetensors.index.json"
#: Quantizing threads: four outrun the one thread that computes checksums and writes, and most disks.
MAX_THREADS = 4
#: Bytes that the disk needs beyond the files: directory entries and the file system's own needs.
SPARE_BYTES = 64 << 20


def convert(
    store: WeightStore,
    target: Path,
    report_progress: Callable[[int, int], None] | None = None,
    rounding: Rounding | None = None,
    guess_tokenizer: bool = False,
    advice: Mapping[str, Any] | None = None,
) -> ConversionReport:
    """Convert the checkpoint that `store` has opened, or go on where a run was stopped.

    report_progress(done, total) is called with bytes after each file. `rounding` takes the place of rounding
    to the nearest. `guess_tokenizer` is EngineConfig's, and `advice` is read_companions()'.

    Raises ConfigError (the target holds something else, or other tools have no name for a format of the
    weights), CapacityError (the disk is too small), CheckpointError (the source is at fault, or another
    process is converting there).
    """
    started = time.perf_counter()
    converted_config(store)  # raises before anything is written
    way = {"group_size": store.tensors.group_size, "rounding": rounding.name if rounding else None}
    way |= {"weights": code_names(store.tensors)} if has_int4(store.tensors) else {}
    if kinds := low_formats(store.tensors):
        way |= {"formats": hashlib.sha256(json.dumps(kinds).encode()).hexdigest()}
    way |= {"scales": "steps"} if any(map(has_steps, store.tensors.multiplied)) else {}
    way |= {"weights": "planes"} if has_planes(store.tensors) else {}
    source, files = manifests.source_of(store.checkpoint, way), unit_files(converted_tensors(store))
    report = ConversionReport(
        num_files=len(files), num_resumed=len(files), is_compensated=rounding is not None
    )
    manifest = manifests.find(target, source)
    # Companions come first: if one of them can't be read, nobody waits for the weights.
    companions = read_companions(store.checkpoint.folder, guess_tokenizer, advice)
    if manifest is None or not _is_current(target, files, manifest, companions):
        rounding = rounding or Nearest(store, min(num_physical_cores(), MAX_THREADS))
        with whole_file.lock(target):
            manifest = manifests.find(target, source) or manifests.begin(target, source)
            conversion = Conversion(store, target, files, manifest, report, companions)
            conversion.run(rounding, report_progress)
    for entry in manifest["files"].values():
        report.errors |= entry.get("errors", {})
    report.total_s = time.perf_counter() - started
    return report


def _is_current(
    target: Path, files: list[UnitFile], manifest: dict[str, Any], companions: dict[str, bytes]
) -> bool:
    """Whether there is nothing to do, so that the folder need not even be writable."""
    if not manifests.is_finished(target, manifest) or any(map(whole_file.is_leftover, target.iterdir())):
        return False
    entries = manifest["files"]
    return manifest["format_version"] != manifests.FORMAT_VERSION or (
        all(unit_file.name in entries for unit_file in files)
        and all(
            entries.get(name) == whole_file.describe_bytes(content) for name, content in companions.items()
        )
    )


class Conversion:
    """Writes what is missing in a folder, and keeps the folder's manifest."""

    def __init__(
        self,
        store: WeightStore,
        target: Path,
        files: list[UnitFile],
        manifest: dict[str, Any],
        report: ConversionReport,
        companions: dict[str, bytes],
    ) -> None:
        """The caller has the lock on `target`."""
        self._store = store
        self._target = target
        self._files = files
        self._manifest = manifest
        self._report = report
        self._companions = companions

    def run(self, rounding: Rounding, report_progress: Callable[[int, int], None] | None) -> None:
        done = self._manifest["files"] = self._whole_files()
        missing = [file for file in self._files if file.name not in done]
        self._report.num_resumed = len(self._files) - len(missing)
        left = sum(file.num_bytes for file in missing)
        check_space(self._target, left)
        total = sum(file.num_bytes for file in self._files)
        writer = UnitWriter(self._store, self._target, rounding, self._report)
        with (
            self._of_one_source(),
            torch_threads(1),
            closing(writer.write(self._files, done)) as written,
        ):
            for file, entry in written:
                self._store.checkpoint.check_unchanged()
                done[file.name] = entry
                whole_file.write_json(self._target / MANIFEST, self._manifest)
                left -= file.num_bytes
                if report_progress is not None:
                    report_progress(total - left, total)
            self._check_source()
        self._finish()

    def _check_source(self) -> None:
        """Raises CorruptFile if the source was changed since the conversion began."""
        folder = self._store.checkpoint.folder
        self._store.checkpoint.check_unchanged()
        if folder.is_dir() and (now := read_companions(folder)) != self._companions:
            changed = min(name for name, _ in self._companions.items() ^ now.items())
            raise CorruptFile(f"{folder / changed} was changed while the model was converted")

    @contextmanager
    def _of_one_source(self) -> Iterator[None]:
        """Files that were made of a source before it was changed don't go together with those that a later
        run would make of it, so none of them stays. Raises CorruptFile."""
        try:
            yield
        except CorruptFile as fault:
            try:
                self._check_source()
            except CorruptFile as change:
                error = change
            else:
                raise fault  # a disk's, or a file's own: what was written stays, and the next run goes on
            written = {file.name for file in self._files} | self._manifest["files"].keys()
            for name in sorted(written | {CONFIG}, key=lambda name: name != CONFIG):
                (self._target / name).unlink(missing_ok=True)
            (self._target / MANIFEST).unlink(missing_ok=True)
            raise CorruptFile(
                f"{error}. The conversion ended, and what it had written to {self._target} is deleted: run "
                "it again"
            ) from error

    def _whole_files(self) -> dict[str, Any]:
        """The manifest's entries of files that are as they were written."""
        done = manifests.whole_files(self._target, self._manifest)
        for name in self._manifest["files"].keys() - done.keys():
            if (self._target / name).exists():
                logger.warning(
                    "%s is not what was written, so the file is written again", self._target / name
                )
        return done

    def _finish(self) -> None:
        """Everything that is not weights; config.json, which makes the folder a model, last of all."""
        entries = self._manifest["files"]
        for name, content in self._companions.items():
            if entries.get(name) != whole_file.describe_bytes(content):
                (self._target / name).parent.mkdir(exist_ok=True)
                entries[name] = whole_file.write(self._target / name, [content])
        shapes = packed_shapes(self._files, self._store.source)
        if shapes:
            entries[SHAPES] = whole_file.write(self._target / SHAPES, [safetensors.torch.save(shapes)])
        entries[INDEX] = whole_file.write_json(self._target / INDEX, self._index(shapes))
        config = whole_file.json_bytes(converted_config(self._store))
        entries[CONFIG] = whole_file.describe_bytes(config)
        whole_file.write_json(self._target / MANIFEST, self._manifest)
        whole_file.write(self._target / CONFIG, [config])

    def _index(self, shapes: dict[str, Tensor]) -> dict[str, Any]:
        """model.safetensors.index.json."""
        names = {
            array.name: file.name for file in self._files for unit in file.units for array in unit.arrays()
        }
        names |= dict.fromkeys(shapes, SHAPES)
        total = sum(file.num_stored_bytes for file in self._files)
        return {"metadata": {"total_size": total}, "weight_map": names}


def packed_shapes(files: list[UnitFile], source: TensorSource) -> dict[str, Tensor]:
    """The shapes of matrices that lie in words, as compressed-tensors wants them beside the words: int64 [2]
    by name."""
    found = dict[str, Tensor]()
    units = [unit for file in files for unit in file.units]
    for tensor, stored in (pair for unit in units for pair in _matrices(unit)):
        rows = [end - start for _, _, start, end in rows_of_parts(source, tensor)]
        shapes = [torch.tensor([count, tensor.shape[1]]) for count in rows]
        found |= dict(zip((f"{part}_shape" for part in stored.parts), shapes, strict=True))
    return found


def _matrices(unit: StoredUnit) -> Iterator[tuple[TensorSpec, TensorSpec]]:
    """The matrices in 4 bits of a unit, each with its form under the names in the file."""
    for tensor, stored in zip(unit.tensors, unit.stored, strict=True):
        for pair in zip(in_one_format(tensor), in_one_format(stored), strict=True):
            if isinstance(pair[0].format, Int4):
                yield pair


def check_space(target: Path, needed: int) -> None:
    """Raises CapacityError if the disk has no room for `needed` bytes."""
    free = shutil.disk_usage(target).free
    if needed and needed + SPARE_BYTES > free:
        raise CapacityError(
            f"the converted model needs {gib(needed)} more, and {gib(SPARE_BYTES)} to spare, but only "
            f"{gib(free)} are free where {target} lies; make room or choose another disk"
        )
