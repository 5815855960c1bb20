"""A model's files, whichever tool wrote them, as one Checkpoint with the usual names and shapes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from penstock.errors import MALFORMED, CorruptFile
from penstock.gguf_file import is_gguf
from penstock.memory.ordinary_file import FileIdentity, check_ordinary
from penstock.weights.checkpoints import checkpoint
from penstock.weights.checkpoints import folder as folders
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.quantized import quantization_config as configs
from penstock.weights.checkpoints.tensor_entry import DTYPES, TensorEntry

logger = logging.getLogger(__name__)

#: Modules that read files of other kinds, with open_checkpoint() and read_config(). What a module here names
#: is imported when a model of the kind is opened.
_GGUF, _BMINF = "penstock.weights.checkpoints.gguf_files.gguf_models", "penstock.cpm.bminf"
#: The file of a folder of BMInf.
_BMINF_FILE = "checkpoint.pt"
_PICKLED = "penstock.weights.checkpoints.torch_files.pickled_folder:open_pickled"
#: By what quantized a checkpoint: a function of the stored Checkpoint, which gives the entries that decode.
#: Those of other methods are as they are stored.
_DECODERS = {
    configs.COMPRESSED: "compressed:compressed_entries",
    configs.GPTQ: "packed:gptq_entries",
    configs.GPTQ_INT4: "gptq_int4:gptq_int4_entries",
    configs.AWQ: "awq:awq_entries",
    configs.PLANES: "planes:planes_entries",
    configs.CODES: "codes:codes_entries",
    configs.MODELOPT: "modelopt:modelopt_entries",
    **dict.fromkeys(configs.FP8, "fp8:fp8_entries"),
}
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


def _reader(folder: Path) -> ModuleType | None:
    """The module that reads a GGUF file, or a folder of BMInf's; None for other folders."""
    if is_gguf(folder):
        return import_module(_GGUF)
    if not (folder / _BMINF_FILE).is_file():
        return None
    bminf = import_module(_BMINF)
    return bminf if bminf.is_bminf(folder) else None


def _open(folder: Path, allow_pickle: bool) -> Checkpoint:
    if (reader := _reader(folder)) is not None:
        return reader.open_checkpoint(folder)  # type: ignore[no-any-return]
    with _open_stored(folder, allow_pickle) as stored:
        if stored.config.get("quantization_config") is None:
            _check_names(stored)
            return stored
        return _open_quantized(stored)


def _open_quantized(stored: Checkpoint) -> Checkpoint:
    """Raises UnsupportedModel for a method that check_quantization() does not know."""
    group_size = configs.check_quantization(stored.config)
    method = configs.method(stored.config["quantization_config"])
    entries = {
        entry.name: entry
        for entry in _decoded(stored, method)
        if not entry.name.endswith(configs.ACTIVATION_SCALES)
    }
    idle = _zeros(stored, ".weight_zero_point") | _zero_biases(stored)
    requantized = ""
    if method == configs.GPTQ and group_size is None:
        requantized = "GPTQ's groups, which are out of order (desc_act)"
    elif any(map(configs.is_fp8, stored.entries.values())):
        requantized = configs.REQUANTIZED
    elif any(name.endswith(configs.PRE_SCALE) for name in stored.entries):
        requantized = configs.REQUANTIZED_SCALED
    return Checkpoint(stored.folder, stored.config, entries, idle, requantized, stored.pickles)


def _decoded(stored: Checkpoint, method: str) -> Iterable[TensorEntry]:
    if (place := _DECODERS.get(method)) is None:
        return stored.entries.values()
    entries: Iterable[TensorEntry] = resolve_name(f"{configs.__package__}.{place}")(stored)
    return entries


def _open_stored(folder: Path, allow_pickle: bool) -> Checkpoint:
    """A folder's tensors as its files have them."""
    from penstock.weights.checkpoints.aliases import alias_of, aliased_tensors
    from penstock.weights.checkpoints.text_part import is_multimodal, text_tensors, told

    if folder.is_dir() and folders.pickles(folder):
        folders.check_adapter(folder)
        if not allow_pickle:
            folders.check_no_pickles(folder)
        config = read_config(folder) if (folder / "config.json").is_file() else {}
        return resolve_name(_PICKLED)(folder, config)  # type: ignore[no-any-return]
    stored = Checkpoint.open(folder)
    has_text_part = is_multimodal(stored.config)
    alias, stored.config = alias_of(stored.config), read_config(folder)
    if alias is not None:
        return aliased_tensors(stored, alias)
    if not has_text_part:
        return stored
    text, left_out = text_tensors(stored)
    if left_out:
        logger.info("%s: the text part is served; left out: %s", folder, told(left_out))
    return text


def read_config(folder: Path) -> dict[str, Any]:
    """The config of a folder or a GGUF file, in the form of config.json. A multimodal model has that of its
    text part. `quantization_config` has what
    AutoGPTQ and ModelOpt write into files of their own, and MLX under a key of its own. Raises
    CheckpointNotFound, CorruptFile and UnsupportedModel (GGUF files, adapters)."""
    from penstock.weights.checkpoints.aliases import aliased_config
    from penstock.weights.checkpoints.text_part import text_config

    if (reader := _reader(folder)) is not None:
        return reader.read_config(folder)  # type: ignore[no-any-return]
    config = aliased_config(text_config(checkpoint.read_config(folder)))
    mlx = config.get("quantization")
    if isinstance(mlx, dict) and "bits" in mlx:  # newer editions repeat the key, without a method's name
        return config | {"quantization_config": mlx | {"quant_method": "MLX"}}
    if config.get("quantization_config") is not None:
        return config
    beside, modelopt = folder / "quantize_config.json", folder / "hf_quant_config.json"
    if beside.is_file():
        return config | {"quantization_config": {"quant_method": "gptq"} | checkpoint.read_json(beside)}
    found = checkpoint.read_json(modelopt).get("quantization") if modelopt.is_file() else None
    if isinstance(found, dict) and (found.get("quant_algo") or found.get("kv_cache_quant_algo")):
        return config | {"quantization_config": found | {"quant_method": "modelopt"}}
    return config


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
