"""AdapterFolder: a folder as PEFT saves it, with a matrix A and a matrix B for each module. Names are those
of PEFT, or of OpenDelta inside the file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.errors import CheckpointNotFound, CorruptFile, UnsafeCheckpoint, UnsupportedModel, WrongTensor
from penstock.kernels.low_rank import BLOCK_OUTPUTS, BLOCK_RANKS
from penstock.memory.ordinary_file import FileIdentity
from penstock.weights.adapters.adapter_config import AdapterConfig
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.safetensors_header import read_header
from penstock.weights.checkpoints.tensor_entry import TensorEntry

WEIGHTS = "adapter_model.safetensors"
#: PEFT: base_model.model.MODULE.lora_A.weight. OpenDelta: MODULE.lora.lora_A.
_NAME = re.compile(r"(?:base_model\.model\.)?(.+?)\.(?:lora\.)?lora_(A|B)(?:\.default)?(?:\.weight)?")
#: Bytes. Arrays in memory begin on cache lines.
ALIGNMENT = 64
_FLOATS = ("F64", "F32", "F16", "BF16")


class Factors(NamedTuple):
    """Where A [rank, in_features] and B [out_features, rank] of a module lie."""

    a: TensorEntry
    b: TensorEntry


@dataclass(frozen=True)
class AdapterFolder:
    """An opened folder."""

    folder: Path
    config: AdapterConfig
    #: By the names of modules, without PEFT's prefix.
    modules: Mapping[str, Factors]
    #: What the file was before its header was read.
    identity: FileIdentity

    @classmethod
    def open(cls, folder: Path) -> AdapterFolder:
        """Reads the config and the header. Raises kinds of CheckpointError."""
        try:
            is_folder = folder.is_dir()
        except OSError as error:  # its name is too long
            raise CheckpointNotFound(f"{str(folder):.200} can't be read: {error.strerror}") from error
        if not is_folder:
            raise CheckpointNotFound(f"{str(folder):.200} is not a folder; give one that PEFT saved")
        config, file = AdapterConfig.read(folder), folder / WEIGHTS
        if not file.is_file():
            if (folder / "adapter_model.bin").is_file():
                raise UnsafeCheckpoint(
                    f"{folder} has its adapter only as a pickle (adapter_model.bin); save it again with "
                    "peft: save_pretrained(folder, safe_serialization=True)"
                )
            raise CheckpointNotFound(f"{folder} has no {WEIGHTS}; finish the download")
        try:
            identity = FileIdentity.of(file.stat())
            modules = _paired(file, read_header(file))
        except OSError as error:
            raise CorruptFile(f"{file} can't be read: {error.strerror}") from error
        opened = cls(folder, config, modules, identity)
        for module, factors in modules.items():
            opened._check(module, factors)
        return opened

    @property
    def num_bytes(self) -> int:
        """The most that the adapter takes in memory."""
        return sum(_num_bytes(factors) for factors in self.modules.values())

    def read(self, module: str) -> tuple[Tensor, Tensor]:
        """A and B in float16. Raises CorruptFile, and WrongTensor for numbers beyond float16's range."""
        factors = self.modules[module]
        with Checkpoint(self.folder, {}, {each.name: each for each in factors}) as checkpoint:
            checkpoint.watch({factors.a.file: self.identity})
            a, b = (checkpoint.read(each.name).to(torch.float16) for each in factors)
        for entry, tensor in zip(factors, (a, b), strict=True):
            if not bool(tensor.isfinite().all()):
                raise WrongTensor(f"{self.folder}: {entry.name} has numbers that float16 can't hold")
        return a, b

    def _check(self, module: str, factors: Factors) -> None:
        """Raises UnsupportedModel and WrongTensor."""
        if not self.config.has_target(module):
            raise UnsupportedModel(
                f"{self.folder} has an adapter of {module}, and {self.config.file.name} gives this module "
                "none (target_modules, exclude_modules, layers_to_transform): save the adapter again"
            )
        rank = self.config.rank_of(module)
        for entry, axis in zip(factors, (0, 1), strict=True):
            if entry.dtype not in _FLOATS:
                raise WrongTensor(f"{entry.name} in {entry.file} has dtype {entry.dtype}; floats are read")
            if len(entry.shape) != 2 or entry.shape[axis] != rank:
                raise WrongTensor(
                    f"{entry.name} in {entry.file} has shape {list(entry.shape)}; "
                    f"{self.config.file.name} says that its rank is {rank}"
                )


def _paired(file: Path, entries: list[TensorEntry]) -> dict[str, Factors]:
    """Raises UnsupportedModel for a tensor that is neither an A nor a B, CorruptFile for one without the
    other or none at all."""
    found: dict[str, dict[str, TensorEntry]] = {}
    for entry in entries:
        match = _NAME.fullmatch(entry.name)
        if match is None:
            raise UnsupportedModel(
                f"{file} has a tensor {entry.name}, which is no matrix of LoRA: DoRA's magnitudes, biases, "
                "embeddings and whole modules are not computed. Train the adapter without it, or merge it"
            )
        found.setdefault(match[1], {})[match[2]] = entry
    for module, pair in found.items():
        if len(pair) < 2:
            raise CorruptFile(f"{file} has lora_{min(pair)} of {module} and not the other matrix")
    if not found:
        raise CorruptFile(f"{file} has no tensor")
    return {module: Factors(pair["A"], pair["B"]) for module, pair in found.items()}


def _num_bytes(factors: Factors) -> int:
    (rank, num_inputs), (num_outputs, _) = factors.a.shape, factors.b.shape
    # Modules that are one matrix in memory (q, k and v) share a block of ranks, so that this is the most.
    ranks = -(-rank // BLOCK_RANKS) * BLOCK_RANKS
    outputs = -(-num_outputs // BLOCK_OUTPUTS) * BLOCK_OUTPUTS
    return 2 * ranks * num_inputs + 2 * rank * outputs + 4 * ranks + 3 * ALIGNMENT
