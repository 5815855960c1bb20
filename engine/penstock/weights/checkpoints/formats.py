"""A model's files, whichever tool wrote them, as one Checkpoint with the usual names and shapes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.errors import MALFORMED, CorruptFile
from penstock.gguf_file import is_gguf
from penstock.memory.ordinary_file import FileIdentity, check_ordinary
from penstock.weights.checkpoints import checkpoint
from penstock.weights.checkpoints import folder as folders
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.gguf_files import gguf_models
from penstock.weights.checkpoints.gguf_files.gguf_models import open_gguf
from penstock.weights.checkpoints.published import bminf
from penstock.weights.checkpoints.published.bminf_file import is_bminf
from penstock.weights.checkpoints.published.pickled_folder import open_pickled
from penstock.weights.checkpoints.quantized import quantization_config as configs
from penstock.weights.checkpoints.quantized.awq import awq_entries
from penstock.weights.checkpoints.quantized.codes import codes_entries
from penstock.weights.checkpoints.quantized.compressed import ACTIVATION_SCALES, compressed_entries
from penstock.weights.checkpoints.quantized.fp8 import REQUANTIZED, is_fp8, without_fp8
from penstock.weights.checkpoints.quantized.gptq_int4 import gptq_int4_entries
from penstock.weights.checkpoints.quantized.packed import gptq_entries
from penstock.weights.checkpoints.quantized.planes import planes_entries
from penstock.weights.checkpoints.tensor_entry import DTYPES, TensorEntry
from penstock.weights.checkpoints.text_part import is_multimodal, text_config, text_tensors

#: Endings of tensors that show what quantized a checkpoint where config.json does not name it.
FOREIGN_TENSORS = {
    ".SCB": "bitsandbytes LLM.int8",
    ".weight.absmax": "bitsandbytes with 4 bits",
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".weight_scale_inv": "FP8",
    "_proj_blocks": "MXFP4",
}


def open_checkpoint(folder: Path, allow_pickle: bool = False) -> Checkpoint:
    """A model's folder or GGUF file, whichever tool wrote it, with each tensor under its usual name and in
    its usual shape. `allow_pickle` is the one of EngineConfig.

    Raises Checkpoint.open()'s errors, UnsupportedModel and WrongTensor.
    """
    before = _files_of(folder)
    try:
        opened = _open(folder, allow_pickle)
    except MALFORMED as error:
        raise CorruptFile(
            f"the headers or configs of {folder} make no sense ({error!r}); download the model again"
        ) from error
    opened.watch(before)
    return opened


def _files_of(folder: Path) -> dict[Path, FileIdentity]:
    """What the files of a folder, or those beside a file, are now."""
    found = dict[Path, FileIdentity]()
    with contextlib.suppress(OSError):  # what is wrong with the folder, opening it tells
        for path in (folder if folder.is_dir() else folder.parent).iterdir():
            with contextlib.suppress(OSError):  # a link that leads nowhere
                found[path] = FileIdentity.of(path.stat())
    if folder.is_dir():  # transformers and other readers open what they find
        for path, identity in found.items():
            check_ordinary(path, identity.rights[0])
    return found


def _open(folder: Path, allow_pickle: bool) -> Checkpoint:
    if is_gguf(folder):
        return open_gguf(folder)
    if is_bminf(folder):
        return bminf.open_bminf(folder)
    with _open_stored(folder, allow_pickle) as stored:
        quantization = stored.config.get("quantization_config")
        if quantization is None:
            _check_names(stored)
            return stored
        group_size = configs.check_quantization(stored.config)
        if configs.method(quantization) == configs.GPTQ:
            return _open_gptq(stored, group_size is not None)
        return _open_quantized(stored, quantization)


def _open_quantized(stored: Checkpoint, quantization: dict[str, Any]) -> Checkpoint:
    """A checkpoint of a format that check_quantization() knows, other than GPTQ with 8 bits."""
    has_fp8 = any(map(is_fp8, stored.entries.values()))
    entries = {
        entry.name: entry
        for entry in _quantized_entries(stored, quantization)
        if not entry.name.endswith(ACTIVATION_SCALES)
    }
    idle = _zeros(stored, ".weight_zero_point") | _zero_biases(stored)
    requantized = REQUANTIZED if has_fp8 else ""
    return Checkpoint(stored.folder, stored.config, entries, idle, requantized, stored.pickles)


def _quantized_entries(stored: Checkpoint, quantization: dict[str, Any]) -> Iterable[TensorEntry]:
    method = configs.method(quantization)
    if method == configs.GPTQ_INT4:
        is_first, is_symmetric = not configs.is_second(quantization), quantization.get("sym", True)
        return gptq_int4_entries(stored, is_first, is_symmetric, bool(quantization.get("desc_act")))
    if method == configs.AWQ:
        return awq_entries(stored)
    if method == configs.MXFP4:
        return stored.entries.values()
    if method == configs.PLANES:
        return planes_entries(stored)
    if method == configs.CODES:
        return codes_entries(stored)
    block = configs.fp8_block(stored.config)
    if method == configs.COMPRESSED:
        return compressed_entries(stored, quantization, block)
    return without_fp8(stored, block)


def _open_stored(folder: Path, allow_pickle: bool) -> Checkpoint:
    """A folder's tensors as its files have them."""
    if folder.is_dir() and folders.pickles(folder):
        folders.check_adapter(folder)
        if not allow_pickle:
            folders.check_no_pickles(folder)
        return open_pickled(folder, read_config(folder) if (folder / "config.json").is_file() else {})
    stored = Checkpoint.open(folder)
    has_text_part = is_multimodal(stored.config)
    stored.config = read_config(folder)
    return text_tensors(stored) if has_text_part else stored


def read_config(folder: Path) -> dict[str, Any]:
    """The config of a folder or a GGUF file, in the form of config.json. A multimodal model has that of its
    text part. `quantization_config` has what
    AutoGPTQ and ModelOpt write into files of their own, and MLX under a key of its own. Raises
    CheckpointNotFound, CorruptFile and UnsupportedModel (GGUF files, adapters)."""
    if is_gguf(folder):
        return gguf_models.read_config(folder)
    if is_bminf(folder):
        return bminf.read_config(folder)
    config = text_config(checkpoint.read_config(folder))
    mlx = config.get("quantization")
    if isinstance(mlx, dict) and "bits" in mlx:  # newer editions repeat the key, without a method's name
        return config | {"quantization_config": mlx | {"quant_method": "MLX"}}
    if config.get("quantization_config") is not None:
        return config
    beside, modelopt = folder / "quantize_config.json", folder / "hf_quant_config.json"
    if beside.is_file():
        return config | {"quantization_config": {"quant_method": "gptq"} | checkpoint.read_json(beside)}
    found = checkpoint.read_json(modelopt).get("quantization") if modelopt.is_file() else None
    if isinstance(found, dict) and found.get("quant_algo"):  # without it only keys and values were quantized
        return config | {"quantization_config": found | {"quant_method": "modelopt"}}
    return config


def _open_gptq(stored: Checkpoint, keeps_integers: bool) -> Checkpoint:
    quantization = stored.config["quantization_config"]
    # The first version of the format stores each zero point minus one.
    zero = 128 if configs.is_second(quantization) else 127
    is_reordered = bool(quantization.get("desc_act"))
    entries = {entry.name: entry for entry in gptq_entries(stored, keeps_integers, zero, is_reordered)}
    requantized = "" if keeps_integers else "GPTQ's groups, which are out of order (desc_act)"
    return Checkpoint(
        stored.folder, stored.config, entries, _zero_biases(stored), requantized, stored.pickles
    )


def _zero_biases(stored: Checkpoint) -> frozenset[str]:
    """Biases that AutoGPTQ gives to modules of a model that has none: they are zero."""
    return frozenset(
        name for name in _zeros(stored, ".bias") if f"{name.removesuffix('bias')}qweight" in stored.entries
    )


def _zeros(stored: Checkpoint, ending: str) -> frozenset[str]:
    """Tensors with this ending whose elements are all zero."""
    names = (entry.name for entry in stored.entries.values() if entry.name.endswith(ending))
    return frozenset(
        name for name in names if stored.entries[name].dtype in DTYPES and not bool(stored.read(name).any())
    )


def _check_names(stored: Checkpoint) -> None:
    """Raises UnsupportedModel for tensors that only a quantized checkpoint has."""
    for name in stored.entries:
        for ending, method in FOREIGN_TENSORS.items():
            if name.endswith(ending):
                raise configs.unsupported(
                    f"{method}: the files hold {name}, and config.json does not mention it"
                )
